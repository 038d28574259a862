"""SmolVLA, pi0 and pi0.5 as one thing: encode what is seen once, then give velocities of noisy actions.

Each method calls LeRobot's own; the difference between the families ends here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

STATE = "observation.state"
TOKENS = "observation.language.tokens"
TOKEN_MASK = "observation.language.attention_mask"


@dataclass(frozen=True)
class Prefix:
    """What a flow policy has read of an observation, for any number of denoising steps.

    Attributes:
        valid: bool (B, P), which positions are not padding.
        cache: keys and values of each layer, (B, heads, P, head_dim).
        features: float32 (B, F), the mean of the last layer's valid positions.
        state: float32 (B, S), normalized and padded; None where the family reads it as text (pi0.5).
    """

    valid: Tensor
    cache: list[tuple[Tensor, Tensor]]
    features: Tensor
    state: Tensor | None


class _Scratch(DynamicCache):
    """A copy that one denoising step may append to. Not cropped afterwards, since it is thrown away.

    LeRobot 0.6 crops to an absolute length, which transformers from 5.6 on refuses.
    """

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class FlowNetwork:
    """A LeRobot flow policy's network, `core`.

    Attributes:
        expert, language: prefixes of the names of the action expert's and the language model's modules.
        hidden_size: of the action expert. feature_size: F of `Prefix.features`.
    """

    expert: str
    language: str

    def __init__(self, core: Any) -> None:
        self.core, self.model, self.config = core, core.model, core.config
        self.hidden_size: int = self.model.action_out_proj.in_features
        self.num_steps: int = getattr(self.config, "num_steps", None) or self.config.num_inference_steps
        self._hidden: Tensor | None = None
        self.model.action_out_proj.register_forward_pre_hook(self._keep_hidden)

    def _keep_hidden(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    @property
    def feature_size(self) -> int:
        raise NotImplementedError

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Encode a preprocessed batch."""
        raise NotImplementedError

    def _step(self, prefix: Prefix, cache: DynamicCache, x: Tensor, level: Tensor) -> Tensor:
        raise NotImplementedError

    def losses(self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """LeRobot's flow-matching losses, float32 (B, C, D), of normalized, padded actions (B, C, D).

        Args:
            noise: (B, C, D), N(0, I). level: (B,) in (0, 1], where on the path between noise and actions.
        """
        raise NotImplementedError

    def velocity(self, prefix: Prefix, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B, C, D) of actions x at noise level (B,), and the action expert's hidden states (B, C, hidden)."""
        cache = _Scratch(tuple((keys, values, None) for keys, values in prefix.cache))
        velocity = self._step(prefix, cache, x, level)
        assert self._hidden is not None, "LeRobot's last layer is action_out_proj"
        hidden, self._hidden = self._hidden, None
        return velocity.float(), hidden


class SmolVLANetwork(FlowNetwork):
    """SmolVLA (Shukor et al. 2025, arXiv 2506.01844)."""

    expert, language = "model.vlm_with_expert.lm_expert.", "model.vlm_with_expert.vlm.model.text_model."

    @property
    def feature_size(self) -> int:
        return self.model.vlm_with_expert.config.text_config.hidden_size

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, image_masks = self.core.prepare_images(batch)
        return images, image_masks, batch[TOKENS], batch[TOKEN_MASK], self.core.prepare_state(batch)

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        *inputs, state = self._inputs(batch)
        embeddings, valid, attention = self.model.embed_prefix(*inputs, state=state)
        outputs, cache = self.model.vlm_with_expert.forward(
            attention_mask=_attention_2d(valid, attention),
            position_ids=valid.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embeddings, None],
            use_cache=True,
        )
        return Prefix(valid, _layers(cache), mean_of_valid(outputs[0], valid), state)

    def _step(self, prefix: Prefix, cache: DynamicCache, x: Tensor, level: Tensor) -> Tensor:
        return self.model.denoise_step(prefix.valid, cache, x, level)

    def losses(self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return self.model.forward(*self._inputs(batch), actions, noise, level)


class Pi0Network(FlowNetwork):
    """pi0 (Black et al. 2024, arXiv 2410.24164)."""

    expert = "model.paligemma_with_expert.gemma_expert."
    language = "model.paligemma_with_expert.paligemma.model.language_model."

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        let_pi_run()
        self.towers = self.model.paligemma_with_expert
        for part in (self.towers.paligemma.model.language_model, self.towers.gemma_expert.model):
            part.config._attn_implementation = "eager"  # As LeRobot sets it before each call.

    @property
    def feature_size(self) -> int:
        return self.towers.paligemma.config.text_config.hidden_size

    def _state(self, batch: dict[str, Any]) -> Tensor | None:
        return self.core.prepare_state(batch)

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, image_masks = self.core._preprocess_images(batch)
        return images, image_masks, batch[TOKENS], batch[TOKEN_MASK]

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        embeddings, valid, attention = self.model.embed_prefix(*self._inputs(batch))
        (output, _), cache = self.towers.forward(
            attention_mask=prepare_attention_masks_4d(_attention_2d(valid, attention)),
            position_ids=valid.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embeddings, None],
            use_cache=True,
        )
        return Prefix(valid, _layers(cache), mean_of_valid(output, valid), self._state(batch))

    def _step(self, prefix: Prefix, cache: DynamicCache, x: Tensor, level: Tensor) -> Tensor:
        return self.model.denoise_step(prefix.state, prefix.valid, cache, x, level)

    def losses(self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return self.model.forward(*self._inputs(batch), self._state(batch), actions, noise, level)


class Pi05Network(Pi0Network):
    """pi0.5 (Physical Intelligence 2025, arXiv 2504.16054): the state is part of the prompt."""

    def _state(self, batch: dict[str, Any]) -> Tensor | None:
        return None

    def _step(self, prefix: Prefix, cache: DynamicCache, x: Tensor, level: Tensor) -> Tensor:
        return self.model.denoise_step(prefix.valid, cache, x, level)

    def losses(self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        return self.model.forward(*self._inputs(batch), actions, noise, level)


NETWORKS: dict[str, type[FlowNetwork]] = {"smolvla": SmolVLANetwork, "pi0": Pi0Network, "pi05": Pi05Network}


def _attention_2d(valid: Tensor, attention: Tensor) -> Tensor:
    from lerobot.policies.common.vla_utils import make_att_2d_masks

    return make_att_2d_masks(valid, attention)


def attention_of_valid(attention: Tensor, dtype: torch.dtype) -> Tensor:
    """What may attend to what, bool (B, Q, K), as the mask (B, 1, Q, K) that transformers adds to the scores."""
    from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

    return prepare_attention_masks_4d(attention, dtype=dtype)


def _layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def mean_of_valid(hidden: Tensor, valid: Tensor) -> Tensor:
    """Mean of (B, P, F) over the valid positions (B, P), float32."""
    weight = valid[..., None].float()
    return (hidden.float() * weight).sum(1) / weight.sum(1).clamp_min(1.0)


def let_pi_run() -> None:
    """LeRobot 0.6 passes `cache_position` to a mask function that has had no such parameter since transformers 5.6.

    Where the installed one lacks it, LeRobot's name for the function is pointed at one that leaves it out; for the
    four-dimensional masks that pi0 gives, it has no effect anyway.
    """
    from lerobot.policies import pi_gemma

    original: Any = pi_gemma.create_causal_mask
    if "cache_position" in inspect.signature(original).parameters:
        return

    def create_causal_mask(*args: Any, cache_position: Tensor | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    pi_gemma.create_causal_mask = create_causal_mask
