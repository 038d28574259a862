"""Every recipe for a published checkpoint at its published size, on torch's meta device; at tiny size it is run, see
test_gpu_bench_parts.py."""

from __future__ import annotations

from typing import cast

import pytest
import timm
import torch
from libero_setup import needs_library
from transformers import LlamaConfig, LlamaForCausalLM

from vla_rl.config import find_recipe, read_yaml, recipes_folder
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.lora import is_adapter
from vla_rl.policies.openvla.options import OpenVLAOptions
from vla_rl.training.memory import estimate, skeleton
from vla_rl.training.published_sizes import PUBLISHED
from vla_rl.workflows.gpu_bench.parts.recipes import RECIPES

META = torch.device("meta")
SIZES = {checkpoint.name: checkpoint for checkpoint in PUBLISHED}
OPENVLA = [name for name, published in RECIPES.items() if published.kind in ("base", "l1")]
# OpenVLA-OFT's own: its MLPResNet (prismatic/models/action_heads.py) and projector of the state.
L1_WEIGHTS = {
    "action_head.model.layer_norm1": (7 * 4096,), "action_head.model.fc1": (4096, 7 * 4096),
    "action_head.model.mlp_resnet_blocks.0.ffn.0": (4096,), "action_head.model.mlp_resnet_blocks.0.ffn.1": (4096, 4096),
    "action_head.model.mlp_resnet_blocks.1.ffn.0": (4096,), "action_head.model.mlp_resnet_blocks.1.ffn.1": (4096, 4096),
    "action_head.model.layer_norm2": (4096,), "action_head.model.fc2": (7, 4096),
    "proprio_projector.fc1": (4096, 8), "proprio_projector.fc2": (4096, 4096),
}  # fmt: skip


def with_biases(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.{leaf}": shape if leaf == "weight" else shape[:1]
        for name, shape in weights.items()
        for leaf in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of what OpenVLA publishes, by transformers' and timm's own classes."""
    with META:
        modules = {
            "language_model": LlamaForCausalLM(LlamaConfig(vocab_size=32064)),
            "vision_backbone.featurizer": timm.create_model(
                "vit_large_patch14_reg4_dinov2", num_classes=0, img_size=224
            ),
            "vision_backbone.fused_featurizer": timm.create_model("vit_so400m_patch14_siglip_224", num_classes=0),
        }
    shapes = {f"{where}.{n}": tuple(p.shape) for where, module in modules.items() for n, p in module.named_parameters()}
    projector = {"fc1": (8704, 2176), "fc2": (4096, 8704), "fc3": (4096, 4096)}
    shapes |= with_biases({f"projector.{layer}": shape for layer, shape in projector.items()})
    return {name.replace(".gamma", ".scale_factor"): shape for name, shape in shapes.items()}  # As published.


def test_every_shipped_recipe_for_a_published_checkpoint_is_among_them():
    named = set()
    for file in recipes_folder().glob("*.yaml"):
        path = str(read_yaml(find_recipe(file.stem)).get("policy", {}).get("path") or "")
        if path and not path.startswith(("runs/", "pretrained:")):  # Of this repository's own making.
            named.add(file.stem)
    assert named == {published.recipe for published in RECIPES.values()}


@needs_library
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == OPENVLA[1] else pytest.mark.slow) for n in OPENVLA])
def test_openvlas_names_shapes_adapters_and_trained_weights_at_full_size(name, published_shapes):
    recipe = RECIPES[name].load()
    policy = skeleton(cast(OpenVLAOptions, recipe.policy), recipe.env.env_spec(), "cuda")
    parameters = dict(policy.network.named_parameters())
    found = {n.replace(".base_layer.", "."): tuple(p.shape) for n, p in parameters.items() if not is_adapter(n)}
    heads = with_biases(L1_WEIGHTS) if RECIPES[name].kind == "l1" else {}
    scale_head = {n for n in found if n.startswith("scale_head.")}  # Ours, for RL.
    assert {n: shape for n, shape in found.items() if n not in scale_head} == published_shapes | heads
    assert bool(scale_head) == bool(heads)
    adapted = {n.partition(".lora_")[0] for n in parameters if is_adapter(n)}
    linear = {n.removesuffix(".weight") for n, shape in published_shapes.items() if len(shape) == 2}
    assert adapted == linear - {"language_model.lm_head", "language_model.model.embed_tokens"}
    trained = {n for n, p in parameters.items() if p.requires_grad}
    assert {n for n in trained if not is_adapter(n)} == heads.keys() | scale_head
    assert sum(parameters[n].numel() for n in trained if is_adapter(n)) == SIZES["OpenVLA 7B"].adapters
    assert {parameters[n].dtype for n in trained} == {torch.float32}
    # Adapters of the towers' last blocks, which nothing reads, are not trained.
    assert {p.dtype for n, p in parameters.items() if not (n in trained or is_adapter(n))} == {torch.bfloat16}


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("name", OPENVLA[:2])
def test_openvlas_losses_are_traced_forward_and_backward_at_full_size(name):
    counted = estimate(RECIPES[name].load())
    assert counted.weights > 2 * SIZES["OpenVLA 7B"].parameters
    assert min(counted.activations, counted.logits, counted.working) > 0


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("smolvla_libero_grpo", "SmolVLA"), ("pi0_libero_grpo", "pi0")])
def test_flow_policies_have_the_published_sizes_and_train_what_their_recipe_says(name, size):
    recipe = RECIPES[name].load()
    policy, options = RECIPES[name].build(recipe, META, True), cast(LeRobotOptions, recipe.policy)
    # PaliGemma's head is its embedding.
    known = {n: p for n, p in policy.named_parameters() if not n.endswith("paligemma.lm_head.weight")}
    adapters = {n for n in known if is_adapter(n)}
    assert sum(p.numel() for n, p in known.items() if n not in adapters) == SIZES[size].parameters
    assert policy.chunk_size == options.num_actions and policy.cameras == recipe.env.env_spec().cameras
    trained = {n for n, p in known.items() if p.requires_grad}
    if options.lora is not None:
        assert trained == adapters and sum(known[n].numel() for n in adapters) == SIZES[size].adapters
    else:
        assert not adapters and trained and not any(".vlm.model.vision_model." in n for n in trained)
