"""How the shipped tiny models were trained."""
