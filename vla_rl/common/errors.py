"""The error of recipes that cannot be used."""

from __future__ import annotations


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the field, the value and what is allowed."""
