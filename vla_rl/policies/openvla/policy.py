"""The OpenVLA policy: acting, likelihoods and behavior cloning around `OpenVLANetwork`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.common.cuda_graphs import ReplayedPass, compile_modules
from vla_rl.common.precision import set_float32_products, wants_bf16
from vla_rl.config import ConfigError
from vla_rl.interfaces import PolicyOutput
from vla_rl.policies import lora
from vla_rl.policies.base import check_cameras, check_sizes
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.policies.normalization import NormStats, QuantileStats
from vla_rl.policies.openvla.files import folders as openvla_folders
from vla_rl.policies.openvla.files.layout import PublishedFolder, warn_of_other_suite
from vla_rl.policies.openvla.inputs import network_inputs, prepare_images
from vla_rl.policies.openvla.network import network as openvla_network
from vla_rl.policies.openvla.network.network import OpenVLANetwork, Prefix
from vla_rl.policies.openvla.options import L1_WITHOUT_SCALE, NO_LOGITS, Architecture, OpenVLAOptions
from vla_rl.policies.openvla.tokenizer import ActionTokenizer, PromptTokenizer, WordTokenizer
from vla_rl.policies.token_draws import check_temperature, decode, draw, guided, token_log_prob, uniforms
from vla_rl.types import ActionChunk, EnvSpec, Observation


class OpenVLAPolicy(nn.Module, GuidablePolicy):
    """A `Policy` (vla_rl/interfaces.py) of the OpenVLA architecture.

    Make one with `OpenVLAConfig.build` or `load_policy`. A fresh policy acts only after
    `set_norm_stats`, since its actions are relative to the training data's quantiles.

    Attributes:
        published: the checkpoint in the published layout that it came from; None for our own.
        trained_beside: names of weights that were trained whole beside adapters, before it was loaded.
        no_rl_reason: why RL cannot train it, for the user; None where it can.
    """

    def __init__(
        self,
        config: OpenVLAOptions,
        architecture: Architecture,
        tokenizer: PromptTokenizer,
        stats: NormStats | None,
        network: OpenVLANetwork,
    ):
        super().__init__()
        self.config, self.architecture, self.tokenizer = config, architecture, tokenizer
        self.norm_stats: NormStats | None = stats
        self.action_tokenizer = ActionTokenizer(architecture.action_bins)
        self.network, self.saves_sharded = network, True
        self.published: PublishedFolder | None = None
        self.trained_beside: set[str] = set()
        self.no_rl_reason: str | None = None
        whole = self._decoded if architecture.decoder == "autoregressive" else self._replayable
        self.replayed = ReplayedPass(whole, network) if config.cuda_graphs else None
        self.demonstration_size = architecture.chunk_size  # Actions that cloning learns at once.
        self.chunk_size = config.executed_actions(architecture.chunk_size)
        self.action_dim, self.state_dim = architecture.action_dim, architecture.state_dim
        self.num_tokens = self.chunk_size * self.action_dim  # Of the actions that are executed.
        self.cameras = config.cameras
        self.image_size = (architecture.image_size, architecture.image_size)
        self.uses_state = architecture.state_dim is not None
        self.draws_at_once = architecture.decoder == "parallel"
        self.no_guidance_reason = NO_LOGITS if architecture.decoder == "l1" else None

    # --- making, saving, loading ------------------------------------------------------------

    @classmethod
    def create(cls, config: OpenVLAOptions, env_spec: EnvSpec, device: str | torch.device, seed: int) -> Self:
        """Fresh weights, the same for the same seed. See `PolicyConfig.build`."""
        architecture = config.architecture(env_spec.action_dim, env_spec.state_dim)
        words = architecture.llm.vocab_size - architecture.action_bins
        tokenizer = WordTokenizer.for_instructions(env_spec.tasks.values(), words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = openvla_folders.make_network(config, architecture)
            network.initialize()
            if config.lora is not None:
                lora.add_adapters(network, config.lora)
        return cls(config, architecture, tokenizer, None, network).finish(device)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: str | torch.device = "cpu",
        seed: int = 0,
        chosen: Mapping[str, Any] | None = None,
        for_training: bool = False,
        action_dim: int | None = None,
    ) -> Self:
        """The policy in a folder, with what a recipe `chosen` anew (critic, adapters, precision, ...).

        Weights that the folder lacks (a critic, adapters) are fresh from `seed`. A checkpoint in OpenVLA's published
        layout is read shard by shard straight to the device, so that no second copy of it is ever in memory.

        Args:
            for_training: hold the weights that will be trained in float32, where the others may be bfloat16.
            action_dim: A of a published checkpoint whose statistics come from data, where its weights leave A open.

        Raises:
            ValueError: a file is missing or damaged. ConfigError: `chosen` contradicts the checkpoint.
        """
        saved = openvla_folders.load(folder, device, seed, chosen or {}, for_training, action_dim)
        policy = cls(saved.config, saved.architecture, saved.tokenizer, saved.norm_stats, saved.network)
        policy.published, policy.trained_beside = saved.published, saved.trained_beside
        policy.no_rl_reason = saved.no_rl_reason
        return policy.finish(device)

    def finish(self, device: str | torch.device) -> Self:
        """Move to the device and set up what depends on it; called once, when the weights are there."""
        self.to(device)
        kind, kernel = self.device.type, self.config.attention
        self.network.set_kernel(("eager" if kind == "cpu" else "sdpa") if kernel == "auto" else kernel)
        self.network.language_model.model.gradient_checkpointing = self.config.gradient_checkpointing
        if self.config.compile:
            compile_modules(self.network.repeated_layers())
        set_float32_products(self.config.precision, kind)
        bf16 = wants_bf16(self.config.precision, kind)
        if not bf16 and self.config.weights == "bf16":
            raise ConfigError(
                "policy.weights: got 'bf16', but policy.precision computes in float32 here; set precision=bf16, or "
                "leave weights at auto"
            )
        self.network.compute_dtype = torch.bfloat16 if bf16 else torch.float32
        self.sharding_dtype = torch.bfloat16 if bf16 else None  # Autocast would copy the layers to it.
        if self.network.action_head is not None and self.network.scale_head is None:
            self.no_rl_reason = L1_WITHOUT_SCALE
        trained = {id(p) for p in self.trainable_parameters()}
        for parameter in self.network.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        return self

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the policy so that `load_policy(folder)` restores it. The folder appears whole or not at all.

        A policy that came in OpenVLA's published layout is written in it, with the keys, shapes and dtypes that it
        had; one with adapters as a PEFT folder that names its base (`vla-rl merge` makes a whole one of it).

        Args:
            folder: is replaced when it exists.
            dtype: store the weights so; None: in our own layout as they are, in the published one as they were.
        """
        own = self.config, self.architecture, self.tokenizer, self.norm_stats, self.network
        openvla_folders.save(openvla_folders.SavedPolicy(*own, self.published, self.trained_beside), folder, dtype)

    def check_env(self, env_spec: EnvSpec) -> None:
        """Raise ConfigError where a camera is missing, or the state or action size differs."""
        check_cameras(self.cameras, env_spec)
        check_sizes(self, env_spec)
        if self.published is not None and self.norm_stats is not None:
            warn_of_other_suite(self.published, self.norm_stats.name, env_spec.suite)

    def set_norm_stats(
        self, action: Mapping[str, Any], state: Mapping[str, Any] | None = None, name: str = "dataset"
    ) -> None:
        """Set the training data's statistics: {"q01", "q99"[, "min", "max"][, "mask"]} of actions and of states.

        `mask` is False for dimensions that are used as they are (the gripper). min and max: for `norm_range=min_max`.

        Raises:
            ValueError: wrong sizes or values, or no state statistics for a policy that reads the state.
        """
        state_dim = self.architecture.state_dim
        if state is None and state_dim is not None:
            raise ValueError("state statistics: this policy reads the state, so q01 and q99 of it are needed; got None")
        given = openvla_folders.in_range({"action": action, "proprio": state}, self.config.norm_range)
        state = given.get("proprio")
        self.norm_stats = NormStats(
            name,
            QuantileStats.of("action", given["action"], self.action_dim),
            None if state is None else QuantileStats.of("state", state, state_dim or len(state.get("q01", ()))),
        )
        if self.published is not None and self.architecture.decoder == "autoregressive":
            self.norm_stats = self.norm_stats.without_epsilon()  # As when it is read again.

    def sharding_units(self) -> list[nn.Module]:
        """See `Policy.sharding_units`: the language model's layers, which hold most of the weights."""
        return list(self.network.language_model.model.layers)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that `config.trainable` selects: those to hand to the optimizer."""
        names = self.trained_names()
        return [parameter for name, parameter in self.network.named_parameters() if name in names]

    def trained_names(self) -> set[str]:
        """Names in the network of the parameters that `config.trainable` selects."""
        return openvla_folders.trained_names(self.network, self.config)

    def merge_lora(self) -> None:
        """Add the adapters to the weights they adapt, so that a plain checkpoint can be saved."""
        lora.merge_adapters(self.network)
        self.config = self.config.model_copy(update={"lora": None, "trainable": "full"})
        self.finish(self.device)

    @property
    def device(self) -> torch.device:
        return self.network.language_model.lm_head.weight.device

    # --- Policy -----------------------------------------------------------------------------

    def prepare(self, obs: Observation) -> Observation:
        """The images taken through `config.images`. See `Policy.prepare`."""
        return prepare_images(obs, self.cameras, self.architecture.image_size, self.config.images, self.device)

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
        """See `GuidablePolicy`."""
        stats = self._stats()
        check_temperature(temperature, lowest=0.0)
        tokens, logits, others = None, None, list[Tensor]()
        if self.architecture.decoder == "autoregressive":
            tokens, logits, hidden = self._decode((obs, *plain), weight, generator, temperature)
        else:
            hidden, *others = [self._hidden(each, None) for each in (obs, *plain)]
        value = self._value(hidden)
        value = None if value is None else value.cpu().numpy()
        if self.network.action_head is not None:
            path, log_prob = self._draw_continuous(hidden, temperature, generator)
            return ActionChunk(self._to_env(path, stats), path=path, log_prob=log_prob, value=value)
        if tokens is None or logits is None:
            logits = guided([self.network.logits(seen[:, : self.num_tokens]) for seen in (hidden, *others)], weight)
            tokens = draw(logits, temperature, generator)
        log_prob = self._shape(token_log_prob(logits / temperature, tokens)).cpu().numpy() if temperature > 0 else None
        drawn = self._shape(tokens).cpu().numpy()
        return ActionChunk(
            self._to_env(self.action_tokenizer.decode(drawn), stats), tokens=drawn, log_prob=log_prob, value=value
        )

    def _to_env(self, normalized: np.ndarray, stats: NormStats) -> np.ndarray:
        """Normalized actions (..., A) in the environment's units, float32."""
        actions = stats.action.unnormalize(normalized)
        if self.config.gripper == "open_is_one":
            actions[..., -1] = -np.sign(2.0 * actions[..., -1] - 1.0)
        return actions

    def _from_env(self, actions: np.ndarray, stats: NormStats) -> np.ndarray:
        """The environment's actions, normalized: what behavior cloning aims at."""
        if self.config.gripper == "open_is_one":
            actions = actions.copy()
            actions[..., -1] = 0.5 * (1.0 - actions[..., -1])
        return stats.action.normalize(actions)

    def _draw_continuous(
        self, hidden: Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Normalized actions float32 (B, H, A) of the L1 head, and their log-density where there is one."""
        location, log_scale = self._density(hidden, self.chunk_size)
        if temperature == 0 or log_scale is None:
            return location.cpu().numpy(), None
        log_scale = log_scale + math.log(temperature)
        path = openvla_network.laplace_draw(location, log_scale, generator)
        return path.cpu().numpy(), openvla_network.laplace_log_prob(path, location, log_scale).cpu().numpy()

    def _density(self, hidden: Tensor, num_actions: int) -> tuple[Tensor, Tensor | None]:
        """Location and log-scale float32 (B, num_actions, A) of the l1 decoder; no scale without its head."""
        assert self.network.action_head is not None, "only the l1 decoder has an action head"
        location, scale_head = self.network.action_head(hidden), self.network.scale_head
        return location[:, :num_actions], None if scale_head is None else scale_head(hidden)[:, :num_actions]

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """See `Policy.evaluate`; ValueError where the chunk has no tokens, or temperature <= 0."""
        check_temperature(temperature, lowest=1e-6)
        if self.network.action_head is not None:
            return self._evaluate_continuous(obs, chunk, temperature)
        if chunk.tokens is None:
            raise ValueError("chunk.tokens: None; this policy can only evaluate chunks that carry action tokens")
        tokens = torch.from_numpy(chunk.tokens).to(self.device).flatten(1)
        hidden, logits = self._read(obs, tokens)
        log_probs = torch.log_softmax(logits / temperature, -1)
        return PolicyOutput(
            log_prob=self._shape(log_probs.gather(-1, tokens[..., None]).squeeze(-1)),
            entropy=self._shape(-(log_probs.exp() * log_probs).sum(-1)),
            value=self._value(hidden),
        )

    def _evaluate_continuous(self, obs: Observation, chunk: ActionChunk, temperature: float) -> PolicyOutput:
        if self.network.scale_head is None:
            raise ValueError(f"policy.decoder 'l1': {L1_WITHOUT_SCALE}")
        if chunk.path is None:
            raise ValueError("chunk.path: None; this policy can only evaluate chunks that carry what was drawn")
        hidden = self._hidden(obs, None)
        location, log_scale = self._density(hidden, self.chunk_size)
        assert log_scale is not None, "there is a scale head"
        log_scale = log_scale + math.log(temperature)
        path = torch.from_numpy(chunk.path).to(self.device)
        return PolicyOutput(
            log_prob=openvla_network.laplace_log_prob(path, location, log_scale),
            entropy=openvla_network.laplace_entropy(log_scale),
            value=self._value(hidden),
        )

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Minus the log-probability of each action, of all its tokens together (`ActionTokenizer.targets`); of the l1
        decoder, mean absolute error, normalized, and where there is a scale head minus the log-density, for the scale.

        Metrics: token_accuracy, action_l1 (environment units, greedy), bc_loss and, with keyframes, keyframe_loss;
        left where they were computed, for one read of all.
        """
        stats = self._stats()
        if actions.shape[1:] != (self.demonstration_size, self.action_dim):
            raise ValueError(
                f"actions: shape {actions.shape}, expected (B, {self.demonstration_size}, {self.action_dim}) "
                "(policy.chunk_size actions per chunk)"
            )
        targets = self._from_env(actions, stats)
        rows: np.ndarray = np.ones(actions.shape[:2], dtype=bool) if valid is None else valid
        weight = torch.from_numpy(rows).to(self.device).float()[..., None].expand(-1, -1, self.action_dim)
        total = weight.sum().clamp_min(1.0)
        hidden, losses, guess, right = self._bc_terms(obs, targets)
        loss = (losses * weight).sum() / total
        metrics: dict[str, Any] = {"bc_loss": loss.detach()}
        if self.network.keyframe_head is not None and keyframe is not None:
            predicted = self.network.keyframe_head(hidden.mean(1))
            keyframe_loss = openvla_network.position_loss(predicted, keyframe, stats.state)
            loss = loss + self.config.keyframe_loss_weight * keyframe_loss
            metrics["keyframe_loss"] = keyframe_loss.detach()
        if right is not None:
            metrics["token_accuracy"] = (right * weight).sum() / total
        error = np.abs(self._to_env(guess, stats) - actions)[rows]
        metrics["action_l1"] = float(error.mean()) if rows.any() else 0.0
        return loss, metrics

    def _bc_terms(self, obs: Observation, targets: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray, Tensor | None]:
        """Hidden states, loss (B, H, A), greedy normalized actions, and where greedy tokens are right (B, H, A)."""
        if self.network.action_head is not None:
            hidden = self._hidden(obs, None)
            location, log_scale = self._density(hidden, self.architecture.chunk_size)
            wanted = torch.from_numpy(targets).to(self.device)
            losses = (location - wanted).abs()
            if log_scale is not None:
                # The location's gradient through the density is 1 / b: a dimension that hardly moves, whose b is
                # small, would leave none for the others. Both have the median as their optimum, so it learns by L1.
                losses = losses - openvla_network.laplace_log_prob(wanted, location.detach(), log_scale)
            return hidden, losses, location.detach().cpu().numpy(), None
        pair = self.action_tokenizer.targets(targets, lambda actions: self._to_env(actions, self._stats()))
        tokens, alike = (torch.from_numpy(array).to(self.device).flatten(1, 2) for array in pair)
        hidden, logits = self._read(obs, tokens)
        losses = -torch.log_softmax(logits, -1).masked_fill(~alike, -math.inf).logsumexp(-1)
        greedy = logits.detach().argmax(-1)
        guess = self.action_tokenizer.decode(self._shape(greedy).cpu().numpy())
        return hidden, self._shape(losses), guess, self._shape(alike.gather(-1, greedy[..., None])[..., 0])

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """Features float32 (B, hidden): mean hidden state of the action positions. No gradient."""
        if self.architecture.decoder != "autoregressive":
            return self._hidden(obs, None).mean(1)
        return self._decode([obs], 1.0, None, 0.0)[2].mean(1)

    @torch.no_grad()
    @lora.acts_merged
    def embed_and_draw(
        self, obs: Observation, count: int, generator: torch.Generator | None, temperature: float
    ) -> tuple[Tensor, np.ndarray]:
        """See `SeveralChunksPolicy`. All draws of the parallel decoder come from the same logits."""
        hidden, logits = self._read(obs, None)
        logits = logits[:, : self.num_tokens]
        drawn = [draw(logits, 0.0, None), *(draw(logits, temperature, generator) for _ in range(count - 1))]
        tokens = torch.stack(drawn, 1).unflatten(-1, (-1, self.action_dim)).cpu().numpy()
        return hidden.mean(1), self._to_env(self.action_tokenizer.decode(tokens), self._stats())

    # --- parts ------------------------------------------------------------------------------

    def _hidden(self, obs: Observation, tokens: Tensor | None) -> Tensor:
        """Hidden states float32 (B, n, hidden) of the action positions."""
        if torch.is_grad_enabled():
            lora.forget_merged(self)
        if self.replayed is not None and tokens is None and not torch.is_grad_enabled():
            return cast(Tensor, self.replayed(*self._inputs(obs))[0])
        with self._autocast():
            return self.network.hidden(self._prefix(obs), tokens)

    def _replayable(self, *inputs: Any) -> tuple[Tensor]:
        """`_hidden` of all action positions. Autocast keeps no copy of a weight, which a graph would read for ever."""
        with self._autocast(keeps_copies=False):
            return (self.network.hidden(self.network.prefix(*inputs), None),)

    def _decode(
        self, seen: Sequence[Observation], weight: float, generator: torch.Generator | None, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`decode` after observations, the first one guided away from the second by `weight`."""
        given = [None, None, torch.full((), weight, device=self.device)]
        if temperature > 0:  # All tokens' numbers at once: the same as one by one, and one copy to the device.
            given[0] = uniforms((self.num_tokens, seen[0].batch_size, 1), generator, self.device, dim=1)
            given[1] = torch.full((), temperature, device=self.device, dtype=torch.float64)
        inputs = [each for obs in seen for each in self._inputs(obs)]
        return cast(tuple[Tensor, Tensor, Tensor], (self.replayed or self._decoded)(*given, *inputs))

    def _decoded(self, uniform: Any, temperature: Any, weight: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with self._autocast(keeps_copies=self.replayed is None):
            prefixes = [self.network.prefix(*each) for each in itertools.batched(inputs, 4)]
            return decode(self.network, prefixes, self.num_tokens, temperature, uniform, weight)

    def _read(self, obs: Observation, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states (B, n, hidden) and logits (B, n, bins), float32, of given tokens (B, n); None: of all."""
        hidden = self._hidden(obs, tokens)[:, : None if tokens is None else tokens.shape[1]]
        return hidden, self.network.logits(hidden)

    def _value(self, hidden: Tensor) -> Tensor | None:
        if self.network.value_head is None:
            return None
        first = hidden[:, 0]
        return self.network.value_head(first.detach() if self.config.value_detach else first)

    def _prefix(self, obs: Observation) -> Prefix:
        """Everything before the action positions, embedded."""
        return self.network.prefix(*self._inputs(obs))

    def _inputs(self, obs: Observation) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """What `network.prefix` reads, on the device."""
        arch, stats = self.architecture, None if self.architecture.state_dim is None else self._stats()
        return network_inputs(self.prepare(obs), self.cameras, arch, self.tokenizer, stats, self.device)

    def _stats(self) -> NormStats:
        if self.norm_stats is None:
            raise ValueError(
                "this policy has no action statistics yet, as its weights are fresh: clone first (`vla-rl sft`) and "
                "name the result, policy.path=RUN/policy; or from Python call set_norm_stats (docs/own_environment.md)"
            )
        return self.norm_stats

    def _shape(self, x: Tensor) -> Tensor:
        """(B, n) -> (B, n / A, A)."""
        return x.reshape(len(x), -1, self.action_dim)

    def _autocast(self, keeps_copies: bool = True) -> torch.autocast:
        in_bf16 = self.network.compute_dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, in_bf16, keeps_copies)
