"""The OpenVLA network: images, state, prompt and action positions in; action-token logits out.

Sequence of each row (S patches per camera, n = chunk_size * action_dim action tokens):

    BOS | S patches per camera | [state] | padding | rest of prompt | action positions

Padding stands before the prompt, so that the positions that are read are the same in all rows;
rotary positions count the real tokens only. Logits of action token j are read one position
before it: the last prompt token for j = 0. The parallel decoder fills the action positions with
placeholders and `</s>` and attends in both directions, the autoregressive one with the action
tokens drawn so far and attends backwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.policies.llama import AttentionKernel, LayerCache, LlamaForCausalLM
from vla_rl.policies.openvla import Architecture
from vla_rl.policies.vision import Projector, ProprioProjector, VisionBackbone

END_TOKEN = 2  # </s>, in Llama's vocabulary and in WordTokenizer's.


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

    def __init__(self, architecture: Architecture, value_head: bool = False, keyframe_head: bool = False):
        super().__init__()
        self.architecture = arch = architecture
        hidden = arch.llm.hidden_size
        self.vision_backbone = VisionBackbone(arch.towers, arch.image_size)
        self.projector = Projector(self.vision_backbone.embed_dim, hidden, fused=len(arch.towers) == 2)
        self.language_model = LlamaForCausalLM(arch.llm)
        self.proprio_projector = None if arch.state_dim is None else ProprioProjector(arch.state_dim, hidden)
        learned = arch.decoder == "parallel" and arch.placeholder == "learned"
        self.placeholder = nn.Embedding(arch.num_action_tokens, hidden) if learned else None
        self.value_head = ValueHead(hidden) if value_head else None
        self.keyframe_head = nn.Linear(hidden, 3) if keyframe_head else None
        self.compute_dtype = torch.float32
        self._first_action_id = arch.llm.vocab_size - arch.action_bins

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

    def set_kernel(self, kernel: AttentionKernel) -> None:
        """Choose the attention kernel of all parts."""
        self.vision_backbone.set_kernel(kernel)
        self.language_model.model.kernel = kernel

    # --- inputs -----------------------------------------------------------------------------

    def prefix(
        self, images: Tensor, state: Tensor | None, prompt: Tensor, prompt_valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings (B, L, hidden) and validity bool (B, L) of everything before the actions.

        Args:
            images: uint8 (B, cameras, size, size, 3).
            state: float32 (B, S), normalised.
            prompt: int64 (B, P), BOS first, then padding, then the rest of the prompt.
            prompt_valid: bool (B, P), False on padding.
        """
        b, cameras = images.shape[:2]
        dtype = self.compute_dtype
        patches = self.projector(self.vision_backbone(images.flatten(0, 1), dtype)).view(b, -1, self._hidden)
        words = self.language_model.model.embed_tokens(prompt).to(dtype)
        parts = [words[:, :1], patches.to(dtype)]
        if self.proprio_projector is not None:
            assert state is not None, "this network reads the state"
            parts.append(self.proprio_projector(state)[:, None].to(dtype))
        parts.append(words[:, 1:])
        num_visual = cameras * self.vision_backbone.num_patches + (self.proprio_projector is not None)
        visual_valid = prompt_valid.new_ones(b, num_visual)
        return torch.cat(parts, 1), torch.cat((prompt_valid[:, :1], visual_valid, prompt_valid[:, 1:]), 1)

    @property
    def _hidden(self) -> int:
        return self.architecture.llm.hidden_size

    def placeholders(self, batch_size: int) -> Tensor:
        """Input embeddings (B, n + 1, hidden) of the parallel decoder's action positions and `</s>`."""
        embed = self.language_model.model.embed_tokens
        end = embed.weight[END_TOKEN][None]
        n = self.architecture.num_action_tokens
        slots = end.new_zeros(n, self._hidden) if self.placeholder is None else self.placeholder.weight
        return torch.cat((slots, end)).to(self.compute_dtype).expand(batch_size, -1, -1)

    def embed_actions(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, k, hidden) of action tokens int64 (B, k)."""
        return self.language_model.model.embed_tokens(tokens + self._first_action_id).to(self.compute_dtype)

    # --- decoding ---------------------------------------------------------------------------

    def hidden(self, prefix: Tensor, valid: Tensor, tokens: Tensor | None) -> Tensor:
        """Hidden states float32 (B, n, hidden) that the n action tokens are read from.

        Args:
            prefix, valid: from `prefix`.
            tokens: int64 (B, n), the chunk whose likelihood is wanted; needed by the autoregressive decoder.
        """
        b, length = valid.shape
        n = self.architecture.num_action_tokens
        causal = self.architecture.decoder == "autoregressive"
        if causal:
            assert tokens is not None, "the autoregressive decoder needs the tokens to evaluate"
            slots = self.embed_actions(tokens[:, :-1])
        else:
            slots = self.placeholders(b)
        valid = torch.cat((valid, valid.new_ones(b, slots.shape[1])), 1)
        mask, positions = attention_mask(valid, causal), token_positions(valid)
        read = slice(length - 1, length - 1 + n)
        return self.language_model.model(torch.cat((prefix, slots), 1), positions, mask, read)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (..., action_bins) of hidden states float32 (..., hidden), for the action ids alone."""
        last = self.architecture.llm.vocab_size
        return F.linear(hidden, self.language_model.lm_head.weight[self._first_action_id : last])

    def start(self, prefix: Tensor, valid: Tensor) -> tuple[Tensor, list[LayerCache]]:
        """Autoregressive: hidden state (B, 1, hidden) for the first action token, and the cache."""
        length = valid.shape[1]
        mask, positions = attention_mask(valid, causal=True), token_positions(valid)
        return self.language_model.model(prefix, positions, mask, slice(length - 1, length))

    def step(self, token: Tensor, valid: Tensor, past: list[LayerCache]) -> tuple[Tensor, list[LayerCache]]:
        """Autoregressive: hidden state (B, 1, hidden) for the token after `token` int64 (B, 1).

        `valid`: bool (B, L) over all positions so far, the new one included.
        """
        mask = None if bool(valid.all()) else valid[:, None, None, :]
        positions = token_positions(valid)[:, -1:]
        return self.language_model.model(self.embed_actions(token), positions, mask, past=past)


def attention_mask(valid: Tensor, causal: bool) -> Tensor | None:
    """bool mask, broadcastable to (B, 1, L, L), True where a query may look; None: everywhere.

    Built here, so that no attention kernel's idea of `is_causal` decides: OFT's weights fall to 60 %
    success under a kernel that stays causal, and reach 98 % with the right one (openvla-oft, issue 135).
    """
    padded = not bool(valid.all())
    keys = valid[:, None, None, :]
    if not causal:
        return keys if padded else None
    length = valid.shape[1]
    below = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()[None, None]
    return below & keys if padded else below


def token_positions(valid: Tensor) -> Tensor:
    """int64 (B, L) rotary positions that count real tokens only; (1, L) without padding."""
    if bool(valid.all()):
        return torch.arange(valid.shape[1], device=valid.device)[None]
    return (valid.cumsum(1) - 1).clamp_min_(0)
