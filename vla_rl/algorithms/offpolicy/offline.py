"""The contract of the `offline` section: how a policy is improved from logged episodes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vla_rl.config import Config
from vla_rl.interfaces import Policy
from vla_rl.policies.base import PolicyConfig
from vla_rl.training.config import SFTConfig
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from vla_rl.algorithms.offpolicy.features import FeatureCache


@dataclass(frozen=True)
class LoggedRun:
    """What a run learns from logged episodes with.

    Attributes:
        folder: the run's. sft: the logged episodes, and the cloning's options. spec: of the policy's environment.
        log: called with (step, metrics). show: says what is done. cache: keeps what the policy makes of the episodes.
    """

    folder: Path
    sft: SFTConfig
    seed: int
    spec: EnvSpec
    log: Callable[[int, dict[str, Any]], None]
    show: Callable[[str], None]
    cache: FeatureCache | None = None

    @property
    def examples(self) -> Path:
        """Where what is learned from is kept, with figures about it."""
        return self.folder / "examples"


class OfflineConfig(Config):
    """How a policy is improved from the episodes in `sft.datasets`; `sft` has the cloning's own options."""

    kind: str = "best_of_n"
    control: Literal["none", "shuffled_outcomes"] = Field(
        default="none",
        description="Negative control: outcomes shuffled among each task's episodes before anything is learned.",
    )
    evaluate: Literal["before_and_after", "after", "never"] = Field(
        default="before_and_after", description="When to run the `eval` section's evaluation."
    )

    def refuses(self, sft: SFTConfig) -> str:
        """Return what is wrong with the options of the cloning for this method; "" if nothing is."""
        return ""

    def learner(self, policy: Policy) -> Policy:
        """Return what of a policy is improved.

        Raises:
            ConfigError: it cannot be by this method.
        """
        return policy

    def improve(self, policy: Policy, run: LoggedRun) -> dict[str, Any]:
        """Improve a policy in place, from the run's last checkpoint on, and save it as the run's.

        Returns:
            Where the policy is, how many steps there were, what was found.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement improve(policy, run)")

    def finished(self, policy: Policy, folder: Path) -> PolicyConfig | None:
        """Save what goes with the policy in its folder; return what builds it; None: the recipe's section does."""
        return None
