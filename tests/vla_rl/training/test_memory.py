"""`vla-rl plan --memory`: fake tensors count what a real step allocates, at any size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from representatives import slow_but_for
from torch.profiler import ProfilerActivity, profile

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.common.distributed.tensor_files import load_weights, trained_weights
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.recipe import load_recipe
from vla_rl.training.checkpoint import TENSORS_FILE, load_checkpoint, save_checkpoint
from vla_rl.training.memory import (
    MemoryEstimate,
    _chunk,
    _observation,
    _unit_statistics,
    counted_device,
    measure,
    per_process,
    sizes_of,
    skeleton,
    without_values,
)
from vla_rl.types import Episode, EpisodeSpec

SPEC = fake_env_spec(image_size=32)
BATCH = 6
VARIANTS = {
    "parallel": {},
    "parallel, sdpa": {"attention": "sdpa"},
    "autoregressive": {"decoder": "autoregressive", "chunk_size": 1},
    "l1": {"decoder": "l1", "laplace": {}},
    "adapters": {"lora": {"rank": 4}, "trainable": "lora"},
    "checkpointing, critic": {"gradient_checkpointing": True, "value_head": True},
    "frozen vision, bf16": {"trainable": "frozen_vision", "precision": "bf16"},
}


def peak_by_the_allocator(run) -> int:
    """The most bytes that torch's CPU allocator had given out in `run`, from the profiler's record of each call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("variant", slow_but_for(("parallel", "adapters"), VARIANTS))
def test_the_estimate_is_within_15_percent_of_what_the_allocator_gives(variant):
    config = OpenVLAConfig(**{"precision": "fp32", "image_size": 32, **VARIANTS[variant]})
    fake = skeleton(config, SPEC, "cpu")
    with without_values(fake):
        estimate = measure(fake, SPEC, batch_size=BATCH)
    policy = config.build(SPEC)
    policy.norm_stats = _unit_statistics(policy, SPEC)
    obs, chunk = _observation(policy, SPEC, BATCH), _chunk(policy, BATCH)
    trained = policy.trainable_parameters()
    optimizer = torch.optim.AdamW(trained)

    def step():
        out = policy.evaluate(obs, chunk)
        value = 0.0 if out.value is None else out.value.sum()
        (out.log_prob.sum() + out.entropy.sum() + value).backward()

    step()
    optimizer.step()  # From now on gradients and optimizer state are there.
    step_peak = peak_by_the_allocator(step)
    size = sum(p.numel() * p.element_size() for p in policy.parameters())
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.ndim)
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in trained if p.grad is not None)
    assert estimate.weights == size and estimate.optimizer == held and estimate.gradients == gradients
    found = estimate.activations + estimate.logits + estimate.working
    assert found == pytest.approx(step_peak, rel=0.15), f"estimated {found / 1e6:.1f} MB, {step_peak / 1e6:.1f} MB seen"


UPDATES = {
    "full weights": {"precision": "fp32"},
    "adapters": {"precision": "fp32", "lora": {"rank": 4}, "trainable": "lora"},
    "bf16": {"precision": "bf16"},
    "checkpointed": {"precision": "fp32", "gradient_checkpointing": True},
}


def episodes(policy, num: int) -> list[Episode]:
    """One decision each, in two groups; every other succeeds."""
    made = []
    for number in range(num):
        obs, chunk = _observation(policy, SPEC, 1), _chunk(policy, 1)
        reward = np.zeros((1, policy.chunk_size), np.float32)
        reward[0, -1] = number % 2
        made.append(
            Episode(
                spec=EpisodeSpec(next(iter(SPEC.tasks))),
                obs=obs,
                chunks=chunk,
                reward=reward,
                terminated=reward > 0,
                truncated=np.zeros(reward.shape, bool),
                num_steps=np.array([policy.chunk_size]),
                success=bool(number % 2),
                final_obs=obs,
                group=number // (num // 2),
            )
        )
    return made


@pytest.mark.parametrize("name", slow_but_for(("full weights",), UPDATES))
def test_the_peak_of_an_update_is_within_15_percent_of_what_the_allocator_gives(name):
    config = OpenVLAConfig(**{"image_size": 32, **UPDATES[name]})
    fake = skeleton(config, SPEC, "cpu")
    with without_values(fake):
        estimate = measure(fake, SPEC, batch_size=BATCH)
    policy = config.build(SPEC)
    policy.norm_stats = _unit_statistics(policy, SPEC)
    learner = GRPOConfig(optim={"lr": 1e-6}, minibatch_size=2 * BATCH, micro_batch_size=BATCH).build(policy)
    batch = learner.prepare(episodes(policy, 2 * BATCH))
    learner.update(batch)  # From now on the optimizer's state and the copy of the last good weights are there.
    learner._zero_grad()
    peak = peak_by_the_allocator(lambda: learner.update(batch))
    beside = max(estimate.activations + estimate.logits + estimate.working, estimate.step)
    found = estimate.gradients + beside
    assert found == pytest.approx(peak, rel=0.15), f"estimated {found / 1e6:.1f} MB, {peak / 1e6:.1f} MB seen"
    kept = sum(t.nbytes for t in learner._last_good._kept)
    assert estimate.host_last_good == kept == sum(p.nbytes for p in policy.trainable_parameters())


def test_a_checkpoint_is_written_and_read_without_a_second_copy(tmp_path):
    config = OpenVLAConfig(precision="fp32", image_size=32)
    fake = skeleton(config, SPEC, "cpu")
    with without_values(fake):
        estimates = {d: measure(fake, SPEC, batch_size=BATCH, device_type=d) for d in ("cpu", "cuda")}
        apart = per_process(estimates["cuda"], fake, 4)
    policy = config.build(SPEC)
    policy.norm_stats = _unit_statistics(policy, SPEC)
    algo = GRPOConfig(optim={"lr": 1e-6}, minibatch_size=2 * BATCH, micro_batch_size=BATCH)
    learner = algo.build(policy)
    learner.update(learner.prepare(episodes(policy, 2 * BATCH)))
    fresh = algo.build(policy)
    path = tmp_path / "step_00000001"

    def save():
        tensors, state = learner.state()
        save_checkpoint(path, tensors | trained_weights(policy), state)

    def resume():
        tensors, state = load_checkpoint(path)
        assert str(path) in Path("/proc/self/maps").read_text(), "the system may take the file's pages back"
        load_weights(policy, tensors, str(path))
        fresh.load_state(tensors, state)

    largest = max(p.nbytes for p in policy.trainable_parameters())
    assert peak_by_the_allocator(save) <= estimates["cpu"].host_saving + 0.01 * largest
    mapped = (path / TENSORS_FILE).stat().st_size  # The allocator counts it too; each tensor is looked through for NaN.
    assert peak_by_the_allocator(resume) <= mapped + estimates["cpu"].host_last_good + largest
    assert (estimates["cuda"].host_saving, apart.host_saving, apart.resuming) == (largest, largest, largest)
    assert apart.host_total == apart.host_last_good + largest


@pytest.mark.slow
def test_seven_billion_parameters_are_counted_without_memory():
    config = OpenVLAConfig(
        preset="7b", precision="bf16", lora={"rank": 32}, trainable="lora", gradient_checkpointing=True
    )
    policy = skeleton(config, SPEC, "cuda")
    with without_values(policy):
        estimate = measure(policy, SPEC, batch_size=1)
    assert isinstance(estimate, MemoryEstimate)
    assert 7.4e9 < estimate.weights / 4 < 7.8e9  # Our own layout holds float32.
    assert "peak" in estimate.text()
    assert min(estimate.activations, estimate.logits, estimate.working) >= 0


def test_merged_weights_count_while_acting():
    base = {"precision": "fp32", "lora": {"rank": 4, "targets": "all-linear"}, "trainable": "lora"}
    counted = {}
    for merged in (False, True):
        policy = skeleton(OpenVLAConfig.model_validate(base | {"merge_lora": merged}), SPEC, "cpu")
        with without_values(policy):
            counted[merged] = measure(policy, SPEC, batch_size=1, rollout_batch=2)
    policy = OpenVLAConfig.model_validate(base | {"merge_lora": True}).build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.act(fake_observation(SPEC, 1))
    held = sum(weight.nbytes for weight in policy.__dict__["_merged_lora"].weights)
    assert counted[True].rollout - counted[False].rollout == held > 0


def test_auto_counts_for_a_gpu_whether_or_not_there_is_one():
    assert [counted_device(device) for device in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    ("name", "decoder", "state_dim"),
    [("openvla_libero_grpo", "autoregressive", None), ("openvla_oft_libero_grpo", "l1", 8)],
)
def test_openvlas_published_checkpoints_are_known_without_the_hub(name, decoder, state_dim, monkeypatch):
    def asked(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("vla_rl.training.memory.describing_folder", asked)
    recipe = load_recipe(name)
    config, architecture, is_published = sizes_of(recipe.policy, recipe.env.env_spec())
    assert is_published and config.use_state == (state_dim is not None)
    assert (architecture.decoder, architecture.state_dim) == (decoder, state_dim)
    assert (architecture.llm.hidden_size, architecture.llm.num_layers, architecture.image_size) == (4096, 32, 224)
