"""The advantage-conditioned policy as a recipe names it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat

from vla_rl.config import ConfigError
from vla_rl.policies.base import CONFIG_FILE, PolicyConfig, check_sizes, read_json, resolve_path
from vla_rl.policies.checkpoint_info import CheckpointInfo
from vla_rl.policies.inspect import describe
from vla_rl.policies.load import load_policy
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.algorithms.offpolicy.advantage_conditioned import AdvantageConditionedPolicy


class AdvantageConditionedConfig(PolicyConfig):
    """A policy that knows which of its decisions were better than expected, as `offline.method=recap` saves it."""

    kind: Literal["advantage_conditioned"] = "advantage_conditioned"
    guidance: NonNegativeFloat | None = Field(
        default=None,
        description="Weight of classifier-free guidance: 1: only the positive word; 0: as without it; more: farther "
        "from what it does without. Empty: as it was saved.",
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> AdvantageConditionedPolicy:
        """See `PolicyConfig.build`."""
        if self.path is None:
            raise ConfigError(
                "policy.path: an advantage_conditioned policy is made by `run: offline` with offline.method=recap; "
                "give the folder it saved"
            )
        policy = self._load(resolve_path(self.path), device, self.guidance)
        if lacking := sorted(set(policy.cameras) - set(env_spec.cameras)):
            raise ConfigError(f"policy.cameras: {lacking} not in environment {env_spec.kind!r}; set env.cameras")
        check_sizes(policy, env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> AdvantageConditionedPolicy:
        """See `PolicyConfig.load`."""
        return cls._load(Path(folder), device, None)

    @classmethod
    def _load(cls, folder: Path, device: str | torch.device, guidance: float | None) -> AdvantageConditionedPolicy:
        from vla_rl.algorithms.offpolicy.advantage_conditioned import BASE_FOLDER, condition

        return condition(load_policy(folder / BASE_FOLDER, device), _saved(folder) if guidance is None else guidance)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        file = folder / CONFIG_FILE
        if not file.is_file() or read_json(file).get("kind") != "advantage_conditioned":
            return None
        guidance, base = _saved(folder), describe(folder / "base")
        guided = f"it acts by guidance ({guidance:g}); RL can train it with policy.guidance=1"
        return CheckpointInfo(
            family="policy with the positive advantage word in its instruction, saved by `run: offline`",
            kind="advantage_conditioned",
            facts={"guidance": f"{guidance:g}", "base": f"{base.family}, in {folder / 'base'}"},
            rl=base.rl if guidance == 1 else (),
            rl_reason=base.rl_reason if guidance == 1 else guided,
        )


def _saved(folder: Path) -> float:
    """The guidance in a policy folder.

    Raises:
        ValueError: the file is missing or damaged.
    """
    guidance = read_json(folder / CONFIG_FILE).get("guidance")
    if not isinstance(guidance, int | float) or not guidance >= 0:
        raise ValueError(
            f"{folder / CONFIG_FILE}: guidance is {guidance!r}, must be a number of at least 0. Copy the folder again."
        )
    return float(guidance)
