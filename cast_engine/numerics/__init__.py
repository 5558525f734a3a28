"""Pure tensor functions: noise, SDE steps, advantages, maps and signed weights. No config, files or devices."""
