"""LIBERO through hf-libero and robosuite 1.4. Importing this loads neither: they come with `LiberoConfig.make`."""

from sim.libero.env import LiberoConfig

__all__ = ["LiberoConfig"]
