"""CAST Engine: how training data is made, stage by stage."""
