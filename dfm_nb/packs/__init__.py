"""How samples become packed sequences."""
