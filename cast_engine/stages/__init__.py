"""One file per stage, in the order they run."""
