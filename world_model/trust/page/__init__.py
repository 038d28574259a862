"""The trust page and its charts."""
