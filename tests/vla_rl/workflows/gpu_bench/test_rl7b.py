"""A whole iteration of RL on drawn weights: what stands for the download, the clocks, and all of it in LIBERO."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from libero_setup import needs_assets
from pretend_device import pretending

from sim.dummy import DummyConfig
from vla_rl.common import progress
from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.rollout.runner import collect
from vla_rl.training.memory import MemoryEstimate, estimate
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.gpu_bench.command import finish, open_results, run_inside
from vla_rl.workflows.gpu_bench.large_policy import DrawnOpenVLAConfig, DrawnRewardConfig
from vla_rl.workflows.gpu_bench.parts import rl7b
from vla_rl.workflows.gpu_bench.timed_libero import share_of_rendering

SPEC = fake_env_spec(("agentview", "wrist"))
CHOSEN = {
    "precision": "bf16", "laplace": {}, "lora": {"rank": 2, "targets": "all-linear"}, "trainable": "lora",
    "gradient_checkpointing": True,
}  # fmt: skip


def kind_of(config_class: type) -> str:
    return f"{config_class.__module__}:{config_class.__name__}"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("drawn") / "l1", "l1")


def build(folder, kind: str):
    return build_component("policy", {"kind": kind, "path": str(folder), **CHOSEN}).build(SPEC, "cpu", 0)


def test_drawn_weights_have_the_names_shapes_and_dtypes_of_a_checkpoint_that_is_read(published):
    drawn, read = build(published, kind_of(DrawnOpenVLAConfig)), build(published, "openvla")
    looks = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in policy.named_parameters()} for policy in (drawn, read)]
    assert looks[0] == looks[1] and drawn.config.images == read.config.images and drawn.chunk_size == read.chunk_size
    assert all(
        torch.equal(a, b)
        for a, b in zip(drawn.parameters(), build(published, kind_of(DrawnOpenVLAConfig)).parameters(), strict=True)
    )


def test_drawn_weights_are_saved_as_adapters_on_their_checkpoint(published, tmp_path):
    drawn = build(published, kind_of(DrawnOpenVLAConfig))
    drawn.save(tmp_path / "policy")
    assert not list((tmp_path / "policy").glob("model*.safetensors"))
    again = dict(load_policy(tmp_path / "policy").named_parameters())
    trained = {n: p for n, p in drawn.named_parameters() if p.requires_grad}
    assert trained and all(torch.equal(again[name].float(), p.float()) for name, p in trained.items())


def test_rewards_are_drawn_where_episodes_end(published):
    reward = {"kind": kind_of(DrawnRewardConfig), "seed": 1}
    env = DummyConfig.model_validate({"num_envs": 4, "horizon": 16, "reward": reward}).build()
    policy = build_component("policy", {"kind": "openvla", "image_size": 32, "chunk_size": 4}).build(env.spec)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    specs = [EpisodeSpec(next(iter(env.spec.tasks)), "train", index) for index in range(8)]
    first, second = ([e.success for e in collect(policy, env, specs)] for _ in range(2))
    assert 0 < sum(first) < 8 and first != second
    assert [e.num_chunks for e in collect(policy, env, specs)] == [4] * 8


def test_each_stage_has_the_time_that_is_none_of_those_inside_it(monkeypatch):
    ticks = count()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(ticks)))
    clock = rl7b.NestedStopwatch()
    thing = SimpleNamespace(work=lambda: "done")
    clock.watch(thing, "work", "inner")
    with clock.measure("outer"):
        assert thing.work() == thing.work() == "done"
    thing.work()
    assert dict(clock.seconds) == {"outer": 3.0, "inner": 3.0}
    assert clock.report() == {"outer": 3.0, "inner": 3.0, "other": 3.0, "total": 9.0}


def test_rendering_is_told_from_stepping_by_all_environments_clocks(tmp_path):
    assert np.isnan(share_of_rendering(tmp_path))
    for number in (1, 2):
        (tmp_path / f"{number}.json").write_text(json.dumps({"simulation": 3.0, "rendering": float(number)}))
    assert share_of_rendering(tmp_path) == pytest.approx(3 / 9)


def test_the_gpus_share_is_sampled_while_a_block_runs(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho 50\necho 100\ntouch {tmp_path}/ready\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    with rl7b.gpu_busy(torch.device("cuda")) as samples:
        while not (tmp_path / "ready").exists():
            pass
    assert samples == [0.5, 1.0] and "--id=GPU-1-2" in (tmp_path / "arguments").read_text()
    with rl7b.gpu_busy(torch.device("cpu")) as samples:
        pass
    assert samples == []


def estimate_as_without_the_device(recipe: TrainRecipe) -> MemoryEstimate:
    """The pretend device swaps what modules move, which tensors that are watched refuse."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        return estimate(recipe)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@pytest.mark.slow
@needs_assets
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", "pretend"])
def test_a_whole_iteration_in_libero_and_its_stages_sum_to_the_whole(device, tmp_path, monkeypatch):
    monkeypatch.setattr(rl7b, "estimate", estimate_as_without_the_device)
    results = open_results(tmp_path, "tiny", "cpu", resume=False)
    with pretending() if device == "pretend" else nullcontext():
        run_inside(results, "rl7b", device, 600)
    record = results.parts["rl7b"]
    assert record.errors == [] and record.state == "done" and not record.pending and finish(results) == 0
    rows = {row.what: row.value for row in record.rows if row.value is not None}
    stages = [row.what for row in record.rows if "% of the whole" in row.note]
    assert {"simulation", "rendering", "image chain", "act", "update", "optimizer", "weights to disk"} < set(stages)
    assert sum(rows[stage] for stage in stages) == pytest.approx(rows["the whole"])
    assert all(rows[stage] > 0 for stage in stages if stage != "other")
    inside = ("simulation", "rendering", *rl7b.STAGES.values())
    assert sum(rows[stage] for stage in inside) == pytest.approx(rows["an iteration"])
    assert rows["plan of an iteration: off by"] >= 0 and rows["plan of the memory: off by"] >= 0
    assert "share that no stage tells" in (tmp_path / "report.html").read_text()
