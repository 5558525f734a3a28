"""The VLM side: atom scores and attention maps."""
