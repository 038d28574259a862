"""YAML recipes."""
