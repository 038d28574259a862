"""The built-in MuJoCo tabletop."""

from sim.rendering.devices import check_backend

check_backend()  # MuJoCo reads MUJOCO_GL as it is imported, and would not say what to do about it.

from sim.tabletop.env import TabletopConfig  # noqa: E402
from sim.tabletop.expert import ExpertConfig  # noqa: E402
from sim.tabletop.tasks import SuccessConfig  # noqa: E402

__all__ = ["ExpertConfig", "SuccessConfig", "TabletopConfig"]
