"""How it is learned from: one objective, one signed weight per latent position."""
