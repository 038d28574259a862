"""The learned, action-conditioned video world model."""
