"""Networks of SmolVLA, pi0, pi0.5 and X-VLA behind one interface: encode once, then velocities of noisy actions.

Each method calls LeRobot's own; the difference between the families ends here. Where LeRobot's waits for the device or
copies from the host to it, as no CUDA graph can, the same is computed without.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from lerobot.policies import pi_gemma
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from torch import Tensor
from transformers import DynamicCache

from vla_rl.config import ConfigError

STATE = "observation.state"
TOKENS = "observation.language.tokens"
TOKEN_MASK = "observation.language.attention_mask"


class Prefix(NamedTuple):
    """What a flow policy has read of an observation, for any number of denoising steps.

    Attributes:
        valid: bool (B, P), which positions are not padding.
        cache: keys and values of each layer, (B, heads, P, head_dim); of X-VLA its transformer's other inputs.
        features: float32 (B, F), the mean of the last layer's valid positions.
        state: float32 (B, S), normalized and padded; None where the family reads it as text (pi0.5).
    """

    valid: Tensor
    cache: Any
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
        keeps_noise: whether its own sampler mixes each prediction with the first noise anew (see `flow_sampling`).
        hidden_size: of the action expert. feature_size: F of `Prefix.features`.
        width: D, action dimensions that it denoises.
    """

    expert: str
    language: str
    keeps_noise = False

    def __init__(self, core: Any) -> None:
        self.core, self.model, self.config = core, core.model, core.config
        self.width: int = self.config.max_action_dim
        self._hidden: Tensor | None = None
        self._set_up()

    def _set_up(self) -> None:
        """Set `hidden_size` and `num_steps`, and keep what the last layer reads."""
        self.hidden_size: int = self.model.action_out_proj.in_features
        self.num_steps: int = getattr(self.config, "num_steps", None) or self.config.num_inference_steps
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

    def loss(
        self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor, counted: Tensor, action_dim: int
    ) -> Tensor:
        """The mean of `losses` over the actions that count, bool (B, C), and the first `action_dim` dimensions."""
        losses = self.losses(batch, actions, noise, level).float()[..., :action_dim].mean(-1)
        weight = counted.to(losses)
        return (losses * weight).sum() / weight.sum().clamp_min(1.0)

    def target(self, batch: dict[str, Any]) -> Tensor:
        """The batch's normalized actions, padded, (B, C, D)."""
        return self.core.prepare_action(batch)

    def to_actions(self, x: Tensor) -> Tensor:
        """Denoised x (B, C, D) as normalized actions, which may have fewer dimensions."""
        return x

    def random_levels(self, rows: int, source: torch.Generator | None) -> Tensor:
        """Noise levels float32 (rows,) with the distribution that LeRobot trains with: Beta(1.5, 1) from 0.001 to 1.

        Drawn through the inverse of its distribution function, u^(1/a) for Beta(a, 1), so that a generator serves.
        """
        alpha = getattr(self.config, "time_sampling_beta_alpha", 1.5)
        if getattr(self.config, "time_sampling_beta_beta", 1.0) != 1.0:
            raise ConfigError("LeRobot option time_sampling_beta_beta: only 1.0 is supported here")
        scale = getattr(self.config, "time_sampling_scale", 0.999)
        offset = getattr(self.config, "time_sampling_offset", 0.001)
        return torch.rand(rows, generator=source) ** (1 / alpha) * scale + offset

    def velocity(self, prefix: Prefix, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B, C, D) of actions x at noise level (B,), and the action expert's hidden states (B, C, hidden)."""
        cache = _Scratch(tuple((keys, values, None) for keys, values in prefix.cache))
        return self._step(prefix, cache, x, level).float(), self._last_hidden()

    def _last_hidden(self) -> Tensor:
        assert self._hidden is not None, "LeRobot's last layer is the one that is watched"
        hidden, self._hidden = self._hidden, None
        return hidden


class SmolVLANetwork(FlowNetwork):
    """SmolVLA (Shukor et al. 2025, arXiv 2506.01844)."""

    expert, language = "model.vlm_with_expert.lm_expert.", "model.vlm_with_expert.vlm.model.text_model."

    def _set_up(self) -> None:
        super()._set_up()
        self.model.vlm_with_expert.embed_image = self._embed_image

    @property
    def feature_size(self) -> int:
        return self.model.vlm_with_expert.config.text_config.hidden_size

    def _embed_image(self, image: Tensor) -> Tensor:
        """Every patch is seen: transformers reads from the device whether its mask of patches, made on the host, is."""
        parts = self.model.vlm_with_expert.get_vlm_model()
        vision, (height, width) = parts.vision_model, image.shape[2:]
        grid = len(image), height // vision.patch_size, width // vision.patch_size
        seen = torch.ones(grid, dtype=torch.bool, device=image.device)
        embedded = vision.embeddings(pixel_values=image.to(vision.dtype), patch_attention_mask=seen)
        encoded = vision.encoder(inputs_embeds=embedded, attention_mask=None).last_hidden_state
        return parts.connector(vision.post_layernorm(encoded))

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        for name in ("global_image_start_token", "image_end_token"):  # LeRobot's buffers that move with no module.
            setattr(self.model, name, getattr(self.model, name).to(batch[TOKENS].device))
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


class XVLANetwork(FlowNetwork):
    """X-VLA (Zheng et al. 2025, arXiv 2510.10274): a soft prompt of each domain, and clean actions predicted."""

    expert, language = "model.transformer.", "model.vlm.language_model."
    keeps_noise = True

    def _set_up(self) -> None:
        self.width = self.model.dim_action
        self.hidden_size, self.num_steps = self.config.hidden_size, self.config.num_denoising_steps
        self.model.transformer.action_decoder.register_forward_pre_hook(self._keep_hidden)

    @property
    def feature_size(self) -> int:
        return self.model.vlm.config.vision_config.projection_dim

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        inputs = self.core._build_model_inputs(batch)
        dtype = self.model._get_target_dtype()
        num_views = sum(key in batch for key in self.config.image_features)  # LeRobot pads behind them.
        encoded, others = self._encoded(inputs["input_ids"], inputs["image_input"].to(dtype), num_views)
        state = inputs["proprio"].to(dtype)
        valid = torch.ones(encoded.shape[:2], dtype=torch.bool, device=encoded.device)
        cache = {"vlm_features": encoded, "aux_visual_inputs": others, "domain_id": inputs["domain_id"]}
        return Prefix(valid, cache, mean_of_valid(encoded, valid), state)

    def _encoded(self, tokens: Tensor, images: Tensor, num_views: int) -> tuple[Tensor, Tensor]:
        """The first view with the text, encoded, (B, P, F), and the other views, 0 from `num_views` on, (B, Q, F).

        LeRobot's `forward_vlm` asks the device which views are there.
        """
        vlm, (rows, most) = self.model.vlm, images.shape[:2]
        seen = vlm.get_image_features(images[:, :num_views].flatten(0, 1)).pooler_output
        views = seen.new_zeros((rows, most, *seen.shape[1:]))
        views[:, :num_views] = seen.unflatten(0, (rows, num_views))
        merged = torch.cat([views[:, 0], vlm.get_input_embeddings()(tokens)], 1)
        return vlm.language_model.encoder(inputs_embeds=merged)[0], views[:, 1:].flatten(1, 2)

    def velocity(self, prefix: Prefix, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        clean = self._predict(prefix, x, level)
        return (x - clean) / level[:, None, None], self._last_hidden()

    def _predict(self, prefix: Prefix, x: Tensor, level: Tensor) -> Tensor:
        assert prefix.state is not None, "X-VLA's prefix holds the state, empty where it reads none"
        state, noisy = self.model.action_space.preprocess(prefix.state, x.to(prefix.state.dtype))
        inputs = {"action_with_noise": noisy, "proprio": state, "t": level.to(noisy.dtype)}
        return self.model.transformer(**inputs, **prefix.cache).float()

    def loss(
        self, batch: dict[str, Any], actions: Tensor, noise: Tensor, level: Tensor, counted: Tensor, action_dim: int
    ) -> Tensor:
        """LeRobot's loss of the action space, over the actions that count."""
        t = level[:, None, None]
        clean = self._predict(self.prefix(batch), noise * t + actions * (1 - t), level)
        if not bool(counted.any()):
            return clean.sum() * 0.0
        parts = self.model.action_space.compute_loss(clean[counted][None], actions[counted][None])
        return torch.stack(list(parts.values())).sum()

    def target(self, batch: dict[str, Any]) -> Tensor:
        return self.core._prepare_action_targets(batch)

    def to_actions(self, x: Tensor) -> Tensor:
        return self.model.action_space.postprocess(x.clone())

    def random_levels(self, rows: int, source: torch.Generator | None) -> Tensor:
        """Evenly spread over the batch, from a random start, as LeRobot draws them."""
        return (torch.rand(1, generator=source) + torch.arange(rows) / rows) % (1 - 1e-5)


NETWORKS: dict[str, type[FlowNetwork]] = {
    "smolvla": SmolVLANetwork,
    "pi0": Pi0Network,
    "pi05": Pi05Network,
    "xvla": XVLANetwork,
}


def _attention_2d(valid: Tensor, attention: Tensor) -> Tensor:
    return make_att_2d_masks(valid, attention)


def attention_of_valid(attention: Tensor, dtype: torch.dtype) -> Tensor:
    """What may attend to what, bool (B, Q, K), as the mask (B, 1, Q, K) that transformers adds to the scores."""
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
    original = pi_gemma.create_causal_mask
    if "cache_position" in inspect.signature(original).parameters:
        return

    def create_causal_mask(*args: Any, cache_position: Tensor | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    pi_gemma.create_causal_mask = create_causal_mask
