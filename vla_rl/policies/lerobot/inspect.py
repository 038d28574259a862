"""What a LeRobot checkpoint is, for `vla-rl inspect`: from its JSON files. Imports neither torch nor lerobot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.policies.base import CONFIG_FILE, read_json
from vla_rl.policies.checkpoint_info import CheckpointInfo
from vla_rl.policies.lerobot.options import FLOW_TYPES, RL_TYPES, check_not_adapters, image_names, no_rl_reason

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
