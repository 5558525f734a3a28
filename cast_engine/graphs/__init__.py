"""From a prompt to its causal scene graph."""
