"""LeRobot policy behind our `Policy`: observations into its batches, its actions into ours; what learns by RL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.policies.base import check_sizes
from vla_rl.policies.lerobot import writing
from vla_rl.policies.lerobot.options import LeRobotOptions, image_name, no_rl_reason
from vla_rl.types import ActionChunk, EnvSpec, Observation

ACTION, STATE = "action", "observation.state"


class LeRobotPolicy(nn.Module, Policy):
    """A `Policy` (vla_rl/interfaces.py) around a LeRobot policy, to evaluate and deploy.

    Make one with `LeRobotConfig.build` or `load_policy`. LeRobot's own processors rename, normalize, tokenize and
    bring actions back. A decision knows only its own observation: policies that read a history get it filled with
    the present observation, as LeRobot does at an episode's start, and ACT's temporal ensembling does nothing.

    Attributes:
        core: LeRobot's policy. preprocessor, postprocessor: its pipelines.
        chunk_size: actions of a decision, all of which are executed.
        no_rl_reason: why RL cannot train it; None where it can.
    """

    resizes_images = True  # SmolVLA and pi0 resize, and pad, themselves.

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__()
        self.config = config
        self.core = core
        self.preprocessor, self.postprocessor = preprocessor, postprocessor
        features = core.config.input_features or {}
        self.image_keys = [key for key, feature in features.items() if feature.type.value == "VISUAL"]
        self.state_dim: int | None = features[STATE].shape[0] if STATE in features else None
        self.action_dim: int = core.config.output_features[ACTION].shape[0]
        self.camera_of = self._match_cameras()
        self.cameras = tuple(dict.fromkeys(self.camera_of.values()))
        self.uses_state = self.state_dim is not None
        self.chunk_size = self._num_actions()
        self.no_rl_reason = no_rl_reason(core.config.type)
        self.saves_sharded = config.lora is None  # Merging adapters takes whole weights.

    def _match_cameras(self) -> dict[str, str]:
        """LeRobot's image key -> the environment's camera, in the policy's order."""
        names = {image_name(key): key for key in self.image_keys}
        unknown = sorted(set(self.config.camera_map) - set(names))
        if unknown:
            raise ConfigError(f"policy.camera_map: {unknown} not among this policy's images: {', '.join(names)}")
        # LeRobot's own names of images that no camera gives, and that it fills in.
        blank = {f"empty_camera_{number}" for number in range(getattr(self.core.config, "empty_cameras", 0))}
        given = {name: None if name in blank else name for name in names} | self.config.camera_map
        cameras = {key: given[name] for name, key in names.items()}
        return {key: camera for key, camera in cameras.items() if camera is not None}

    def _num_actions(self) -> int:
        config = self.core.config
        most = getattr(config, "n_action_steps", None) or getattr(config, "action_chunk_size", None) or 1
        return self._at_most(most)

    def _at_most(self, most: int) -> int:
        if (self.config.num_actions or 1) > most:
            raise ConfigError(f"policy.num_actions: got {self.config.num_actions}, this policy gives at most {most}")
        return self.config.num_actions or most

    # --- facts about the data -----------------------------------------------------------------

    def check_env(self, env_spec: EnvSpec) -> None:
        """Check that the policy can act in environments of this spec.

        Raises:
            ConfigError: a camera is missing, or the state or action size differs.
        """
        missing = [camera for camera in self.cameras if camera not in env_spec.cameras]
        if missing:
            names = {image_name(key): camera for key, camera in self.camera_of.items()}
            raise ConfigError(
                f"policy.camera_map: this policy's images come from {names}, but environment {env_spec.kind!r} has "
                f"{list(env_spec.cameras)}. Say which is which, e.g. policy.camera_map.{next(iter(names))}="
                f"{env_spec.cameras[0]} (null: there is no such camera), or add cameras to env.cameras."
            )
        check_sizes(self, env_spec)

    @property
    def norm_stats(self) -> dict[str, Any] | None:
        """LeRobot's statistics of the actions in the postprocessor; None when there are none yet."""
        for step in self._normalizers():
            if (step.stats or {}).get(ACTION):
                return step.stats[ACTION]
        return None

    def _normalizers(self) -> list[Any]:
        steps = [*self.postprocessor.steps, *self.preprocessor.steps]
        return [step for step in steps if isinstance(step, NormalizerProcessorStep | UnnormalizerProcessorStep)]

    def set_norm_stats(
        self, action: Mapping[str, Any], state: Mapping[str, Any] | None = None, name: str = "dataset"
    ) -> None:
        """Set the statistics in LeRobot's processors: {"mean", "std", "min", "max", "q01", "q99"[, "mask"]} of each.

        QUANTILE10 needs "q10" and "q90". Dimensions with `mask` False (the gripper) pass through unchanged.

        Raises:
            ValueError: a kind that LeRobot's normalization of this policy needs is missing, or of the wrong size.
        """
        if state is None and self.state_dim is not None:
            raise ValueError("state statistics: this policy reads the state, so they are needed; got None")
        stats = {ACTION: self._statistics("ACTION", action, self.action_dim)}
        if state is not None and self.state_dim is not None:
            stats[STATE] = self._statistics("STATE", state, self.state_dim)
        for step in self._normalizers():
            step.stats = {**(step.stats or {}), **stats}
            step.to(step.device)

    def forget_norm_stats(self) -> None:
        """Have no statistics of actions and states any more, as fresh weights."""
        for step in self._normalizers():
            step.stats = {name: values for name, values in (step.stats or {}).items() if name not in (ACTION, STATE)}
            step.to(step.device)

    def _statistics(self, kind: str, given: Mapping[str, Any], size: int) -> dict[str, np.ndarray]:
        mode = self.core.config.normalization_mapping.get(kind)
        needed = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max")}
        needed |= {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
        wanted = needed.get(getattr(mode, "value", str(mode)), ())
        missing = [key for key in wanted if key not in given]
        if missing:
            raise ValueError(f"{kind.lower()} statistics: {missing} missing, which {mode} needs; found {sorted(given)}")
        mask = np.asarray(given.get("mask", np.ones(size)), bool)
        identity = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}
        identity |= {"q10": -1.0, "q90": 1.0}
        result = {}
        for key, neutral in identity.items():
            if key not in given:
                continue
            value = np.asarray(given[key], np.float32)
            if value.shape != (size,) or not np.isfinite(value).all():
                raise ValueError(f"{kind.lower()} statistics: {key} must be {size} finite numbers, got {given[key]}")
            result[key] = np.where(mask, value, np.float32(neutral))
        return result

    # --- Policy -------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """The policy's own actions, drawn as LeRobot draws them at any temperature; no likelihood. See `Policy.act`."""
        actions = self._select(self._batch(obs), generator)
        return ActionChunk(self._to_environment(actions))

    def _select(self, batch: dict[str, Any], generator: torch.Generator | None) -> Tensor:
        """Normalized actions (B, H, A) through LeRobot's `select_action`, from an empty history."""
        seed = int(torch.randint(2**62, (), generator=generator)) if generator is not None else 0
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)  # LeRobot's samplers draw from the global stream.
            self.core.reset()
            return torch.stack([self.core.select_action(dict(batch)) for _ in range(self.chunk_size)], 1)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Refused: there is no likelihood.

        Raises:
            ValueError: always, with the reason.
        """
        raise ValueError(f"RL cannot train this policy: {self.no_rl_reason}")

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Refused: such policies are trained by LeRobot.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"behavior cloning of LeRobot's {self.core.config.type!r} is not done here: train it with LeRobot's own "
            "`lerobot-train`, then evaluate its checkpoint with policy.kind=lerobot"
        )

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """The normalized chunk it would execute, and the normalized state, (B, D). See `Policy.embed`."""
        batch = self._batch(obs)
        parts = [self._select(batch, None).flatten(1)]
        return torch.cat([*parts, batch[STATE].float()] if self.uses_state else parts, 1).float()

    def save(self, folder: Path) -> None:
        """Write it in LeRobot's layout, with our options beside. The folder appears whole or not at all."""
        extra = writing.extra_weights(self)
        writing.save(Path(folder), self.config, self.core, self.preprocessor, self.postprocessor, extra)

    @property
    def device(self) -> torch.device:
        return next(self.core.parameters()).device

    # --- in and out ---------------------------------------------------------------------------

    def _batch(self, obs: Observation, actions: np.ndarray | None = None) -> dict[str, Any]:
        """LeRobot's preprocessed batch of an observation and, to learn from, of actions (B, C, A)."""
        if self.norm_stats is None and self._needs_statistics():
            raise ValueError(
                "this policy has no action statistics yet, as its weights are fresh: clone first (`vla-rl sft`) and "
                "name the result, policy.path=RUN/policy; or from Python call set_norm_stats (docs/own_environment.md)"
            )
        missing = [camera for camera in self.cameras if camera not in obs.images]
        if missing:
            raise ValueError(f"observation lacks the images of {missing}; it has {sorted(obs.images)}")
        batch: dict[str, Any] = {"task": list(obs.instruction)}
        for key, camera in self.camera_of.items():
            batch[key] = self._image(key, obs.images[camera])
        if self.state_dim is not None:
            if obs.state.shape[1:] != (self.state_dim,):
                raise ValueError(f"observation state has shape {obs.state.shape}, expected (B, {self.state_dim})")
            batch[STATE] = torch.from_numpy(np.ascontiguousarray(obs.state, np.float32))
        if actions is not None:
            batch[ACTION] = torch.from_numpy(np.ascontiguousarray(actions, np.float32))
        return self.preprocessor(batch)

    def _image(self, key: str, image: np.ndarray) -> Tensor:
        """float32 (B, 3, height, width) in [0, 1], at the size that the policy was trained with."""
        if image.dtype != np.uint8 or image.ndim != 4 or image.shape[-1] != 3:
            raise ValueError(f"observation image for {key}: expected uint8 (B, height, width, 3), got {image.shape}")
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(0, 3, 1, 2).float() / 255
        size = tuple(self.core.config.input_features[key].shape[1:])
        if self.resizes_images and pixels.shape[2:] != size:
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True).clamp(0, 1)
        return pixels

    def _needs_statistics(self) -> bool:
        mode = self.core.config.normalization_mapping.get("ACTION")
        return getattr(mode, "value", mode) not in (None, "IDENTITY")  # A recipe's options give it as text.

    def _to_environment(self, actions: Tensor) -> np.ndarray:
        """Normalized actions (B, H, A) as float32 in the environment's units."""
        return self.postprocessor(actions.float()).float().cpu().numpy()


class LearningPolicy(LeRobotPolicy):
    """Base of the LeRobot policies that learn here: by behavior cloning with LeRobot's own loss, and by RL.

    Attributes:
        demonstration_size: actions that cloning learns at once.
        value_head: the critic; None without one.
    """

    demonstration_size: int

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        for name in ("adapt_to_pi_aloha", "use_relative_actions"):
            if getattr(core.config, name, False):
                raise ConfigError(f"LeRobot option {name}=true: not supported here; use a checkpoint without it")
        self.demonstration_size = self.planned

    def _add_critic(self, feature_size: int) -> None:
        """Make `value_head`, where the config asks for it, on features (B, F) and the state."""
        self.value_head = ValueHead(feature_size + (self.state_dim or 0)) if self.config.value_head else None

    @property
    def planned(self) -> int:
        """Actions from the present on that the network gives at once."""
        return self.core.config.chunk_size

    def _num_actions(self) -> int:
        if self.config.num_actions is None:
            return self.core.config.n_action_steps
        return self._at_most(self.planned)

    def _needs_every_camera(self) -> None:
        missing = [image_name(key) for key in self.image_keys if key not in self.camera_of]
        if missing:
            raise ConfigError(f"policy.camera_map: {missing[0]}: null, but this policy reads every image it has")

    def _with_state(self, features: Tensor, batch: dict[str, Any]) -> Tensor:
        """Features (B, F) and the normalized state."""
        return torch.cat([features, batch[STATE].float()], 1) if self.uses_state else features

    def _value(self, features: Tensor, batch: dict[str, Any]) -> Tensor | None:
        if self.value_head is None:
            return None
        features = self._with_state(features, batch)
        return self.value_head(features.detach())  # The critic learns beside the network, and does not change it.

    def _padded(self, actions: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Actions float32 (B, C, A) of a whole chunk, the last one repeated, and which count, bool (B, C).

        Raises:
            ValueError: more are given than the policy learns at once.
        """
        size, given = self.demonstration_size, actions.shape[1]
        if given > size:
            raise ValueError(f"actions: got {given} a chunk, this policy denoises {size} at once")
        counted = np.zeros((len(actions), size), bool)
        counted[:, :given] = True if valid is None else valid
        return np.concatenate([actions, np.repeat(actions[:, -1:], size - given, 1)], 1), counted

    def _executed(self, x: Tensor) -> Tensor:
        """(B, C, D) -> (B, H, A): the steps that are executed, without padded dimensions."""
        return x[:, : self.chunk_size, : self.action_dim]

    def _autocast(self) -> torch.autocast:
        """In acting by CUDA graphs it keeps no copy of a weight, which a graph would read for ever."""
        asked, kind = self.config.precision, self.device.type
        keeps_copies = torch.is_grad_enabled() or not self.config.cuda_graphs
        bf16 = kind == "cuda" if asked == "auto" else asked == "bf16"
        return torch.autocast(kind, torch.bfloat16, bf16, keeps_copies)


class ValueHead(nn.Module):
    """V of what is seen, float32 (B,): a small network on features (B, F), normalized. Starts at 0."""

    def __init__(self, size: int, hidden: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Linear(size, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.inner(self.norm(features)))).squeeze(-1)
