"""Wan's video transformer with actions and states: diffusers' `WanTransformer3DModel`, made causal from frame to frame.

The pretrained weights are used as they are; what differs from the stock forward pass:
    - A token attends to the tokens of its own and of earlier frames (a mask), so nothing depends on the future.
    - Every frame has its own noise level, as Wan-2.2-TI2V's per-token timesteps allow.
    - A frame's actions are embedded and added to its timestep embedding, whence AdaLN takes them, and are the words of
      its cross-attention, G tokens in place of the text; a frame sees its own words alone, and learns of earlier
      actions from the earlier frames (as WoVR, arXiv 2602.13977, conditions Wan; frame by frame as Ctrl-World,
      arXiv 2510.10125).
    - A frame's state is added to its tokens; the clean state is predicted from the mean of the frame's tokens.
Everything that is added starts at zero: before training, one frame gets the stock model's output for text of zeros.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from world_model.types import Actions

LORA_LAYERS = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
NUM_TIMESTEPS = 1000  # Wan's timestep at noise level 1.


class ActionWan(nn.Module):
    """The network: noisy frames, their noise levels and actions -> velocity of the latents, clean states.

    V views are laid side by side, so that a frame is one image of h x (V w) latent pixels.

    Args:
        transformer: a `WanTransformer3DModel`; see `build_transformer`.
        latent_shape: (C, h, w) of one view.
        num_views: V. state_dim: S. action_dim: A. frame_steps: G.
        checkpointing: compute each block again in the backward pass, to save memory.

    Raises:
        ValueError: the transformer is for latents of another shape, or mixes frames in its patches.
    """

    def __init__(
        self,
        transformer: Any,
        latent_shape: tuple[int, int, int],
        num_views: int,
        state_dim: int,
        action_dim: int,
        frame_steps: int,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        sizes = transformer.config
        _check_shapes(sizes, latent_shape)
        width = sizes.num_attention_heads * sizes.attention_head_dim
        num_values = frame_steps * (action_dim + 1)
        self.transformer, self.checkpointing, self.num_views = transformer, checkpointing, num_views
        self.grid = (latent_shape[1] // sizes.patch_size[1], num_views * latent_shape[2] // sizes.patch_size[2])
        self.embed_actions = _perceptron(num_values, width, width)
        self.embed_word = _perceptron(action_dim + 1, width, sizes.text_dim)
        self.word_place = nn.Parameter(torch.zeros(frame_steps, sizes.text_dim))
        self.embed_state = nn.Linear(state_dim, width)
        nn.init.zeros_(self.embed_state.weight)
        nn.init.zeros_(self.embed_state.bias)
        self.norm_state = nn.LayerNorm(width, elementwise_affine=False)
        self.head_state = _perceptron(width + 2 * (state_dim + 1) + num_values, width, state_dim)
        for block in transformer.blocks:
            block.attn1.set_processor(FrameCausalAttention())
            block.attn2.set_processor(OwnFrameAttention())

    def forward(
        self, latents: torch.Tensor, states: torch.Tensor, levels: torch.Tensor, actions: Actions, filled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity (noise minus frame) and clean states.

        Args:
            latents: float32 (B, T, V, C, h, w), noisy. states: float32 (B, T, S), noisy.
            levels: float32 (B, T) in [0, 1]. actions: B x T.
            filled: bool (B, T), False for a place without a frame, which no other frame sees. Those are before or after
                all others: where frames lie in time counts from one to the next.

        Returns:
            float32 (B, T, V, C, h, w) and (B, T, S).
        """
        wan, length = self.transformer, levels.shape[1]
        dtype = wan.patch_embedding.weight.dtype
        executed = actions.executed[..., None].to(states.dtype)
        taken = torch.cat([actions.values * executed, executed], -1)  # (B, T, G, A + 1)
        added = self.embed_state.weight.dtype
        image = latents.permute(0, 3, 1, 4, 2, 5).flatten(4)  # (B, C, T, h, V w)
        tokens = wan.patch_embedding(image.to(dtype)).flatten(3).permute(0, 2, 3, 1)  # (B, T, N, width)
        tokens = (tokens + self.embed_state(states.to(added)).to(dtype)[:, :, None]).flatten(1, 2)

        time = self._time(levels, taken.to(added), dtype)
        modulation = wan.condition_embedder.time_proj(F.silu(time)).unflatten(-1, (6, -1))
        modulation = modulation.repeat_interleave(self.grid[0] * self.grid[1], 1)  # (B, T N, 6, width)
        words = wan.condition_embedder.text_embedder((self.embed_word(taken.to(added)) + self.word_place).to(dtype))
        cosine, sine = wan.rope(image)  # Each value stands there twice.
        layout = (cosine[..., ::2], sine[..., ::2], _seen(filled, self.grid[0] * self.grid[1]))
        for block in wan.blocks:
            # The layout takes the place of the rotary embedding, which a block hands on to its self-attention as it is.
            if self.checkpointing and torch.is_grad_enabled():
                tokens = cast(torch.Tensor, checkpoint(block, tokens, words, modulation, layout, use_reentrant=False))
            else:
                tokens = block(tokens, words, modulation, layout)

        shift, scale = (wan.scale_shift_table[:, None] + time[:, :, None]).chunk(2, 2)
        tokens = torch.unflatten(tokens.float(), 1, (length, -1))
        normed = wan.norm_out(tokens) * (1 + scale) + shift
        velocity = self._image(wan.proj_out(normed.to(dtype)).float(), latents.shape)
        return velocity, self._clean_states(tokens.mean(2), states, levels, taken.flatten(2))

    def _time(self, levels: torch.Tensor, taken: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What modulates each frame, (B, T, width): its timestep and its actions."""
        embedder = self.transformer.condition_embedder
        features = embedder.timesteps_proj(NUM_TIMESTEPS * levels.flatten())
        time = embedder.time_embedder(features.to(embedder.time_embedder.linear_1.weight.dtype))
        return (time.unflatten(0, levels.shape) + self.embed_actions(taken.flatten(2))).to(dtype)

    def _image(self, patches: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Patches (B, T, N, p p C) -> (B, T, V, C, h, w)."""
        batch, length, views, channels, height, width = shape
        (rows, columns), (_, down, across) = self.grid, self.transformer.config.patch_size
        cut = patches.reshape(batch, length, rows, columns, down, across, channels)
        whole = cut.permute(0, 1, 6, 2, 4, 3, 5).reshape(batch, length, channels, height, views, width)
        return whole.permute(0, 1, 4, 2, 3, 5)

    def _clean_states(
        self, features: torch.Tensor, states: torch.Tensor, levels: torch.Tensor, taken: torch.Tensor
    ) -> torch.Tensor:
        """Clean states (B, T, S), from the frame's features, its noisy state, the one before it, and its actions."""
        known = torch.cat([states, levels[..., None]], -1)
        before = torch.cat([known[:, :1], known[:, :-1]], 1)
        known = torch.cat([self.norm_state(features), known, before, taken], -1)
        return self.head_state(known.to(self.embed_state.weight.dtype)).float()


class FrameCausalAttention:
    """Processor of `WanAttention` for self-attention among the tokens that the layout lets each frame see.

    `rotary_emb` is the layout: cosine and sine (1, T N, 1, D / 2), and bool (B, 1, T N, T N), which token sees which.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: None,
        attention_mask: None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        cosine, sine, seen = rotary_emb
        query, key, value = _heads(attn, hidden_states, hidden_states)
        attended = _attend(_rotated(query, cosine, sine), _rotated(key, cosine, sine), value, seen)
        return attn.to_out[1](attn.to_out[0](attended))


class OwnFrameAttention:
    """Processor of `WanAttention` for cross-attention of each frame's tokens to the words of that frame alone.

    `encoder_hidden_states`: (B, T, words, width).
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: None,
        rotary_emb: None,
    ) -> torch.Tensor:
        length = encoder_hidden_states.shape[1]
        tokens = hidden_states.unflatten(1, (length, -1)).flatten(0, 1)
        attended = _attend(*_heads(attn, tokens, encoder_hidden_states.flatten(0, 1)), None)
        return attn.to_out[1](attn.to_out[0](attended.unflatten(0, (-1, length)).flatten(1, 2)))


def build_transformer(path: Path | None, sizes: dict[str, Any] | None, precision: str, lora_rank: int) -> Any:
    """A `WanTransformer3DModel`: pretrained weights, or random ones of these sizes; with LoRA where asked.

    Raises:
        ValueError: no such model in the folder, or a damaged one; unknown sizes; LoRA without peft.
    """
    dtype = getattr(torch, precision)
    transformer = _random(sizes or {}, dtype) if path is None else _pretrained(path, dtype)
    if lora_rank:
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ValueError(
                f"dynamics.lora_rank: got {lora_rank}, which needs peft ({error}); pip install peft, or set it to 0"
            ) from error
        transformer.add_adapter(LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=LORA_LAYERS))
        for name, parameter in transformer.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
            else:
                parameter.requires_grad_(False)
    return transformer


def transformer_sizes(transformer: Any) -> dict[str, Any]:
    """The arguments with which a `WanTransformer3DModel` like this one is made, as JSON holds them."""
    sizes = {name: transformer.config[name] for name in _known_sizes()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sizes.items()}


def _wan_class() -> Any:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    return WanTransformer3DModel


def _known_sizes() -> list[str]:
    return [name for name in inspect.signature(_wan_class().__init__).parameters if name != "self"]


def _random(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    kind, allowed = _wan_class(), _known_sizes()
    if unknown := sorted(set(sizes) - set(allowed)):
        raise ValueError(f"dynamics.transformer: unknown {unknown}; allowed: {', '.join(sorted(allowed))}")
    transformer = kind(**sizes)
    for name, parameter in transformer.named_parameters():
        if not any(kept in name for kept in kind._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return transformer


def _pretrained(path: Path, dtype: torch.dtype) -> Any:
    # Some conversions of text-and-image models declare projections of a CLIP image, which they have no use for.
    options = {"image_dim": None, "added_kv_proj_dim": None}
    return load_model(_wan_class(), model_folder(path, "transformer", "WanTransformer3DModel"), dtype, options)


def load_model(model_class: Any, folder: Path, dtype: torch.dtype, options: dict[str, Any] | None = None) -> Any:
    """A diffusers model from a folder, all of its weights there and fitting.

    Args:
        options: override the folder's config.

    Raises:
        ValueError: files are missing or damaged, or the weights are not those of the config.
    """
    try:
        model, loading = model_class.from_pretrained(
            folder,
            torch_dtype=dtype,
            low_cpu_mem_usage=True,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **(options or {}),
        )
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: cannot be loaded as {model_class.__name__} ({str(error).splitlines()[0]}). Copy the folder "
            "again, with config.json and all of its *.safetensors."
        ) from error
    # diffusers only warns of these, and leaves what is missing without memory.
    if loading["missing_keys"] or loading["unexpected_keys"]:
        raise ValueError(
            f"{folder}: its weights are not those of its config.json: missing {loading['missing_keys'][:3]}, unknown "
            f"{loading['unexpected_keys'][:3]}. Copy both again from one place."
        )
    return model


def model_folder(path: Path, part: str, class_name: str) -> Path:
    """Where a diffusers model lies: `path/part`, as in a pipeline's folder, or `path` itself.

    Raises:
        ValueError: neither holds a model of this class.
    """
    path = path.expanduser()
    folder = path / part if (path / part / "config.json").is_file() else path
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{path}: no {part}/config.json and no config.json; give the folder of a diffusers pipeline "
            "(for example a download of Wan2.2-TI2V-5B-Diffusers)"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not the config of a diffusers model ({type(error).__name__}: {error})") from error
    if found != class_name:
        raise ValueError(f"{file}: is the config of {found!r}; it must be of {class_name!r}")
    return folder


def _check_shapes(sizes: Any, latent_shape: tuple[int, int, int]) -> None:
    channels, height, width = latent_shape
    if (sizes.in_channels, sizes.out_channels) != (channels, channels):
        raise ValueError(
            f"dynamics: the transformer takes latents of {sizes.in_channels} channels and gives {sizes.out_channels}, "
            f"but the autoencoder's have {channels}; use the vae that belongs to the transformer "
            "(Wan's image-to-video models of 36 channels are not supported)"
        )
    frames, down, across = sizes.patch_size
    if frames != 1:
        raise ValueError(f"dynamics: the transformer's patches span {frames} frames; they must span one")
    if height % down or width % across:
        raise ValueError(
            f"dynamics: latents of {height} x {width} pixels cannot be cut into patches of {down} x {across}; "
            "choose images whose sides are multiples of the patch in pixels (32 for Wan-2.2-TI2V)"
        )


def _perceptron(num_in: int, hidden: int, num_out: int) -> nn.Sequential:
    """Two layers, the last of which starts at zero."""
    last = nn.Linear(hidden, num_out)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(num_in, hidden), nn.SiLU(), last)


def _seen(filled: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Which token sees which, bool (B, 1, T N, T N): those of its own frame, and of the filled ones before it."""
    length = filled.shape[1]
    every = torch.ones(length, length, dtype=torch.bool, device=filled.device)
    seen = (every.tril() & filled[:, None]) | torch.eye(length, dtype=torch.bool, device=filled.device)
    return seen.repeat_interleave(num_tokens, 1).repeat_interleave(num_tokens, 2)[:, None]


def _heads(attn: Any, tokens: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value (B, tokens, heads, D)."""
    query, key = attn.norm_q(attn.to_q(tokens)), attn.norm_k(attn.to_k(words))
    query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in (query, key, attn.to_v(words)))
    return query, key, value


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighboring channels by its position's angle."""
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], -1)
    return turned.flatten(-2).to(x.dtype)
