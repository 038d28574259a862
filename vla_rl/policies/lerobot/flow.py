"""SmolVLA, pi0, pi0.5 and X-VLA as policies that RL can train: paths with a likelihood, a critic, cloning.

Real-time chunking (Black et al. 2025, arXiv 2506.07339): a flow policy goes on from actions that are under way.

While a chunk is computed the robot plays the rest of the last one, so the new chunk must agree with it there.
Denoising is guided to that: at each step the velocity is corrected towards a sample whose beginning is that rest
(PiGDM, arXiv 2305.10844). The guidance is that of LeRobot's `RTCProcessor`, which leaves the network's Jacobian out, so
a step costs no backward pass; here as a function of tensors alone, which a CUDA graph can hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from lerobot.configs import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from vla_rl.common.cuda_graphs import ReplayedPass
from vla_rl.interfaces import PolicyOutput
from vla_rl.policies import lora
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.policies.lerobot import flow_sampling
from vla_rl.policies.lerobot.flow_sampling import Velocity
from vla_rl.policies.lerobot.networks import NETWORKS, FlowNetwork, Prefix
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.lerobot.policy import ACTION, LearningPolicy
from vla_rl.types import PREFIX_SCHEDULES, ActionChunk, ActionPrefix, Observation


class LeRobotFlowPolicy(LearningPolicy, GuidablePolicy):
    """A flow policy of LeRobot's that acts by the ODE (temperature 0) or with a likelihood, and learns by RL.

    At temperature 0 the start noise comes from the generator, as in LeRobot's own evaluations, or is always the
    same without one. `ActionChunk.path` is as `flow_sampling` says. The log-probability (B, H, A) is of the
    components that reach the environment: those of padded dimensions, and of steps beyond `num_actions`, are left
    out, as in pi_RL.
    """

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        self.network: FlowNetwork = NETWORKS[core.config.type](core)
        self.num_steps = config.sampling.num_steps or self.network.num_steps
        self._add_critic(self.network.feature_size)
        learns_noise = config.sampling.method == "flow_noise"
        bounds = config.sampling.noise_bounds
        sizes = self.network.hidden_size, self.network.width
        self.noise_head = NoiseHead(*sizes, bounds) if learns_noise else None
        # X-VLA resizes only where its config says so; the others always.
        self.replayed = ReplayedPass(self._replayable, self) if config.cuda_graphs else None
        self.resizes_images = getattr(core.config, "resize_imgs_with_padding", ()) is None

    # --- Policy -------------------------------------------------------------------------------

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """See `GuidablePolicy.act`."""
        return GuidablePolicy.act(self, obs, generator, temperature)

    @torch.no_grad()
    @lora.acts_merged
    def act_guided(
        self,
        obs: Observation,
        plain: Sequence[Observation],
        weight: float,
        generator: torch.Generator | None,
        temperature: float,
    ) -> ActionChunk:
        """See `GuidablePolicy`: the velocity is guided; Flow-Noise's spread is that of `obs`."""
        if temperature < 0:
            raise ValueError(f"temperature: got {temperature}, must be at least 0")
        batches = [self._batch(each) for each in (obs, *plain)]
        shape = (obs.batch_size, self.core.config.chunk_size, self.network.width)
        source = torch.Generator().manual_seed(0) if generator is None and temperature == 0 else generator
        noise = flow_sampling.normal(shape, source, self.device)
        injected = flow_sampling.inject(noise, self.num_steps, self.config.sampling, temperature, generator)
        strength = noise.new_full((), weight) if plain else None
        x, *rest = self._denoised(batches, noise, injected, strength)
        path, log_prob, value = (None if each is None else each.cpu().numpy() for each in rest)
        return ActionChunk(actions=self._to_environment(x), path=path, log_prob=log_prob, value=value)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient. See `Policy.evaluate`.

        Raises:
            ValueError: the chunk has no path, or one of another sampler; temperature <= 0.
        """
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, must be above 0")
        path = torch.from_numpy(self._check_path(chunk.path)).to(self.device)
        lora.forget_merged(self)
        batch = self._batch(obs)
        with self._autocast():
            prefix = self.network.prefix(batch)
        velocity, keeps = self._velocity(prefix), self.network.keeps_noise
        log_prob, entropy = flow_sampling.path_log_prob(velocity, path, self.config.sampling, temperature, keeps)
        return PolicyOutput(self._executed(log_prob), self._executed(entropy), self._value(prefix.features, batch))

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """LeRobot's flow-matching loss on actions float32 (B, C, A); fewer than C leave the rest out of the loss.

        In evaluation mode noise and times depend on the actions alone, so that validation losses can be compared.

        Args:
            valid: bool (B, C or fewer), False where a chunk runs past its episode's end.
        """
        padded, counted = self._padded(actions, valid)
        batch = self._batch(obs, padded)
        lora.forget_merged(self)
        target = self.network.target(batch)
        source = None if self.training else torch.Generator().manual_seed(zlib.crc32(actions.tobytes()))
        noise = flow_sampling.normal(target.shape, source, target.device)
        level = self.network.random_levels(len(target), source).to(target.device)
        weight = torch.from_numpy(counted).to(target.device)
        with self._autocast():
            loss = self.network.loss(batch, target, noise, level, weight, self.action_dim)
        return loss, {"flow_loss": loss.detach()}

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """Mean vision-language features and the normalized state, (B, D). See `Policy.embed`."""
        batch = self._batch(obs)
        with self._autocast():
            prefix = self.network.prefix(batch)
        return self._with_state(prefix.features, batch)

    # --- steering by the starting noise -------------------------------------------------------

    @property
    def noise_shape(self) -> tuple[int, int]:
        """See `NoiseSteeredPolicy`. Padded dimensions start at 0."""
        return self.core.config.chunk_size, self.network.width if self.network.keeps_noise else self.action_dim

    @torch.no_grad()
    @lora.acts_merged
    def steer(self, obs: Observation, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, np.ndarray]:
        """What the ODE makes of noise that is chosen. See `NoiseSteeredPolicy`."""
        batch = self._batch(obs)
        with self._autocast():
            prefix = self.network.prefix(batch)
        features, chunks = self._with_state(prefix.features, batch), []
        for chosen in choose(features).to(self.device).unbind(1):
            noise = chosen.new_zeros(obs.batch_size, self.core.config.chunk_size, self.network.width)
            noise[..., : chosen.shape[-1]] = chosen
            chunks.append(self._to_environment(self._denoised([prefix], noise)[0]))
        return features, np.stack(chunks, 1)

    # --- parts --------------------------------------------------------------------------------

    def _denoised(
        self, seen: Sequence[dict[str, Any] | Prefix], noise: Tensor, *rest: Any
    ) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        """`_chunk`, without gradients: as one CUDA graph, where the policy has them."""
        if self.replayed is None:
            return self._chunk(seen, noise, *rest)
        tensors = [s if isinstance(s, Prefix) else {k: v for k, v in s.items() if torch.is_tensor(v)} for s in seen]
        given, self._given = tree_flatten((tensors, noise, *rest))
        x, *others = self.replayed(*given)
        return cast(Tensor, x), *others

    def _replayable(self, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return self._chunk(*tree_unflatten(given, self._given))

    def _chunk(
        self,
        seen: Sequence[dict[str, Any] | Prefix],
        noise: Tensor,
        injected: flow_sampling.Injected | None = None,
        weight: Tensor | None = None,
        underway: Underway | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """All that the device computes of a chunk: normalized actions (B, H, A), path, log-probability, value.

        Args:
            seen: batches, or what was read of them; a second one is what guidance by `weight` leads away from.
        """
        with self._autocast():
            prefixes = [each if isinstance(each, Prefix) else self.network.prefix(each) for each in seen]
        velocities = [self._velocity(prefix) for prefix in prefixes]
        velocity = flow_sampling.guided(velocities, 1.0 if weight is None else weight)
        if underway is not None:
            velocity = guided(velocity, underway)
        sampling, keeps = self.config.sampling, self.network.keeps_noise
        drawn = flow_sampling.denoise(velocity, noise, self.num_steps, sampling, injected, keeps)
        log_prob = None if drawn.log_prob is None else self._executed(drawn.log_prob)
        value = None if isinstance(seen[0], Prefix) else self._value(prefixes[0].features, seen[0])
        return self._executed(self.network.to_actions(drawn.x)), drawn.path, log_prob, value

    def _velocity(self, prefix: Prefix) -> flow_sampling.Velocity:
        """Velocity and Flow-Noise's standard deviation, float32, given what was seen."""

        def velocity(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
            with self._autocast():
                speed, hidden = self.network.velocity(prefix, x, level)
                return speed, None if self.noise_head is None else self.noise_head(hidden.float())

        if not self.config.gradient_checkpointing:
            return velocity

        def recomputed(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
            if not torch.is_grad_enabled():
                return velocity(x, level)
            return cast(tuple[Tensor, Tensor | None], checkpoint(velocity, x, level, use_reentrant=False))

        return recomputed

    def _check_path(self, path: np.ndarray | None) -> np.ndarray:
        if path is None:
            raise ValueError("chunk.path: None; this policy can only evaluate chunks that carry a denoising path")
        config = self.core.config
        tail = (config.chunk_size, self.network.width + 1)
        points, one_step = path.shape[1] if path.ndim == 4 else 0, 3 if self.network.keeps_noise else 2
        if path.shape[2:] != tail or points < 2 or (points != one_step and not self.config.sampling.joint):
            wanted = "points" if self.config.sampling.joint else one_step
            raise ValueError(
                f"chunk.path has shape {path.shape}, this policy's is (B, {wanted}, {', '.join(map(str, tail))}); "
                "it was drawn with other policy.sampling options"
            )
        return path


class ContinuingFlowPolicy(LeRobotFlowPolicy):
    """A flow policy that LeRobot's real-time chunking can guide: SmolVLA, pi0 and pi0.5."""

    @torch.no_grad()
    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        """The ODE's chunk that goes on from a prefix: real-time chunking. See `ContinuingPolicy` and its module.

        For robots alone: it has no likelihood, and RL's rollouts, where nothing moves while a chunk is computed, are
        drawn by `act`.

        Raises:
            ValueError: as `act`; a prefix of another shape, or options out of range.
        """
        size = self.core.config.chunk_size
        prefix.check(obs.batch_size, size, self.action_dim)
        config = rtc_config(prefix, self.core.config.rtc_config)
        batch = self._batch(obs, prefix.actions)
        leftover = batch.pop(ACTION).to(self.device, torch.float32)
        source = torch.Generator().manual_seed(0) if generator is None else generator
        noise = flow_sampling.normal((len(leftover), size, self.core.config.max_action_dim), source, self.device)
        underway = as_underway(leftover, prefix.num_frozen, config, noise.shape)
        return ActionChunk(actions=self._to_environment(self._denoised([batch], noise, None, None, underway)[0]))


class NoiseHead(nn.Module):
    """Flow-Noise's standard deviation (B, C, D) between two bounds, from the action expert's hidden states.

    Starts at the geometric mean of the bounds everywhere.
    """

    def __init__(self, size: int, width: int, bounds: tuple[float, float], hidden: int = 64) -> None:
        super().__init__()
        self.low, self.high = (float(np.log(bound)) for bound in bounds)
        self.inner = nn.Linear(size, hidden)
        self.out = nn.Linear(hidden, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        share = self.out(torch.tanh(self.inner(hidden))).sigmoid()
        return (self.low + (self.high - self.low) * share).exp()


def rtc_config(prefix: ActionPrefix, own: Any) -> Any:
    """LeRobot's `RTCConfig` for a prefix: what it says, else the checkpoint's `own` (or None), else LeRobot's defaults.

    The horizon is at least the number of frozen actions; LeRobot would freeze no more than the horizon.

    Raises:
        ValueError: an option out of range.
    """
    config = replace(own or RTCConfig(), enabled=True, debug=False)
    if prefix.prefix_attention_schedule is not None:
        if prefix.prefix_attention_schedule not in PREFIX_SCHEDULES:
            raise ValueError(
                f"prefix_attention_schedule: got {prefix.prefix_attention_schedule!r}, must be one of "
                f"{', '.join(PREFIX_SCHEDULES)}"
            )
        config = replace(config, prefix_attention_schedule=RTCAttentionSchedule(prefix.prefix_attention_schedule))
    if prefix.max_guidance_weight is not None:
        config = replace(config, max_guidance_weight=prefix.max_guidance_weight)
    horizon = config.execution_horizon if prefix.execution_horizon is None else prefix.execution_horizon
    return replace(config, execution_horizon=max(horizon, prefix.num_frozen))


class Underway(NamedTuple):
    """What guides a sample to begin as the actions that are under way.

    Attributes:
        actions: normalized, float32 (B, C, D), padded with 0.
        weights: how much each of the chunk's actions is to agree with them, float32 (C, 1).
        most: bound of the guidance's weight, float32 ().
    """

    actions: Tensor
    weights: Tensor
    most: Tensor


def as_underway(leftover: Tensor, num_frozen: int, config: Any, shape: torch.Size) -> Underway:
    """Prepare actions that are under way for samples of this shape, (B, C, D), on the device of `leftover`.

    Args:
        leftover: float32 (B, P, A), normalized, P and A at most the sample's.
        config: LeRobot's `RTCConfig`.
    """
    short = shape[1] - leftover.shape[1], shape[2] - leftover.shape[2]
    horizon = min(config.execution_horizon, leftover.shape[1])
    weights = RTCProcessor(config).get_prefix_weights(num_frozen, horizon, shape[1])
    most = torch.full((), config.max_guidance_weight, dtype=torch.float32, device=leftover.device)
    return Underway(F.pad(leftover, (0, short[1], 0, short[0])), weights[:, None].to(leftover.device), most)


def guided(velocity: Velocity, given: Underway) -> Velocity:
    """The velocity that leads to samples which begin as the actions that are under way."""

    def corrected(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
        speed, std = velocity(x, level)
        t = level[:, None, None]
        error = (given.actions - (x - t * speed)) * given.weights
        guidance = torch.minimum(t / (1 - t) * ((1 - t) ** 2 + t**2) / t**2, given.most)
        return speed - guidance * error, std

    return corrected
