"""Options of the value-guided policy. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from vla_rl.algorithms.offpolicy.config import ChooseBy
from vla_rl.config import ConfigError
from vla_rl.policies.base import CONFIG_FILE, CheckpointInfo, PolicyConfig, check_sizes, resolve_path
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy


_WHAT = ("a critic that chooses among its chunks", "an actor that chooses the noise its chunks start from")


class ValueGuidedConfig(PolicyConfig):
    """A frozen policy with what chooses its chunks, or the noise they start from, as `run: online` and `hil` save."""

    kind: Literal["value_guided"] = "value_guided"
    candidates: PositiveInt | None = Field(
        default=None, description="Chunks of the base's that the critic chooses among; empty: as it was saved."
    )
    choose_by: ChooseBy | None = Field(
        default=None, description="Which of them the critic prefers, as `online.choose_by`; empty: as it was saved."
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> ValueGuidedPolicy:
        """See `PolicyConfig.build`."""
        from vla_rl.algorithms.offpolicy.noise import SteeredPolicy

        if self.path is None:
            raise ConfigError("policy.path: a value_guided policy is made by `run: online`; give the folder it saved")
        policy = self.load(resolve_path(self.path), device)
        if lacking := sorted(set(policy.cameras) - set(env_spec.cameras)):
            raise ConfigError(f"policy.cameras: {lacking} not in environment {env_spec.kind!r}; set env.cameras")
        check_sizes(policy, env_spec)
        for name in ("candidates", "choose_by"):
            given = getattr(self, name)
            if given is not None and isinstance(policy, SteeredPolicy):
                raise ConfigError(
                    f"policy.{name}: got {given!r}, but this policy has its starting noise chosen, and considers one "
                    "chunk; leave it out"
                )
            if given is not None:
                setattr(policy, name, given)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> ValueGuidedPolicy:
        """See `PolicyConfig.load`."""
        from vla_rl.algorithms.offpolicy.noise import SteeredPolicy
        from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy

        steered = "noise" in json.loads((Path(folder) / CONFIG_FILE).read_text())
        return (SteeredPolicy if steered else ValueGuidedPolicy).load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        file = folder / CONFIG_FILE
        values = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(values, dict) or values.get("kind") != "value_guided":
            return None
        critic, noise = values["critic"], values.get("noise")
        chosen = {"candidates": str(values["candidates"]), "chosen by": values.get("choose_by", "value")}
        if noise:
            chosen = {"starting noise": f"{noise['shape'][0]} x {noise['shape'][1]} numbers within {noise['scale']:g}"}
        return CheckpointInfo(
            family=f"frozen policy with {_WHAT[bool(noise)]}, saved by `run: online`",
            kind="value_guided",
            facts={
                **chosen,
                "critic": f"{critic['members']} networks of width {critic['hidden']} on {critic['place']} features",
                "edits": "none" if values["editor"] is None else f"up to {values['editor']['scale']:g} spreads",
                "base": str(folder / "base"),
            },
            rl_reason="its base is frozen: `run: online`, or train the base",
        )
