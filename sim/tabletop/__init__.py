"""The built-in MuJoCo tabletop. Importing this loads no simulator: MuJoCo comes with `TabletopConfig.make`."""

from sim.tabletop.config import AppearanceConfig, ExpertConfig, HabitConfig, KnockConfig, SuccessConfig, TabletopConfig

__all__ = ["AppearanceConfig", "ExpertConfig", "HabitConfig", "KnockConfig", "SuccessConfig", "TabletopConfig"]
