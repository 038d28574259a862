"""How often an imagined step waits for the device, and what it copies: counts, so that they cannot creep up."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from toy import METADATA, ToyInitialFrames, push

from pretend_device import pretending
from pretend_device.counts import Counts, counting
from vla_rl.common.cuda_graphs import ReplayedPass
from vla_rl.config import validate
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig, ObjectsConfig, WorldModelConfig
from world_model.env import recorded
from world_model.env.env import WorldModelEnv
from world_model.env.recorded import download
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel

NUM_ENVS, CHUNK = 3, 4
SMALL = {
    "frame_steps": CHUNK,
    "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
    "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 2, "memory": 2},
    "success": {"width": 32, "depth": 1},
}


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


def begun(device: str, **imagination: object) -> WorldModelEnv:
    """An environment with fresh networks, a step after its reset."""
    torch.manual_seed(0)
    config = validate(WorldModelConfig, SMALL)
    world_model = WorldModel(config, METADATA, build_parts(config, METADATA)).to(device).eval()
    options = validate(ImaginationConfig, {"precision": "fp32", **imagination})
    env = WorldModelEnv(world_model, ToyInitialFrames(), options, NUM_ENVS)
    env.reset([EpisodeSpec("reach", "train", i) for i in range(NUM_ENVS)])
    env.step(push(0.1, NUM_ENVS, CHUNK))
    return env


def test_a_step_copies_the_actions_in_and_what_is_seen_out(device):
    env = begun(device, dual_noise=0)
    with counting() as counts:
        env.step(push(0.1, NUM_ENVS, CHUNK))
    assert counts.totals["syncs"] == counts.totals["uploads"] == counts.totals["downloads"] == 1, counts.places()


@pytest.mark.parametrize("end_effector", ["commanded", "learned"])
def test_objects_are_rolled_without_a_wait_or_a_copy(device, end_effector):
    numbers = {"state_mean": (0.0,) * 3, "state_std": (1.0,) * 3, "action_low": (-1.0,) * 7, "action_high": (1.0,) * 7}
    metadata = METADATA.model_copy(update={**numbers, "objects_probability": (1.0, 0.0)})
    torch.manual_seed(0)
    config = validate(WorldModelConfig, SMALL)
    world_model = WorldModel(config, metadata, build_parts(config, metadata))
    parts = {"slots": [["block"], ["plate"]], "width": 16, "probe_width": 8, "end_effector": end_effector}
    world_model.set_objects(validate(ObjectsConfig, parts))
    options = validate(ImaginationConfig, {"precision": "fp32", "reward": "objects", "dual_noise": 0})
    env = WorldModelEnv(world_model.to(device).eval(), ThreeDimensions(), options, NUM_ENVS)
    env.reset([EpisodeSpec("reach", "train", i) for i in range(NUM_ENVS)])
    actions = np.full((NUM_ENVS, CHUNK, 7), 0.1, np.float32)
    env.step(actions)
    with counting() as counts:
        env.step(actions)
    assert counts.totals["syncs"] == counts.totals["uploads"] == counts.totals["downloads"] == 1, counts.places()


class ThreeDimensions(ToyInitialFrames):
    """The toy's, with a state of three numbers."""

    def observe(self, specs):
        obs = super().observe(specs)
        return replace(obs, state=np.pad(obs.state, ((0, 0), (0, 1))))


def test_penalties_wait_and_copy_no_more(device):
    torch.manual_seed(0)
    config = validate(WorldModelConfig, SMALL)
    metadata = METADATA.model_copy(update={"inverse_errors": (-1.0, 1.0)})
    world_model = WorldModel(config, metadata, build_parts(config, metadata)).to(device).eval()
    world_model.add_inverse()
    options = {"precision": "fp32", "dual_noise": 0, "action_penalty": 0.1}
    env = WorldModelEnv(world_model, ToyInitialFrames(), validate(ImaginationConfig, options), NUM_ENVS)
    env.reset([EpisodeSpec("reach", "train", i) for i in range(NUM_ENVS)])
    env.step(push(0.1, NUM_ENVS, CHUNK))
    with counting() as counts:
        result = env.step(push(0.1, NUM_ENVS, CHUNK))
    assert counts.totals["syncs"] == counts.totals["uploads"] == counts.totals["downloads"] == 1, counts.places()
    assert np.isfinite(result.reward).all() and (result.info["penalty"] > 0).all()
    keyframe = env.save_state([1])[0]
    env.reset([EpisodeSpec("reach", "train", 1, keyframe=keyframe)], [2])
    assert np.isfinite(env.step(push(0.1, 2, CHUNK), [0, 2]).reward).all()


def test_verification_asks_once_more(device):
    env = begun(device, dual_noise=1)
    with counting() as counts:
        env.step(push(0.1, NUM_ENVS, CHUNK))
    assert counts.totals["syncs"] <= 2, counts.places()


class CountedPass(ReplayedPass):
    """Counts what is recorded, and the tensors in and out, which on CUDA are copied to the graph and from it."""

    inside: ClassVar[list[Counts]] = []
    copies: ClassVar[list[int]] = []

    def __call__(self, *inputs):
        with counting() as counts:
            results = super().__call__(*inputs)
        self.inside.append(counts)
        self.copies.append(sum(tensor is not None for tensor in (*inputs, *results)))
        return results


@pytest.mark.parametrize(
    ("options", "waits", "passes", "launches"),
    [({"dual_noise": 0}, 1, 3, 80), ({"dual_noise": 1}, 2, 3, 81), ({"dual_noise": 0, "ensemble": 2}, 1, 4, 113)],
)
def test_the_host_has_no_part_in_a_recorded_chunk(device, monkeypatch, options, waits, passes, launches):
    monkeypatch.setattr(recorded, "ReplayedPass", CountedPass)
    plain, env = begun(device, **options), begun(device, compile=True, **options)
    actions = push(0.1, NUM_ENVS, CHUNK)
    with counting() as eager:
        expected = plain.step(actions)
    CountedPass.inside.clear()
    CountedPass.copies.clear()
    with counting() as counts:
        found = env.step(actions)
    assert len(CountedPass.inside) == passes
    for inside in CountedPass.inside:
        assert inside.kernels and not (inside.syncs or inside.uploads or inside.downloads), inside.places()
    outside = counts.kernels.total() - sum(inside.kernels.total() for inside in CountedPass.inside)
    outside += passes + sum(CountedPass.copies)
    assert outside <= launches < eager.kernels.total() / 9
    assert counts.totals["syncs"] == waits and counts.totals["uploads"] == 1, counts.places()
    np.testing.assert_allclose(found.obs.state, expected.obs.state, atol=1e-5)
    for camera, images in expected.obs.images.items():
        assert np.abs(found.obs.images[camera].astype(int) - images).max() <= 1


def test_what_is_read_in_one_transfer_is_what_was_there(device):
    arrays = [
        np.array([[True, False, True]]),
        np.arange(3, dtype=np.float32),
        np.arange(30, dtype=np.uint8).reshape(2, 3, 5),
        np.arange(2),
    ]
    with counting() as counts:
        found = download(*(torch.from_numpy(array).to(device) for array in arrays))
    assert counts.totals["downloads"] == 1
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
