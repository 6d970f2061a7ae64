"""How ranks work together."""
