"""The learned, action-conditioned video world model. Not implemented yet."""
