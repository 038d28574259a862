"""The vision towers: timm's own numbers and names, the projector, and OpenVLA-7B's whole key list."""

import timm
import torch
from timm.models.vision_transformer import LayerScale as TimmLayerScale
from torch import nn

from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.network.llama import LlamaForCausalLM
from vla_rl.policies.openvla.network.network import OpenVLANetwork
from vla_rl.policies.openvla.network.vision import Projector, VisionBackbone, to_patches
from vla_rl.policies.openvla.options import HALF, IMAGENET_MEAN, IMAGENET_STD, TowerSpec

DINO = TowerSpec(
    embed_dim=48, depth=4, num_heads=3, patch_size=14, class_token=True, reg_tokens=4, layer_scale=True,
    mean=IMAGENET_MEAN, std=IMAGENET_STD,
)  # fmt: skip
SIGLIP = TowerSpec(embed_dim=72, depth=3, num_heads=4, mlp_ratio=3.7362, patch_size=14, attention_pool=True)


def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 56, 56, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_features_are_timms_second_to_last_block_without_norm_and_prefix():
    torch.manual_seed(0)
    backbone = VisionBackbone((DINO, SIGLIP), 56)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, 0.0, 0.1)
    features = backbone(images(), torch.float32)
    assert features.shape == (2, 16, 120)
    expected = []
    for tower, mean, std in (
        (backbone.featurizer, IMAGENET_MEAN, IMAGENET_STD),
        (backbone.fused_featurizer, HALF, HALF),
    ):
        pixels = images().permute(0, 3, 1, 2).float() / 255
        pixels = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        assert tower is not None
        expected.append(tower.get_intermediate_layers(pixels, n={len(tower.blocks) - 2})[0])
    torch.testing.assert_close(features, torch.cat(expected, -1), atol=1e-4, rtol=1e-4)


def test_kernels_agree():
    torch.manual_seed(0)
    backbone = VisionBackbone((DINO, SIGLIP), 56)
    outputs = []
    for kernel in ("eager", "sdpa"):
        backbone.set_kernel(kernel)
        outputs.append(backbone(images(), torch.float32))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_patches_times_kernel_is_the_convolution():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 8, 8)
    pixels = torch.randn(2, 24, 16, 3)
    expected = conv(pixels.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
    ours = nn.functional.linear(to_patches(pixels, 8), conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_projector_has_three_layers_only_when_fused():
    assert [tuple(p.shape) for p in Projector(120, 64, fused=True).parameters() if p.ndim == 2] == [
        (480, 120), (64, 480), (64, 64),
    ]  # fmt: skip
    assert [tuple(p.shape) for p in Projector(48, 64, fused=False).parameters() if p.ndim == 2] == [(64, 48), (64, 64)]


def test_7b_has_openvlas_tensors():
    config = OpenVLAConfig(preset="7b", decoder="autoregressive", chunk_size=1, use_state=False)
    architecture = config.architecture(action_dim=7, state_dim=8)
    with torch.device("meta"):
        network = OpenVLANetwork(architecture)
        towers = {
            "featurizer": timm.create_model("vit_large_patch14_reg4_dinov2", num_classes=0, img_size=224),
            "fused_featurizer": timm.create_model("vit_so400m_patch14_siglip_224", num_classes=0),
        }
    found = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    expected = {
        "projector.fc1.weight": (8704, 2176), "projector.fc1.bias": (8704,),
        "projector.fc2.weight": (4096, 8704), "projector.fc2.bias": (4096,),
        "projector.fc3.weight": (4096, 4096), "projector.fc3.bias": (4096,),
        "language_model.model.embed_tokens.weight": (32064, 4096),
        "language_model.lm_head.weight": (32064, 4096),
        "language_model.model.norm.weight": (4096,),
    }  # fmt: skip
    for name, tower in towers.items():
        assert isinstance(tower.blocks[0].ls1, TimmLayerScale) == (name == "featurizer")
        for key, tensor in tower.state_dict().items():
            expected[f"vision_backbone.{name}.{key.replace('.gamma', '.scale_factor')}"] = tuple(tensor.shape)
    for i in range(32):
        layer = f"language_model.model.layers.{i}."
        expected |= {f"{layer}self_attn.{p}_proj.weight": (4096, 4096) for p in "qkvo"}
        expected |= {f"{layer}mlp.{p}_proj.weight": (11008, 4096) for p in ("gate", "up")}
        expected[f"{layer}mlp.down_proj.weight"] = (4096, 11008)
        expected |= {f"{layer}{n}.weight": (4096,) for n in ("input_layernorm", "post_attention_layernorm")}
    assert found == expected
    assert len(found) == 982
    assert sum(key.startswith("vision_backbone.featurizer.") for key in found) == 343
    assert sum(key.startswith("vision_backbone.fused_featurizer.") for key in found) == 342
    assert round(sum(tensor.numel() for tensor in network.state_dict().values()) / 1e6, 2) == 7541.24
    assert isinstance(network.language_model, LlamaForCausalLM)
