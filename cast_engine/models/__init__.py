"""What differs between image models, behind one protocol."""
