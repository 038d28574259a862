"""Policies of LeRobot as a recipe names them: options, and how they are built, loaded and recognized. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.policies.base import CONFIG_FILE, CheckpointInfo, read_json, resolve_path
from vla_rl.policies.lerobot.options import (
    FLOW_TYPES,
    RL_TYPES,
    LeRobotOptions,
    check_not_adapters,
    image_names,
    no_rl_reason,
)
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.lerobot.policy import LeRobotPolicy


class LeRobotConfig(LeRobotOptions):
    """A policy of LeRobot's: those of `RL_TYPES` act, clone and learn by RL; any other is evaluated and deployed."""

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> LeRobotPolicy:
        """See `PolicyConfig.build`."""
        from vla_rl.policies.lerobot.files import create, load

        if self.path is None:
            policy = create(self, env_spec, device, seed)
        else:
            chosen = {name: getattr(self, name) for name in self.model_fields_set}
            policy = load(resolve_path(self.path), device, seed=seed, chosen=chosen)
        policy.check_env(env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> LeRobotPolicy:
        """See `PolicyConfig.load`."""
        from vla_rl.policies.lerobot.files import load

        return load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        return describe(folder)


_DECODERS = {"pi0_fast": "autoregressive action tokens (FAST)", "diffusion": "denoising diffusion", "act": "regression"}
_HOW = {
    "pi0_fast": "one likelihood a chunk, set algo.ratio_level: chunk",
    "diffusion": "by the likelihood of its denoising steps (DPPO)",
    "act": "by a Gaussian around its chunk, of the set width policy.sampling.std_floor or a learned one",
}


def describe(folder: Path) -> CheckpointInfo | None:
    """What a LeRobot checkpoint is, for `vla-rl inspect`; None for a folder that LeRobot did not write.

    Raises:
        ValueError: a LeRobot checkpoint whose configuration is damaged, or that holds adapters alone.
    """
    file = folder / CONFIG_FILE
    values = read_json(file) if file.is_file() else {}
    kind = values.get("type")
    if "kind" in values or not isinstance(kind, str):
        return None
    check_not_adapters(folder)
    inputs, outputs = values.get("input_features") or {}, values.get("output_features") or {}
    is_flow = kind in FLOW_TYPES
    decoder = "flow matching" if is_flow else _DECODERS.get(kind, kind)
    facts = {
        "decoder": decoder,
        "chunk size": values.get("chunk_size") or values.get("horizon") or values.get("action_chunk_size"),
        "actions executed": values.get("n_action_steps") or values.get("action_chunk_size"),
        "denoising steps": _steps(values) if is_flow or kind == "diffusion" else None,
        "cameras": ", ".join(image_names(values)),
        "state": inputs.get("observation.state", {}).get("shape", [None])[0],
        "action": outputs.get("action", {}).get("shape", [None])[0],
        "normalization": ", ".join(f"{k} {v}" for k, v in values.get("normalization_mapping", {}).items()),
    }
    return CheckpointInfo(
        family=f"LeRobot {kind}",
        kind="lerobot",
        facts={name: str(value) for name, value in facts.items() if value is not None},
        rl=("GRPO", "MC-GRPO", "RLOO", "PPO") if kind in RL_TYPES else (),
        rl_reason=no_rl_reason(kind) or f"{_HOW.get(kind, 'by Flow-SDE or Flow-Noise')}; PPO needs value_head: true",
    )


def _steps(values: dict[str, Any]) -> Any:
    names = ("num_steps", "num_inference_steps", "num_denoising_steps")
    return next((values[name] for name in names if values.get(name)), None)
