"""Helpers without a topic of their own: atomic writes, progress, timing, precision, a run's folder."""
