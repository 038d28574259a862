"""A Llama with the parameter names of transformers' LlamaForCausalLM, made for action decoding.

Three things the library's class does not do: attention that is bidirectional by an explicit
mask, whatever the attention kernel; hidden states of only those positions that are read (the
last layer then computes nothing else); and bfloat16 attention on CPU as plain matrix products
(5x faster in backward than the fused kernel there). A test compares the numbers with the library.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla_rl.policies.openvla.options import LlamaSpec

AttentionKernel = Literal["eager", "sdpa"]
# One layer's keys and values, (B, num_kv_heads, positions, head_dim): it writes those of the last positions.
LayerCache = tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: AttentionKernel) -> Tensor:
    """Softmax attention. q (B, N, Q, d); k, v (B, N, K, d); mask additive, broadcastable to (B, 1, Q, K)."""
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        weights = weights + mask
    return weights.softmax(-1) @ v


class _Rotate(torch.autograd.Function):
    """Rotary position embedding with a backward of three passes (a rotation's transpose is its inverse)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        x = x.contiguous()
        # Out of place: under torch.compile a change in place inside a custom function loses its gradient.
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grad_outputs
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention. x (B, N, L, d); cos, sin (B or 1, 1, L, d), sin signed."""
    if torch.is_grad_enabled():
        return cast(Tensor, _Rotate.apply(x, cos, sin))
    out, half = x * cos, x.shape[-1] // 2  # The same numbers, half of the memory's traffic.
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _RMSNorm(torch.autograd.Function):
    """y = w * x / rms(x). The library's is composed of many passes on CPU: this backward takes a third of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        scale = (squares / size).add_(eps).rsqrt_().to(x.dtype)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grad_outputs
        normed, scale, weight = ctx.saved_tensors
        product = grad * normed
        along = (product @ weight)[..., None]
        grad_x = (grad * weight).addcmul_(normed, along, value=-1 / normed.shape[-1]).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if x.is_cuda:  # One kernel, and one for its gradients.
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return cast(Tensor, _RMSNorm.apply(x, weight, self.eps))


class LlamaAttention(nn.Module):
    """Multi-head attention with rotary positions and grouped key/value heads."""

    def __init__(self, spec: LlamaSpec):
        super().__init__()
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.head_dim = spec.hidden_size // spec.num_heads
        self.q_proj = nn.Linear(spec.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, spec.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kernel: AttentionKernel,
        cache: LayerCache | None,
        read: slice,
    ) -> Tensor:
        heads = (x.shape[0], -1, self.num_heads, self.head_dim)
        kv_heads = (x.shape[0], -1, self.num_kv_heads, self.head_dim)
        cos, sin = rope
        q = rotate(self.q_proj(x[:, read]).view(heads).transpose(1, 2), cos[:, :, read], sin[:, :, read])
        k = rotate(self.k_proj(x).view(kv_heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(kv_heads).transpose(1, 2)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, -new.shape[2] :].copy_(new)
            k, v = cache
        if self.num_kv_heads != self.num_heads:
            repeat = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = attend(q, k, v, mask if mask is None or mask.shape[2] == 1 else mask[:, :, read], kernel)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, spec: LlamaSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around."""

    def __init__(self, spec: LlamaSpec):
        super().__init__()
        self.self_attn = LlamaAttention(spec)
        self.mlp = LlamaMLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kernel: AttentionKernel,
        cache: LayerCache | None = None,
        read: slice = slice(None),
    ) -> Tensor:
        x = x[:, read] + self.self_attn(self.input_layernorm(x), rope, mask, kernel, cache, read)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, spec: LlamaSpec):
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.padded_vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.gradient_checkpointing = False
        self.kernel: AttentionKernel = "sdpa"

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin (B or 1, 1, L, d) of positions int64 (B or 1, L)."""
        half = self.spec.hidden_size // self.spec.num_heads // 2
        exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions[:, None, :, None].float() * self.spec.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        read: slice = slice(None),
        caches: list[LayerCache] | None = None,
    ) -> Tensor:
        """Hidden states float32 (B, read, hidden) after the final norm.

        Args:
            x: (B, L, hidden) input embeddings.
            positions: int64 (B or 1, L) rotary positions.
            mask: bool, True where a query may look, broadcastable to (B, 1, L, past + L); None: everywhere.
            read: the positions whose hidden states are wanted.
            caches: for each layer the keys and values of the positions before, and room for these.
        """
        rope = self.rope(positions, x.dtype)
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        for i, layer in enumerate(self.layers):
            last = read if i + 1 == len(self.layers) else slice(None)
            arguments = (x, rope, mask, self.kernel, None if caches is None else caches[i], last)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(layer, *arguments, use_reentrant=False))
            else:
                x = layer(*arguments)
        return self.norm(x.float())

    def make_caches(self, batch_size: int, room: int, like: Tensor) -> list[LayerCache]:
        """Room for keys and values of so many positions, of `like`'s dtype and device, in each layer."""
        spec = self.spec
        shape = (batch_size, spec.num_kv_heads, room, spec.hidden_size // spec.num_heads)
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in self.layers]


class LlamaForCausalLM(nn.Module):
    """The language model: `model` and an untied `lm_head`."""

    def __init__(self, spec: LlamaSpec):
        super().__init__()
        self.model = LlamaModel(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.padded_vocab_size, bias=False)
