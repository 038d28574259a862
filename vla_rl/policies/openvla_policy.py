"""The OpenVLA policy: acting, likelihoods and behaviour cloning around `OpenVLANetwork`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.policies import checkpoint_files, lora
from vla_rl.policies.action_tokens import ActionTokenizer
from vla_rl.policies.base import CONFIG_FILE, PolicyOutput, read_policy_config
from vla_rl.policies.normalization import NormStats, QuantileStats
from vla_rl.policies.openvla import Architecture, OpenVLAConfig
from vla_rl.policies.openvla_network import OpenVLANetwork
from vla_rl.policies.tokenizer import WordTokenizer
from vla_rl.precision import wants_bf16
from vla_rl.types import ActionChunk, EnvSpec, Observation

_NEW_HEADS = ("value_head.", "keyframe_head.")


class OpenVLAPolicy(nn.Module):
    """A `Policy` (vla_rl/interfaces.py) of the OpenVLA architecture.

    Make one with `OpenVLAConfig.build` or `load_policy`. A fresh policy acts only after
    `set_norm_stats`, since its actions are relative to the training data's quantiles.
    """

    def __init__(
        self, config: OpenVLAConfig, architecture: Architecture, tokenizer: WordTokenizer, stats: NormStats | None
    ):
        super().__init__()
        self.config = config
        self.architecture = architecture
        self.tokenizer = tokenizer
        self.norm_stats = stats
        self.action_tokenizer = ActionTokenizer(architecture.action_bins)
        self.network = OpenVLANetwork(architecture, config.value_head, config.keyframe_loss_weight > 0)
        self.network.language_model.model.gradient_checkpointing = config.gradient_checkpointing
        self.chunk_size = architecture.chunk_size
        self.action_dim = architecture.action_dim
        self.cameras = config.cameras
        self.uses_state = architecture.state_dim is not None

    # --- making, saving, loading ------------------------------------------------------------

    @classmethod
    def create(cls, config: OpenVLAConfig, env_spec: EnvSpec, device: str | torch.device, seed: int) -> Self:
        """Fresh weights, the same for the same seed. See `PolicyConfig.build`."""
        architecture = config.architecture(env_spec.action_dim, env_spec.state_dim)
        words = architecture.llm.vocab_size - architecture.action_bins
        tokenizer = WordTokenizer.for_instructions(env_spec.tasks.values(), words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = cls(config, architecture, tokenizer, None)
            policy.network.initialize()
            if config.lora is not None:
                lora.add_adapters(policy.network, config.lora)
        return policy._finish(device)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: str | torch.device = "cpu",
        seed: int = 0,
        chosen: Mapping[str, Any] | None = None,
    ) -> Self:
        """The policy in a folder, with what a recipe `chosen` anew (critic, adapters, precision, ...).

        Weights that the folder lacks (a critic, adapters) are fresh from `seed`.

        Raises:
            ValueError: a file is missing or damaged. ConfigError: `chosen` contradicts the checkpoint.
        """
        folder = Path(folder)
        values = read_policy_config(folder)
        try:
            saved = OpenVLAConfig.model_validate(values["config"])
            architecture = Architecture.model_validate(values["architecture"])
        except (KeyError, ValidationError) as error:
            raise ValueError(
                f"{folder / CONFIG_FILE}: not a config of this package's OpenVLA policy: {error}"
            ) from error
        config = saved.with_chosen(dict(chosen or {}))
        stats = NormStats.read(folder, architecture.action_dim, architecture.state_dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = cls(config, architecture, WordTokenizer.read(folder), stats)
            if saved.lora is not None:
                lora.add_adapters(policy.network, saved.lora)
            checkpoint_files.read_weights(folder, policy.network, may_miss=_NEW_HEADS)
            if saved.lora is None and config.lora is not None:
                lora.add_adapters(policy.network, config.lora)
        return policy._finish(device)

    def _finish(self, device: str | torch.device) -> Self:
        self.to(device)
        kind = self.device.type
        kernel = self.config.attention
        self.network.set_kernel(("eager" if kind == "cpu" else "sdpa") if kernel == "auto" else kernel)
        bf16 = wants_bf16(self.config.precision, kind)
        self.network.compute_dtype = torch.bfloat16 if bf16 else torch.float32
        trained = {id(p) for p in self.trainable_parameters()}
        for parameter in self.network.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        return self

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the policy so that `load_policy(folder)` restores it. The folder appears whole or not at all.

        Args:
            folder: is replaced when it exists.
            dtype: store the weights so (bfloat16 halves the file); None: as they are, exactly.
        """

        def write(path: Path) -> None:
            config = {
                "format": 1,
                "kind": self.config.kind,
                "config": self.config.model_copy(update={"path": None}).model_dump(mode="json"),
                "architecture": self.architecture.model_dump(mode="json"),
            }
            checkpoint_files.write_weights(path, self.network, config, dtype)
            self.tokenizer.write(path)
            if self.norm_stats is not None:
                self.norm_stats.write(path)

        checkpoint_files.write_folder(Path(folder), write)

    def check_env(self, env_spec: EnvSpec) -> None:
        """Check that the policy can act in environments of this spec.

        Raises:
            ConfigError: a camera is missing, or the state or action size differs.
        """
        missing = [camera for camera in self.cameras if camera not in env_spec.cameras]
        if missing:
            raise ConfigError(
                f"policy.cameras: {missing} not in environment {env_spec.kind!r}, which has {list(env_spec.cameras)}; "
                "set env.cameras to include them, or policy.cameras to those there are"
            )
        for name, own, theirs in (
            ("action_dim", self.action_dim, env_spec.action_dim),
            ("state_dim", self.architecture.state_dim, env_spec.state_dim),
        ):
            if own is not None and own != theirs:
                raise ConfigError(
                    f"policy {name}: the policy has {own}, environment {env_spec.kind!r} has {theirs}; "
                    "start from a policy made for this environment"
                )

    def set_norm_stats(
        self, action: Mapping[str, Any], state: Mapping[str, Any] | None = None, name: str = "dataset"
    ) -> None:
        """Set the training data's statistics: {"q01", "q99"[, "mask"]} of actions and of states.

        `mask` is False for dimensions that are used as they are (the gripper).

        Raises:
            ValueError: wrong sizes or values, or no state statistics for a policy that reads the state.
        """
        state_dim = self.architecture.state_dim
        if state is None and state_dim is not None:
            raise ValueError("state statistics: this policy reads the state, so q01 and q99 of it are needed; got None")
        self.norm_stats = NormStats(
            name,
            QuantileStats.of("action", action, self.action_dim),
            None if state is None else QuantileStats.of("state", state, state_dim or len(state.get("q01", ()))),
        )

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that `config.trainable` selects: those to hand to the optimiser."""
        unused = self.network.vision_backbone.unused_parameters()
        mode = self.config.trainable
        chosen = []
        for name, parameter in self.network.named_parameters():
            adapted = lora.is_adapter(name) or name.startswith(_NEW_HEADS)
            full = mode == "full" or (mode == "frozen_vision" and not name.startswith("vision_backbone."))
            base_of_adapter = ".base_layer." in name
            if id(parameter) not in unused and (adapted or (full and not base_of_adapter)):
                chosen.append(parameter)
        return chosen

    def merge_lora(self) -> None:
        """Add the adapters to the weights they adapt, so that a plain checkpoint can be saved."""
        lora.merge_adapters(self.network)
        trainable = "full" if self.config.trainable == "lora" else self.config.trainable
        self.config = self.config.model_copy(update={"lora": None, "trainable": trainable})
        self._finish(self.device)

    @property
    def device(self) -> torch.device:
        return self.network.language_model.lm_head.weight.device

    # --- Policy -----------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment. See `Policy.act`.

        Raises:
            ValueError: no statistics yet, a camera is missing, wrong state size, or temperature < 0.
        """
        stats = self._stats()
        _check_temperature(temperature, lowest=0.0)
        with self._autocast():
            prefix, valid = self._prefix(obs)
            if self.architecture.decoder == "parallel":
                hidden = self.network.hidden(prefix, valid, None)
                with self._full_precision():
                    logits = self.network.logits(hidden)
                tokens = draw(logits, temperature, generator)
            else:
                tokens, logits, hidden = self._decode(prefix, valid, temperature, generator)
        log_prob = None
        if temperature > 0:
            log_prob = self._shape(_log_prob(logits / temperature, tokens)).cpu().numpy()
        value = self._value(hidden)
        drawn = self._shape(tokens).cpu().numpy()
        return ActionChunk(
            actions=stats.action.unnormalize(self.action_tokenizer.decode(drawn)),
            tokens=drawn,
            log_prob=log_prob,
            value=None if value is None else value.cpu().numpy(),
        )

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient. See `Policy.evaluate`.

        Raises:
            ValueError: the chunk has no tokens, or temperature <= 0.
        """
        if chunk.tokens is None:
            raise ValueError("chunk.tokens: None; this policy can only evaluate chunks that carry action tokens")
        _check_temperature(temperature, lowest=1e-6)
        tokens = torch.from_numpy(chunk.tokens).to(self.device).flatten(1)
        hidden, logits = self._read(obs, tokens)
        log_probs = torch.log_softmax(logits / temperature, -1)
        return PolicyOutput(
            log_prob=self._shape(log_probs.gather(-1, tokens[..., None]).squeeze(-1)),
            entropy=self._shape(-(log_probs.exp() * log_probs).sum(-1)),
            value=self._value(hidden),
        )

    def bc_loss(
        self,
        obs: Observation,
        actions: np.ndarray,
        valid: np.ndarray | None = None,
        keyframe: np.ndarray | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Cross-entropy of the demonstrated action tokens. See `Policy.bc_loss`.

        Args:
            obs: B observations.
            actions: float32 (B, H, A), environment units.
            valid: bool (B, H), False where the chunk runs past the episode's end; None: all valid.
            keyframe: float32 (B, 3), end-effector position in metres when the gripper next opens or
                closes, or at the episode's end: the target of an auxiliary loss, weighted by
                `keyframe_loss_weight`; rows with NaN are left out.

        Returns:
            loss and metrics: token_accuracy, action_l1 (environment units, greedy), bc_loss and,
            with keyframes, keyframe_loss.
        """
        stats = self._stats()
        if actions.shape[1:] != (self.chunk_size, self.action_dim):
            raise ValueError(
                f"actions: shape {actions.shape}, expected (B, {self.chunk_size}, {self.action_dim}) "
                "(policy.chunk_size actions per chunk)"
            )
        encoded = self.action_tokenizer.encode(stats.action.normalize(actions))
        tokens = torch.from_numpy(encoded).to(self.device).flatten(1)
        rows: np.ndarray = np.ones(actions.shape[:2], dtype=bool) if valid is None else valid
        weight = torch.from_numpy(rows).to(self.device).float().repeat_interleave(self.action_dim, 1)
        total = weight.sum().clamp_min(1.0)
        hidden, logits = self._read(obs, tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(weight)
        loss = (losses * weight).sum() / total
        metrics: dict[str, Any] = {"bc_loss": loss.item()}
        if self.network.keyframe_head is not None and keyframe is not None:
            keyframe_loss = self._keyframe_loss(hidden, keyframe)
            loss = loss + self.config.keyframe_loss_weight * keyframe_loss
            metrics["keyframe_loss"] = keyframe_loss.item()
        with torch.no_grad():
            greedy = logits.argmax(-1)
            metrics["token_accuracy"] = (((greedy == tokens) * weight).sum() / total).item()
            decoded = stats.action.unnormalize(self.action_tokenizer.decode(self._shape(greedy).cpu().numpy()))
            metrics["action_l1"] = float(np.abs(decoded - actions)[rows].mean()) if rows.any() else 0.0
        return loss, metrics

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """Features float32 (B, hidden): mean hidden state of the action positions. No gradient."""
        if self.architecture.decoder == "parallel":
            return self._read(obs, None)[0].mean(1)
        with self._autocast():
            prefix, valid = self._prefix(obs)
            return self._decode(prefix, valid, 0.0, None)[2].mean(1)

    # --- parts ------------------------------------------------------------------------------

    def _read(self, obs: Observation, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states (B, n, hidden) and logits (B, n, bins), float32, of given tokens (B, n)."""
        with self._autocast():
            prefix, valid = self._prefix(obs)
            hidden = self.network.hidden(prefix, valid, tokens)
        return hidden, self.network.logits(hidden)

    def _decode(
        self, prefix: Tensor, valid: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token by token: tokens (B, n), logits (B, n, bins), hidden states (B, n, hidden)."""
        hidden, past = self.network.start(prefix, valid)
        tokens, logits, hiddens = [], [], []
        for i in range(self.architecture.num_action_tokens):
            if i > 0:
                valid = F.pad(valid, (0, 1), value=True)
                hidden, past = self.network.step(tokens[-1], valid, past)
            with self._full_precision():
                logits.append(self.network.logits(hidden))
            hiddens.append(hidden)
            tokens.append(draw(logits[-1], temperature, generator))
        return torch.cat(tokens, 1), torch.cat(logits, 1), torch.cat(hiddens, 1)

    def _value(self, hidden: Tensor) -> Tensor | None:
        if self.network.value_head is None:
            return None
        first = hidden[:, 0]
        return self.network.value_head(first.detach() if self.config.value_detach else first)

    def _keyframe_loss(self, hidden: Tensor, keyframe: np.ndarray) -> Tensor:
        stats = self._stats().state
        if stats is None:
            raise ValueError(
                "keyframe: needs state statistics, since positions are normalised by them; see set_norm_stats"
            )
        known = np.asarray(np.isfinite(keyframe).all(1))
        target = 2.0 * (keyframe - stats.q01[:3]) / (stats.q99[:3] - stats.q01[:3] + 1e-8) - 1.0
        target = torch.from_numpy(np.where(known[:, None], target, 0.0).astype(np.float32)).to(self.device)
        assert self.network.keyframe_head is not None, "checked by the caller"
        error = F.smooth_l1_loss(self.network.keyframe_head(hidden.mean(1)), target, reduction="none").mean(1)
        weight = torch.from_numpy(known).to(self.device).float()
        return (error * weight).sum() / weight.sum().clamp_min(1.0)

    def _prefix(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Embeddings and validity of everything before the action positions."""
        prompt, prompt_valid = self._prompt(obs.instruction)
        return self.network.prefix(self._images(obs), self._state(obs), prompt, prompt_valid)

    def _images(self, obs: Observation) -> Tensor:
        """uint8 (B, cameras, size, size, 3), resized when the environment's images are larger or smaller."""
        missing = [camera for camera in self.cameras if camera not in obs.images]
        if missing:
            raise ValueError(f"observation lacks the images of {missing}; it has {sorted(obs.images)}")
        images = []
        size = self.architecture.image_size
        for camera in self.cameras:
            image = torch.from_numpy(np.ascontiguousarray(obs.images[camera])).to(self.device)
            if image.shape[1:3] != (size, size):
                pixels = image.permute(0, 3, 1, 2).float()
                pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
                image = pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            images.append(image)
        return torch.stack(images, 1)

    def _state(self, obs: Observation) -> Tensor | None:
        """float32 (B, S) in [-1, 1]; None when the policy does not read it."""
        size = self.architecture.state_dim
        if size is None:
            return None
        if obs.state.shape[1:] != (size,):
            raise ValueError(f"observation state has shape {obs.state.shape}, this policy expects (B, {size})")
        stats = self._stats().state
        if stats is None:
            raise ValueError("state statistics are not set; call set_norm_stats with those of the training data")
        return torch.from_numpy(stats.normalize(obs.state)).to(self.device)

    def _prompt(self, instructions: list[str]) -> tuple[Tensor, Tensor]:
        """int64 ids and bool validity (B, P): BOS, padding, the rest of the prompt."""
        prompts = [self.tokenizer.encode_prompt(text) for text in instructions]
        longest = max(len(ids) for ids in prompts)
        ids = np.full((len(prompts), longest), self.architecture.llm.vocab_size, dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[0] = prompt[0]
            row[longest - len(prompt) + 1 :] = prompt[1:]
        prompt_ids = torch.from_numpy(ids).to(self.device)
        return prompt_ids, prompt_ids != self.architecture.llm.vocab_size

    def _stats(self) -> NormStats:
        if self.norm_stats is None:
            raise ValueError(
                "this policy has no action statistics yet; train it by behaviour cloning first, "
                "or call set_norm_stats with those of its training data"
            )
        return self.norm_stats

    def _shape(self, x: Tensor) -> Tensor:
        """(B, n) -> (B, H, A)."""
        return x.reshape(-1, self.chunk_size, self.action_dim)

    def _autocast(self) -> torch.autocast:
        dtype = self.network.compute_dtype
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)

    def _full_precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Tokens int64 (...) of logits float32 (..., bins): greedy at temperature 0, else by inverse CDF."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    device = logits.device if generator is None else generator.device
    uniform = torch.rand(logits.shape[:-1], generator=generator, device=device, dtype=torch.float64).to(logits.device)
    threshold = uniform[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_max_(logits.shape[-1] - 1)


def _log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability float32 (...) of tokens under logits (..., bins)."""
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)


def _check_temperature(temperature: float, lowest: float) -> None:
    if not temperature >= lowest:
        raise ValueError(f"temperature: got {temperature}, must be at least {lowest:g}")
