"""OpenVLA's vision side: timm vision transformers and the projector into the language model.

Of each tower the patch features of the second-to-last block are used, without the final norm and
without prefix tokens; two towers are concatenated on channels (Prismatic, arXiv:2402.07865).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vla_rl.policies.openvla.network.llama import AttentionKernel
from vla_rl.policies.openvla.options import TowerSpec


class LayerScale(nn.Module):
    """timm's LayerScale with its parameter named as in OpenVLA's checkpoints."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor.to(x.dtype)


def make_tower(spec: TowerSpec, image_size: int) -> VisionTransformer:
    """The timm vision transformer of a spec."""
    tower = VisionTransformer(
        img_size=image_size,
        patch_size=spec.patch_size,
        embed_dim=spec.embed_dim,
        depth=spec.depth,
        num_heads=spec.num_heads,
        mlp_ratio=spec.mlp_ratio,
        class_token=spec.class_token,
        reg_tokens=spec.reg_tokens,
        no_embed_class=True,
        init_values=1e-5 if spec.layer_scale else None,
        global_pool="map" if spec.attention_pool else ("token" if spec.class_token else ""),
        num_classes=0,
    )
    if spec.layer_scale:
        for block in cast(nn.ModuleList, tower.blocks):
            block.ls1, block.ls2 = LayerScale(spec.embed_dim), LayerScale(spec.embed_dim)
    return tower


def to_patches(pixels: Tensor, patch_size: int) -> Tensor:
    """(B, H, W, 3) -> (B, patches, 3 * patch_size**2), each patch flattened as a convolution's kernel is."""
    b, h, w, c = pixels.shape
    p = patch_size
    patches = pixels.view(b, h // p, p, w // p, p, c).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(b, (h // p) * (w // p), c * p * p)


class FiLM(nn.Module):
    """Scale and shift of a block's features by the mean language embedding (Perez et al. 2018; OpenVLA-OFT+)."""

    def __init__(self, language_dim: int, dim: int):
        super().__init__()
        self.scale = nn.Linear(language_dim, dim)
        self.shift = nn.Linear(language_dim, dim)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        """x (B, L, dim), language (B, language_dim)."""
        return x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]


class VisionBackbone(nn.Module):
    """One or two towers over one image; with `language_dim`, language modulates every block by FiLM."""

    def __init__(self, specs: tuple[TowerSpec, ...], image_size: int, language_dim: int | None = None):
        super().__init__()
        self.specs = specs
        self.featurizer = make_tower(specs[0], image_size)
        self.fused_featurizer = make_tower(specs[1], image_size) if len(specs) == 2 else None
        self.film = None
        if language_dim is not None:
            self.film = nn.ModuleList(
                nn.ModuleList(FiLM(language_dim, spec.embed_dim) for _ in range(spec.depth)) for spec in specs
            )
        self.num_patches = (image_size // specs[0].patch_size) ** 2
        self.embed_dim = sum(spec.embed_dim for spec in specs)
        self._constants: dict[Any, tuple[Tensor, Tensor]] = {}  # A tower's offset and scale of pixels, by device.

    def blocks(self) -> list[nn.Module]:
        """The towers' blocks that are computed: all but the last."""
        towers = [t for t in (self.featurizer, self.fused_featurizer) if t is not None]
        return [block for tower in towers for block in cast(nn.ModuleList, tower.blocks)[:-1]]

    def unused_parameters(self) -> set[int]:
        """Ids of the parameters that every checkpoint holds, but that are never computed: the last block on."""
        towers = [t for t in (self.featurizer, self.fused_featurizer) if t is not None]
        parts = [
            part
            for t in towers
            for part in (cast(nn.ModuleList, t.blocks)[-1], t.norm, t.attn_pool)
            if part is not None
        ]
        parts += [cast(nn.ModuleList, film)[-1] for film in self.film or []]
        return {id(parameter) for part in parts for parameter in part.parameters()}

    def set_kernel(self, kernel: AttentionKernel) -> None:
        """Choose timm's attention kernel."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused_attn = kernel == "sdpa"  # pyright: ignore[reportAttributeAccessIssue]  # Final, in timm

    def forward(self, images: Tensor, dtype: torch.dtype, language: Tensor | None = None) -> Tensor:
        """uint8 (B, size, size, 3) -> patch features (B, patches, embed_dim).

        `language`: (B, language_dim), the mean embedding of the instruction's tokens, where there is FiLM.
        """
        towers = [t for t in (self.featurizer, self.fused_featurizer) if t is not None]
        films = self.film or [None] * len(towers)
        features = [
            _features(tower, spec, self._normalized(spec, images), dtype, cast(nn.ModuleList | None, film), language)
            for tower, spec, film in zip(towers, self.specs, films, strict=True)
        ]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _normalized(self, spec: TowerSpec, images: Tensor) -> Tensor:
        """float32 pixels as a tower was trained on them. Constants are brought to the device once."""
        key = (spec.mean, spec.std, images.device)
        if key not in self._constants:
            std, mean = (torch.tensor(values, device=images.device) for values in (spec.std, spec.mean))
            self._constants[key] = (-mean / std, 1 / (255 * std))
        offset, scale = self._constants[key]
        return torch.addcmul(offset, images.float(), scale)


def _features(
    tower: VisionTransformer,
    spec: TowerSpec,
    pixels: Tensor,
    dtype: torch.dtype,
    film: nn.ModuleList | None,
    language: Tensor | None,
) -> Tensor:
    conv = cast(nn.Conv2d, tower.patch_embed.proj)
    # A convolution whose stride is its kernel is a matrix product; bfloat16 convolution is slow on CPU.
    x = F.linear(to_patches(pixels, spec.patch_size).to(dtype), conv.weight.flatten(1), conv.bias)
    x = x + cast(Tensor, tower.pos_embed).to(x.dtype)
    prefix: list[Any] = [token for token in (tower.cls_token, tower.reg_token) if token is not None]
    if prefix:
        x = torch.cat([*(token.to(x.dtype).expand(x.shape[0], -1, -1) for token in prefix), x], 1)
    for i, block in enumerate(cast(nn.ModuleList, tower.blocks)[:-1]):
        if film is None:
            x = block(x)
        else:
            b = cast(Block, block)
            x = film[i](x + b.ls1(b.attn(b.norm1(x))), language)
            x = x + b.ls2(b.mlp(b.norm2(x)))
    return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """Patch features into the language model's embedding space; three layers when two towers are fused."""

    def __init__(self, vision_dim: int, hidden_size: int, fused: bool):
        super().__init__()
        middle = 4 * vision_dim if fused else hidden_size
        self.fc1 = nn.Linear(vision_dim, middle)
        self.fc2 = nn.Linear(middle, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size) if fused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.fc1(x)))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


class ProprioProjector(nn.Module):
    """The state as one token (OpenVLA-OFT)."""

    def __init__(self, state_dim: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(state)))
