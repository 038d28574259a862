"""What stands for the environment in a training run whose episodes are imagined in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vla_rl.rollout.source import LaterEnv
from vla_rl.types import EpisodeSpec
from world_model.env.places import Places
from world_model.metadata import shortened

if TYPE_CHECKING:
    from world_model.env.config import WorldModelEnvConfig


class ImaginedElsewhere(LaterEnv):
    """Knows what trust says, and deals the episodes, so that each draws what it would draw here; loads no weights.

    Raises:
        TrustError: trust is missing or fails, and `env.trust.ignore` is not set.
    """

    def __init__(self, config: WorldModelEnvConfig) -> None:
        super().__init__(config)
        self.admission, horizon = config.admitted()
        self.spec = shortened(self.spec, horizon)
        self._places = Places(all_alike=not config.imagination.fresh_noise)

    @property
    def observed_every(self) -> int:
        """See `ImaginedEnv`; starts the environment."""
        return self._built().observed_every  # type: ignore[attr-defined]

    def deal(self, specs: Sequence[EpisodeSpec], size: int = 1) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
        return self._places.deal(specs, size)

    def state(self) -> dict[str, int]:
        """See `StatefulEnv.state`."""
        return self._places.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """See `StatefulEnv.load_state`."""
        self._places.load_state(state)
