"""MetaWorld's 50 tabletop tasks with a Sawyer arm, and their scripted experts."""

from sim.metaworld.config import MetaWorldConfig

__all__ = ["MetaWorldConfig"]
