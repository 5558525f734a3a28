"""Pure tensor functions: no config, files, logging or devices."""
