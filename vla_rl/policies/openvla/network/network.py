"""The OpenVLA network: images, state, prompt and action positions in; action-token logits out.

Sequence of each row (S patches per camera, n = chunk_size * action_dim action tokens):

    BOS | S patches per camera | [state] | rest of prompt, padded on its left or right | action positions

Rotary positions count the real tokens only, and padding is never looked at, so that a row gives the
same numbers alone and in a batch. Action token j is read one position before it: from the last
prompt token for j = 0. The parallel decoders fill the action positions with placeholders and `</s>`
and attend in both directions, the autoregressive one with the action tokens drawn so far and
attends backwards.

Continuous heads read, for each step of the chunk, the hidden states of its A action positions side by side. OFT's L1
head alone gives one action and no likelihood; with RIPT-VLA's scale head the pair is a Laplace distribution per
component, which is what L1 regression fits the median of:

    p(a) = exp(-|a - mu| / b) / (2 b),   entropy = 1 + log(2 b)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.common.row_noise import by_row
from vla_rl.policies.normalization import QuantileStats
from vla_rl.policies.openvla.network.llama import AttentionKernel, LayerCache, LlamaForCausalLM
from vla_rl.policies.openvla.network.vision import Projector, ProprioProjector, VisionBackbone
from vla_rl.policies.openvla.options import MAX_SCALE, Architecture, LaplaceOptions


class _ResidualBlock(nn.Module):
    """x + ReLU(W LN(x)); a Sequential, so that names are OFT's."""

    def __init__(self, size: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class MLPResNet(nn.Module):
    """LN, linear, ReLU, residual blocks, LN, linear (moojink/openvla-oft, `action_heads.py`); LN's eps is 1e-5."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int, num_blocks: int = 2):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_size)
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden_size) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """OFT's action head: hidden states of the action positions to normalized actions."""

    def __init__(self, hidden_size: int, action_dim: int):
        super().__init__()
        self.action_dim = action_dim
        self.model = MLPResNet(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, H * A, hidden) -> (B, H, A), in [-1, 1] where it was trained."""
        return self.model(_by_step(hidden, self.action_dim))


class ScaleHead(nn.Module):
    """RIPT-VLA's scale head: log b of each component of the chunk (arXiv:2505.17016)."""

    def __init__(self, hidden_size: int, action_dim: int, options: LaplaceOptions):
        super().__init__()
        self.action_dim = action_dim
        self.bounds = (math.log(options.min_scale), math.log(MAX_SCALE))
        self.trunk = MLPResNet(hidden_size * action_dim, hidden_size, hidden_size)
        self.log_b_head = nn.Linear(hidden_size, action_dim)
        self.initial = math.log(options.initial_scale)
        self.reset()

    def reset(self) -> None:
        """Fresh output layer: every b close to `initial_scale`, whatever the input."""
        nn.init.xavier_uniform_(self.log_b_head.weight, gain=0.01)
        nn.init.constant_(self.log_b_head.bias, self.initial)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, H * A, hidden) -> log b (B, H, A), between the options' bounds."""
        return self.log_b_head(self.trunk(_by_step(hidden, self.action_dim))).clamp(*self.bounds)


def _by_step(hidden: Tensor, action_dim: int) -> Tensor:
    """(B, H * A, hidden) -> (B, H, A * hidden)."""
    return hidden.reshape(hidden.shape[0], hidden.shape[1] // action_dim, -1)


def position_loss(predicted: Tensor, position: np.ndarray, stats: QuantileStats | None) -> Tensor:
    """Smooth L1 error of predicted end-effector positions (B, 3), normalized, where a position is known; a scalar.

    Args:
        position: float (B, 3), meters; rows with NaN are left out.
        stats: of the state, whose first three numbers are the position.

    Raises:
        ValueError: no statistics.
    """
    if stats is None:
        raise ValueError("keyframe: needs state statistics, since positions are normalized by them; see set_norm_stats")
    known = np.asarray(np.isfinite(position).all(1))
    target = 2.0 * (position - stats.q01[:3]) / (stats.q99[:3] - stats.q01[:3] + 1e-8) - 1.0
    target = torch.from_numpy(np.where(known[:, None], target, 0.0).astype(np.float32)).to(predicted.device)
    error = F.smooth_l1_loss(predicted, target, reduction="none").mean(1)
    weight = torch.from_numpy(known).to(predicted.device).float()
    return (error * weight).sum() / weight.sum().clamp_min(1.0)


def laplace_log_prob(x: Tensor, location: Tensor, log_scale: Tensor) -> Tensor:
    """Log-density of x, elementwise."""
    return -(x - location).abs() * torch.exp(-log_scale) - log_scale - math.log(2.0)


def laplace_entropy(log_scale: Tensor) -> Tensor:
    """Differential entropy in nats, elementwise."""
    return 1.0 + math.log(2.0) + log_scale


def laplace_draw(location: Tensor, log_scale: Tensor, generator: torch.Generator | None) -> Tensor:
    """One draw per component, by inverse CDF; float32, never infinite."""
    device = location.device if generator is None else generator.device

    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

    uniform = by_row(draw, location.shape, generator).to(location.device)
    centered = (uniform - 0.5).clamp(-0.5 + 1e-9, 0.5 - 1e-9)
    noise = -centered.sign() * torch.log1p(-2.0 * centered.abs())
    return location + (log_scale.double().exp() * noise).float()


END_TOKEN = 2  # </s>, in Llama's vocabulary and in WordTokenizer's.


@dataclass(frozen=True)
class Prefix:
    """Everything before the action positions, embedded.

    Attributes:
        embeddings: (B, L, hidden).
        valid: bool (B, L), False on padding; None: there is none.
    """

    embeddings: Tensor
    valid: Tensor | None

    @property
    def length(self) -> int:
        """L."""
        return self.embeddings.shape[1]


@dataclass
class Decoding:
    """Keys and values of all positions that decoding reaches, written in place, and how many there are yet.

    Attributes:
        caches: of each layer, (B, num_kv_heads, positions, head_dim).
        valid: bool (B, positions), False on padding; None: there is none.
        positions: int64 (B or 1, positions), rotary.
        length: how many positions are filled.
    """

    caches: list[LayerCache]
    valid: Tensor | None
    positions: Tensor
    length: int

    def filled(self) -> list[LayerCache]:
        """The caches up to `length`."""
        return [(keys[:, :, : self.length], values[:, :, : self.length]) for keys, values in self.caches]


class ValueHead(nn.Module):
    """RL4VLA's critic on the hidden state that the first action token is read from (arXiv:2505.19789)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, 512)
        self.fc2 = nn.Linear(512, 128)
        self.fc3 = nn.Linear(128, 1, bias=False)
        nn.init.normal_(self.fc3.weight, 0.0, 0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, hidden) -> (B,)."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(hidden))))).squeeze(-1)


class OpenVLANetwork(nn.Module):
    """Vision towers, projector, Llama and the small heads; parameter names as in OpenVLA's checkpoints."""

    def __init__(self, architecture: Architecture):
        super().__init__()
        self.architecture = arch = architecture
        hidden = arch.llm.hidden_size
        self.vision_backbone = VisionBackbone(arch.towers, arch.image_size, hidden if arch.film else None)
        self.projector = Projector(self.vision_backbone.embed_dim, hidden, fused=len(arch.towers) == 2)
        self.language_model = LlamaForCausalLM(arch.llm)
        self.proprio_projector = None if arch.state_dim is None else ProprioProjector(arch.state_dim, hidden)
        learned = arch.decoder != "autoregressive" and arch.placeholder == "learned"
        self.placeholder = nn.Embedding(arch.num_action_tokens, hidden) if learned else None
        self.action_head = L1Head(hidden, arch.action_dim) if arch.decoder == "l1" else None
        self.scale_head: ScaleHead | None = None
        self.value_head: ValueHead | None = None
        self.keyframe_head: nn.Linear | None = None
        self.compute_dtype = torch.float32
        self._first_action_id = arch.llm.vocab_size - arch.action_bins

    def add_heads(self, value: bool, keyframe: bool, laplace: LaplaceOptions | None) -> None:
        """Fresh heads of ours, which no published checkpoint has: critic, keyframe prediction, scale."""
        hidden = self._hidden
        self.value_head = ValueHead(hidden) if value else None
        self.keyframe_head = nn.Linear(hidden, 3) if keyframe else None
        if self.architecture.decoder == "l1" and laplace is not None:
            self.scale_head = ScaleHead(hidden, self.architecture.action_dim, laplace)

    def initialize(self) -> None:
        """Fresh weights for training from scratch.

        Matrices by fan-in, those that write into a residual stream smaller by the square root of
        their number, embeddings and the output N(0, 0.02). Learns faster than 0.02 for all, which
        is made for widths in the thousands.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("o_proj", "down_proj")):
                    std *= (2 * self.architecture.llm.num_layers) ** -0.5
                elif name.endswith(("attn.proj", "mlp.fc2")):
                    std *= (2 * self.architecture.towers[0].depth) ** -0.5
                nn.init.trunc_normal_(module.weight, std=0.02 if name.endswith("lm_head") else std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
        if self.value_head is not None:
            nn.init.normal_(self.value_head.fc3.weight, 0.0, 0.02)
        if self.scale_head is not None:
            self.scale_head.reset()

    def set_kernel(self, kernel: AttentionKernel) -> None:
        """Choose the attention kernel of all parts."""
        self.vision_backbone.set_kernel(kernel)
        self.language_model.model.kernel = kernel

    def repeated_layers(self) -> list[nn.Module]:
        """The layers that hold nearly all of the work, of the towers and of the language model."""
        return [*self.vision_backbone.blocks(), *self.language_model.model.layers]

    # --- inputs -----------------------------------------------------------------------------

    def prefix(self, images: Tensor, state: Tensor | None, ids: Tensor, valid: Tensor | None = None) -> Prefix:
        """Everything before the actions, embedded.

        Args:
            images: uint8 (B, cameras, size, size, 3).
            state: float32 (B, S), normalized.
            ids: int64 (B, P), a prompt's tokens: BOS, then the rest, padded to the longest between BOS and the rest.
            valid: bool (B, P), False on padding; None: all are as long, so none is padded.
        """
        b, cameras = images.shape[:2]
        dtype = self.compute_dtype
        words = self.language_model.model.embed_tokens(ids).to(dtype)
        language = self._language(words, valid).repeat_interleave(cameras, 0) if self.architecture.film else None
        features = self.vision_backbone(images.flatten(0, 1), dtype, language)
        parts = [words[:, :1], self.projector(features).view(b, -1, self._hidden).to(dtype)]
        if self.proprio_projector is not None:
            assert state is not None, "this network reads the state"
            parts.append(self.proprio_projector(state)[:, None].to(dtype))
        num_visual = sum(part.shape[1] for part in parts[1:])
        parts.append(words[:, 1:])
        if valid is not None:
            valid = torch.cat((valid[:, :1], valid.new_ones(b, num_visual), valid[:, 1:]), 1)
        return Prefix(torch.cat(parts, 1), valid)

    def _language(self, words: Tensor, valid: Tensor | None) -> Tensor:
        """Mean embedding (B, hidden) of the prompt's tokens and of `</s>`, which OFT's FiLM counts in."""
        end = self.language_model.model.embed_tokens.weight[END_TOKEN].to(words.dtype)
        if valid is None:
            return (words.sum(1) + end) / (words.shape[1] + 1)
        return ((words * valid[..., None]).sum(1) + end) / (valid.sum(1, keepdim=True) + 1)

    @property
    def _hidden(self) -> int:
        return self.architecture.llm.hidden_size

    def placeholders(self, batch_size: int) -> Tensor:
        """Input embeddings (B, n [+ 1], hidden) of the parallel decoders' action positions and `</s>`."""
        embed = self.language_model.model.embed_tokens
        end = embed.weight[END_TOKEN][None]
        n = self.architecture.num_action_tokens
        slots = end.new_zeros(n, self._hidden) if self.placeholder is None else self.placeholder.weight
        if self.architecture.end_token:
            slots = torch.cat((slots, end.to(slots.dtype)))
        return slots.to(self.compute_dtype).expand(batch_size, -1, -1)

    def embed_actions(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, k, hidden) of action tokens int64 (B, k)."""
        return self.language_model.model.embed_tokens(tokens + self._first_action_id).to(self.compute_dtype)

    # --- decoding ---------------------------------------------------------------------------

    def hidden(self, prefix: Prefix, tokens: Tensor | None) -> Tensor:
        """Hidden states float32 (B, n, hidden) that the n action tokens are read from.

        `tokens`: int64 (B, n), the chunk, or its beginning, whose likelihood is wanted; needed by the autoregressive
        decoder. Without, n is all of a chunk's.
        """
        causal = self.architecture.decoder == "autoregressive"
        if causal:
            assert tokens is not None, "the autoregressive decoder needs the tokens to evaluate"
            slots, num_read = self.embed_actions(tokens[:, :-1]), tokens.shape[1]
        else:
            slots, num_read = self.placeholders(prefix.embeddings.shape[0]), self.architecture.num_action_tokens
        return self._run(prefix, slots, causal, num_read)

    def _run(
        self, prefix: Prefix, slots: Tensor, causal: bool, num_read: int, caches: list[LayerCache] | None = None
    ) -> Tensor:
        """Hidden states (B, num_read, hidden) from each row's last prompt token on."""
        length = prefix.length + slots.shape[1]
        valid = prefix.valid
        if valid is not None:
            valid = F.pad(valid, (0, slots.shape[1]), value=True)
        device = slots.device
        mask, positions = attention_mask(valid, length, causal, device), token_positions(valid, length, device)
        read = slice(prefix.length - 1, prefix.length - 1 + num_read)
        x = torch.cat((prefix.embeddings, slots), 1)
        return self.language_model.model(x, positions, mask, read, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (..., action_bins) of hidden states float32 (..., hidden), for the action ids alone."""
        last = self.architecture.llm.vocab_size
        return F.linear(hidden, self.language_model.lm_head.weight[self._first_action_id : last].to(hidden.dtype))

    def start(self, prefix: Prefix, room: int) -> tuple[Tensor, Decoding]:
        """Autoregressive: hidden state (B, 1, hidden) for the first action token; what goes on for `room` more."""
        length = prefix.length + room
        rows, like = len(prefix.embeddings), prefix.embeddings
        caches = self.language_model.model.make_caches(rows, length, like)
        valid = None if prefix.valid is None else F.pad(prefix.valid, (0, room), value=True)
        decoding = Decoding(caches, valid, token_positions(valid, length, like.device), prefix.length)
        return self._run(prefix, like[:, :0], True, 1, decoding.filled()), decoding

    def step(self, token: Tensor, decoding: Decoding) -> Tensor:
        """Autoregressive: hidden state (B, 1, hidden) for the token after `token` int64 (B, 1)."""
        decoding.length += 1
        now, valid = decoding.length, decoding.valid
        mask = None if valid is None else valid[:, None, None, :now]
        positions = decoding.positions[:, now - 1 : now]
        return self.language_model.model(self.embed_actions(token), positions, mask, caches=decoding.filled())


def attention_mask(valid: Tensor | None, length: int, causal: bool, device: torch.device) -> Tensor | None:
    """bool mask, broadcastable to (B, 1, L, L), True where a query may look; None: everywhere.

    Built here, so that no attention kernel's idea of `is_causal` decides: OFT's weights fall to 60 %
    success under a kernel that stays causal, and reach 98 % with the right one (openvla-oft, issue 135).
    """
    keys = None if valid is None else valid[:, None, None, :]
    if not causal:
        return keys
    below = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    return below if keys is None else below & keys


def token_positions(valid: Tensor | None, length: int, device: torch.device) -> Tensor:
    """int64 (B, L) rotary positions that count real tokens only; (1, L) without padding."""
    if valid is None:
        return torch.arange(length, device=device)[None]
    return (valid.cumsum(1) - 1).clamp_min_(0)
