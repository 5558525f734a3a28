"""What is stored: records, graphs, manifests and job files."""
