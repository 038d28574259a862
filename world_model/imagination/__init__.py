"""Imagining with a world model: chunks, what they are worth, and how fast that goes."""
