"""The memory that published checkpoints need: one source for the commands and the docs, counted anew here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.policies.lerobot.options import FlowLora
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.training.memory import estimate, measure, skeleton, without_values
from vla_rl.training.published_sizes import GIGABYTE, PUBLISHED, advice, table
from vla_rl.workflows.doctor import check_device
from vla_rl.workflows.gpu_bench.parts.flow import write_smolvlm2_500m

ROOT = Path(__file__).resolve().parents[3]
BY_NAME = {checkpoint.name: checkpoint for checkpoint in PUBLISHED}


def test_the_docs_and_the_doctor_say_what_is_computed() -> None:
    assert table() in (ROOT / "docs/gpu.md").read_text()
    if not torch.cuda.is_available():
        assert advice() in check_device("auto").fix
    assert "OpenVLA 7B 20 (117), " in advice() and "pi0 7+ (52+)" in advice()
    trains, trains_all = advice(24 * GIGABYTE).split("; every weight of: ")
    assert "OpenVLA 7B" in trains and trains_all.startswith("SmolVLA (")
    assert "OpenVLA 7B" not in advice(16 * GIGABYTE) and "pi0.5" in advice(16 * GIGABYTE)


def test_memory_of_another_family_names_them(tmp_path: Path) -> None:
    from vla_rl.config import ConfigError
    from vla_rl.recipe.recipe import load_recipe

    with pytest.raises(ConfigError, match=r"policy.kind: 'lerobot' cannot be counted by part.*SmolVLA 1\+ \(7\+\)"):
        estimate(load_recipe("smolvla_tabletop"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decoder"), [("OpenVLA 7B", "autoregressive"), ("OpenVLA-OFT 7B (discrete)", "parallel")]
)
def test_openvlas_figures_are_what_memory_counts(name: str, decoder: str) -> None:
    config = OpenVLAConfig(
        path="openvla/openvla-7b-finetuned-libero-spatial",
        decoder=decoder,  # type: ignore[arg-type]
        precision="bf16",
        lora={"rank": 32, "targets": "all-linear"},  # type: ignore[arg-type]
        trainable="lora",
        gradient_checkpointing=True,
    )
    spec = fake_env_spec(image_size=256)
    policy = skeleton(config, spec, "cuda")
    with without_values(policy):
        counted = measure(policy, spec, batch_size=8, device_type="cuda")
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in policy.parameters()) - trained
    assert trained == BY_NAME[name].adapters and whole == pytest.approx(BY_NAME[name].parameters, rel=0.001)
    assert counted.total == pytest.approx(BY_NAME[name].with_adapters, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy_type"), [("SmolVLA", "smolvla"), ("pi0", "pi0"), ("pi0.5", "pi05")])
def test_the_others_have_as_many_parameters_in_lerobot(
    name: str, policy_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
    from lerobot.policies.factory import get_policy_class

    options = {}
    if policy_type == "smolvla":
        write_smolvlm2_500m(tmp_path)
        options["vlm_model_name"] = str(tmp_path)
    else:  # What casts weights cannot cast fake ones.
        modeling = importlib.import_module(f"lerobot.policies.{policy_type}.modeling_{policy_type}")
        monkeypatch.setattr(modeling.PaliGemmaWithExpertModel, "to_bfloat16_for_selected_params", lambda *_: None)
        monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
    features = {"observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 256, 256))}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    config_class = PreTrainedConfig.get_known_choices()[policy_type]
    config = config_class(input_features=features, output_features=outputs, device="cpu", **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = get_policy_class(policy_type)(config)
    sizes = {n: p.numel() for n, p in policy.named_parameters() if not n.endswith("paligemma.lm_head.weight")}
    assert sum(sizes.values()) == BY_NAME[name].parameters  # PaliGemma's head is its embedding.
    adapters = [
        32 * sum(p.shape)
        for n, p in policy.named_parameters()
        if "expert.layers." in n.replace("gemma_expert.model", "expert") or ".lm_expert.layers." in n
        if n.split(".")[-2] in FlowLora().targets
    ]
    assert sum(adapters) == BY_NAME[name].adapters
