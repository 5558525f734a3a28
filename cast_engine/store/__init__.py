"""Shards on disk: writing, committing, sealing, reading, verifying."""
