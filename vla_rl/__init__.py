"""Post-train vision-language-action policies with reinforcement learning; what scripts need is in `training.api`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.training.api import Recipe, evaluate, load_policy, load_recipe, make_env, train

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__", "evaluate", "load_policy", "load_recipe", "make_env", "train"]


def __getattr__(name: str) -> Any:
    """Import the API when it is asked for: the commands, and a robot's client, start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vla_rl.training import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
