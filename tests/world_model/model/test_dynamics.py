"""The video transformer: causality, conditioning, the cache, the sampler, batches, learning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from world_model.model.dynamics import TransformerConfig, VideoContext, VideoDynamics
from world_model.model.flow import mix, sample, sampling_levels
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, DynamicsInputs, Frames

SHAPE = (4, 8, 8)  # C, h, w
STATE_DIM, ACTION_DIM, FRAME_STEPS = 8, 7, 4
TOP_DOWN = ((1.0, 0.0, 0.0, 0.5), (0.0, 1.0, 0.0, 0.5), (0.0, 0.0, 0.0, 1.0))


def make_dynamics(views: int = 1, seed: int = 0, **options: object) -> VideoDynamics:
    torch.manual_seed(seed)
    cameras = ("agentview", "wrist")[:views]
    config = TransformerConfig.model_validate(
        {
            "width": 32,
            "depth": 2,
            "heads": 2,
            "kinematics": "delta_pose",
            "projections": {"agentview": TOP_DOWN},
            "memory": 2,
            **options,
        }
    )
    mean, std = np.zeros(STATE_DIM, np.float32), np.full(STATE_DIM, 0.2, np.float32)
    dynamics = VideoDynamics(config, DynamicsInputs(SHAPE, cameras, STATE_DIM, ACTION_DIM, FRAME_STEPS, mean, std))
    for parameter in dynamics.parameters():  # Also the layers that start at zero, so that everything has its effect.
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return dynamics


def make_clip(batch: int, length: int, views: int = 1, seed: int = 0) -> Clip:
    g = torch.Generator().manual_seed(seed)
    executed = torch.ones(batch, length, FRAME_STEPS, dtype=torch.bool)
    executed[:, 0] = False
    values = torch.randn(batch, length, FRAME_STEPS, ACTION_DIM, generator=g).clamp(-1, 1) * executed[..., None]
    return Clip(
        Frames(
            torch.randn(batch, length, views, *SHAPE, generator=g), torch.randn(batch, length, STATE_DIM, generator=g)
        ),
        Actions(values, executed),
        torch.ones(batch, dtype=torch.int64),
        torch.ones(batch, length, dtype=torch.bool),
        torch.zeros(batch, length, dtype=torch.bool),
        ["push the block"] * batch,
    )


def predictions(dynamics: VideoDynamics, clip: Clip, level: float = 0.7, context_noise: float = 0.0) -> Frames:
    """What training predicts for frames 1 .. T-1, with given noise."""
    g = torch.Generator().manual_seed(9)
    batch, length = clip.valid.shape
    noise = Frames(
        torch.randn(clip.frames.latents.shape, generator=g), torch.randn(clip.frames.states.shape, generator=g)
    )
    context = mix(clip.frames, noise, torch.full((batch, length), context_noise))
    noisy = mix(clip.frames.at(slice(1, None)), noise.at(slice(1, None)), torch.full((batch, length - 1), level))
    number = clip.first[:, None] - 1 + torch.arange(length)
    number[:, 0] = 0
    before = context.frames.at(slice(0, -1))
    return dynamics._two_streams(context, noisy, before, clip.actions, number, clip.valid)


def changed_at(before: Frames, after: Frames) -> list[int]:
    """The frames in which two predictions differ at all."""
    latents = (before.latents != after.latents).flatten(2).any(2).any(0)
    states = (before.states != after.states).any(2).any(0)
    return torch.nonzero(latents | states).flatten().tolist()


@torch.no_grad()
def test_a_later_frame_or_action_never_changes_an_earlier_prediction() -> None:
    dynamics, clip = make_dynamics(views=2), make_clip(2, 6, views=2)
    plain = predictions(dynamics, clip)
    values = clip.actions.values.clone()
    values[:, 4] += 0.3
    acted = predictions(dynamics, replace(clip, actions=Actions(values, clip.actions.executed)))
    assert changed_at(plain, acted) == [3, 4]  # Frame 4 is prediction 3; it reaches frame 5 through memory.
    latents = clip.frames.latents.clone()
    latents[:, 3] += 1
    seen = predictions(dynamics, replace(clip, frames=Frames(latents, clip.frames.states)))
    assert changed_at(plain, seen) == [2, 3, 4]


@torch.no_grad()
def test_only_the_reference_is_seen_beyond_the_memory() -> None:
    dynamics, clip = make_dynamics(depth=1, memory=2), make_clip(1, 6)
    plain = predictions(dynamics, clip)
    latents = clip.frames.latents.clone()
    latents[:, 1] += 1
    seen = predictions(dynamics, replace(clip, frames=Frames(latents, clip.frames.states)))
    assert changed_at(plain, seen) == [0, 1, 2]  # Frame 1 itself (as what is to be predicted), 2 and 3.
    latents = clip.frames.latents.clone()
    latents[:, 0] += 1
    seen = predictions(dynamics, replace(clip, frames=Frames(latents, clip.frames.states)))
    assert changed_at(plain, seen) == [0, 1, 2, 3, 4]
    without = make_dynamics(depth=1, memory=2, reference=False)
    plain, seen = (
        predictions(without, replace(clip, frames=Frames(x, clip.frames.states)))
        for x in (clip.frames.latents, latents)
    )
    assert changed_at(plain, seen) == [0, 1]  # As any other frame, for as long as it is remembered.


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    dynamics, clip = make_dynamics(), make_clip(2, 5)
    valid = clip.valid.clone()
    valid[:, 4] = False
    plain = predictions(dynamics, replace(clip, valid=valid))
    latents = clip.frames.latents.clone()
    latents[:, 4] += 1
    other = predictions(dynamics, replace(clip, valid=valid, frames=Frames(latents, clip.frames.states)))
    assert changed_at(plain.at(slice(0, 3)), other.at(slice(0, 3))) == []


@torch.no_grad()
@pytest.mark.parametrize("reference", [True, False])
def test_imagining_over_the_cache_computes_what_training_does(reference: bool) -> None:
    dynamics = make_dynamics(views=2, context_noise=0.0, sampling_steps=1, reference=reference)
    clip = make_clip(2, 6, views=2)
    noise = NoiseStream([0, 1])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    trained = predictions(dynamics, clip, level=1.0)
    for i in range(1, 6):
        g = torch.Generator().manual_seed(9)
        drawn = Frames(
            torch.randn(clip.frames.latents.shape, generator=g)[:, i : i + 1],
            torch.randn(clip.frames.states.shape, generator=g)[:, i : i + 1],
        )
        here, given = slice(i, i + 1), NoiseStream([0, 1])
        given.frames = lambda like, count, drawn=drawn: drawn  # type: ignore[method-assign]
        imagined = dynamics.imagine(context, clip.actions.at(here), given)
        torch.testing.assert_close(imagined.latents, trained.latents[:, i - 1 : i], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(imagined.states, trained.states[:, i - 1 : i], atol=1e-5, rtol=1e-4)
        context = dynamics.extend(context, clip.frames.at(here), clip.actions.at(here), noise)
    assert context.num_frames.tolist() == [6, 6]


@torch.no_grad()
def test_a_batch_equals_its_rows_whatever_their_ages() -> None:
    dynamics, clip = make_dynamics(), make_clip(3, 5)
    ages = (1, 3, 4)  # frames remembered by each row
    alone, contexts = [], []
    for row, age in enumerate(ages):
        part = Clip(
            clip.frames.select([row]),
            clip.actions.select([row]),
            clip.first[[row]],
            clip.valid[[row]],
            clip.success[[row]],
            ["x"],
        )
        noise = NoiseStream([row])
        context = dynamics.begin(part.frames.at(slice(0, 1)), noise)
        context = dynamics.extend(context, part.frames.at(slice(1, age)), part.actions.at(slice(1, age)), noise)
        contexts.append((context, noise.select(torch.tensor([0]))))
        alone.append(dynamics.imagine(context, part.actions.at(slice(3, 5)), noise))
    together = contexts[0][0].select(torch.tensor([0, 0, 0]))
    for row in (1, 2):
        together = together.put(torch.tensor([row]), contexts[row][0])
    noise = NoiseStream.from_rows(torch.cat([own.rows for _, own in contexts]))
    batch = dynamics.imagine(together, clip.actions.at(slice(3, 5)), noise)
    for row in range(3):
        torch.testing.assert_close(batch.latents[row], alone[row].latents[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(batch.states[row], alone[row].states[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_context_survives_its_tensors() -> None:
    dynamics, clip = make_dynamics(), make_clip(2, 3)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0, 1]))
    again = VideoContext.from_tensors(context.tensors())
    actions = clip.actions.at(slice(1, 2))
    first = dynamics.imagine(context, actions, NoiseStream([5, 6]))
    second = dynamics.imagine(again, actions, NoiseStream([5, 6]))
    assert torch.equal(first.latents, second.latents)


@torch.no_grad()
def test_what_is_to_be_remembered_leaves_the_memory_as_it_is_until_it_is_written() -> None:
    dynamics, clip = make_dynamics(), make_clip(2, 4)
    first, second = (dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0, 1])) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in first.tensors().items()}
    new = clip.frames.at(slice(1, 4)), clip.actions.at(slice(1, 4))
    later, written = dynamics.to_remember(first, *new, NoiseStream([5, 6]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.tensors().items()) and len(written) == 3
    later.write(*written[-1])
    expected = dynamics.extend(second, *new, NoiseStream([5, 6])).tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in later.tensors().items())


class LargestMade(TorchDispatchMode):
    """The most elements of a tensor that an operation makes anew."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not (func.is_view or func._schema.is_mutable):
            self.size = max(self.size, made.numel())
        return made


@torch.no_grad()
def test_frames_are_remembered_in_place_and_imagined_from_a_memory_that_stays() -> None:
    dynamics, clip = make_dynamics(depth=4), make_clip(2, 6)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0, 1]))
    assert context.keys.data_ptr() != context.values.data_ptr()
    actions = clip.actions.at(slice(1, 6))
    with LargestMade() as made:
        dynamics.imagine(context, actions.at(slice(0, 1)), NoiseStream([5, 6]))
        later = dynamics.extend(context, clip.frames.at(slice(1, 6)), actions, NoiseStream([0, 1]))
    assert later.keys is context.keys and made.size < context.keys.numel()
    before = {name: tensor.clone() for name, tensor in later.tensors().items()}
    with LargestMade() as made:
        dynamics.imagine(later, actions, NoiseStream([5, 6]))
    assert made.size == context.keys.numel(), "frames imagined together are remembered in a copy"
    assert all(torch.equal(tensor, before[name]) for name, tensor in later.tensors().items())


@torch.no_grad()
def test_futures_differ_by_noise_and_repeat_by_seed() -> None:
    dynamics, clip = make_dynamics(), make_clip(1, 2)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0]))
    actions = clip.actions.at(slice(1, 2))
    one, two, again = (dynamics.imagine(context, actions, NoiseStream([seed])).latents for seed in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, two)


@torch.no_grad()
def test_at_temperature_zero_there_is_one_future() -> None:
    dynamics, clip = make_dynamics(context_noise=0.0, temperature=0.0), make_clip(1, 2)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0]))
    one, two = (dynamics.imagine(context, clip.actions.at(slice(1, 2)), NoiseStream([seed])) for seed in (1, 2))
    assert torch.equal(one.latents, two.latents)
    assert torch.equal(one.states, two.states)


def test_the_path_is_integrated_from_the_state_before() -> None:
    dynamics = make_dynamics(meters_per_action=0.05)
    values = torch.zeros(1, 1, FRAME_STEPS, ACTION_DIM)
    values[0, 0, :, 0] = torch.tensor([1.0, -0.5, 1.0, 1.0])
    executed = torch.tensor([[[True, True, True, False]]])
    start = torch.full((1, 1, STATE_DIM), 0.5)  # 0.1 m at the deviation of 0.2 m
    path = dynamics.action_maps.path(Actions(values, executed), start)
    assert path[0, 0, :, 0].tolist() == pytest.approx([0.1, 0.15, 0.125, 0.175, 0.175])
    end = torch.full((1, 1, STATE_DIM), 0.5)
    end[..., 0] = 0.175 / 0.2
    back = end - dynamics.action_maps.moved(Actions(values, executed), end)
    assert back[0, 0, :3].tolist() == pytest.approx([0.5, 0.5, 0.5])


@torch.no_grad()
def test_a_network_that_adds_nothing_moves_the_end_effector_as_commanded() -> None:
    dynamics, clip = make_dynamics(context_noise=0.05), make_clip(2, 4)
    for parameter in dynamics.head_state.parameters():
        parameter.zero_()
    noise = NoiseStream([0, 1])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    actions = clip.actions.at(slice(1, 4))
    imagined = dynamics.imagine(context, actions, noise, num_steps=1)
    moves = 0.05 * (actions.values[..., :3] * actions.executed[..., None]).sum(2).cumsum(1) / 0.2
    expected = clip.frames.states[:, :1] + torch.cat([moves, torch.zeros(2, 3, STATE_DIM - 3)], 2)
    assert torch.allclose(imagined.states, expected, atol=1e-5)


@torch.no_grad()
def test_frame_one_from_the_middle_of_an_episode_is_context_only() -> None:
    """Its frame before is not in the clip, so its own prediction does not count."""
    dynamics, clip = make_dynamics(), make_clip(1, 2)
    g = torch.Generator().manual_seed(0)
    whole, _ = dynamics.loss(clip, g)
    middle, _ = dynamics.loss(replace(clip, first=torch.tensor([4])), g)
    assert whole > 0
    assert middle == 0


@torch.no_grad()
def test_errors_are_told_of_the_frames_predicted_from_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("world_model.model.dynamics.PURE_NOISE", 1.0)  # So of all.
    clip = make_clip(2, 4)
    _, metrics = make_dynamics().loss(clip, torch.Generator().manual_seed(0))
    latents = clip.frames.latents
    assert metrics["copy_error"].item() == pytest.approx((latents[:, 1:] - latents[:, :-1]).square().mean().item())
    monkeypatch.setattr("world_model.model.dynamics.PURE_NOISE", 0.0)
    _, metrics = make_dynamics().loss(clip, torch.Generator().manual_seed(0))
    assert metrics["copy_error"] == metrics["latent_error"] == metrics["state_error"] == 0


@pytest.mark.parametrize(("num_steps", "temperature", "spread"), [(1, 1.0, 0.0), (200, 1.0, 1.0), (200, 0.5, 0.5)])
def test_the_sampler_draws_from_an_analytic_gaussian(num_steps: int, temperature: float, spread: float) -> None:
    """Data N(m, s^2) has E[x | z] in closed form: many steps give its mean and spread, one step its mean alone.

    The temperature scales the spread.
    """
    mean, std, n = 1.5, 0.4, 20_000

    def expected(z: Frames, t: float) -> Frames:
        gain = (1 - t) * std**2 / ((1 - t) ** 2 * std**2 + t**2)
        return Frames(*(mean + gain * (x - (1 - t) * mean) for x in (z.latents, z.states)))

    g = torch.Generator().manual_seed(0)
    noise = Frames(torch.randn(n, 1, 1, 1, 1, 1, generator=g), torch.randn(n, 1, 1, generator=g))
    drawn = sample(expected, noise, sampling_levels(num_steps), temperature).latents.flatten()
    assert drawn.mean().item() == pytest.approx(mean, abs=0.01)
    assert drawn.std().item() == pytest.approx(spread * std, abs=0.02)


def test_sampling_levels_start_at_noise_and_fall() -> None:
    assert sampling_levels(1) == (1.0,)
    assert sampling_levels(2) == (1.0, 0.75)
    assert all(a > b > 0 for a, b in zip(sampling_levels(5)[:-1], sampling_levels(5)[1:], strict=True))


def test_it_learns_where_an_action_moves_a_blob() -> None:
    """A bright latent column moves by what the actions say: learned, the error is far below that of repeating."""
    torch.manual_seed(0)
    dynamics = make_dynamics(kinematics="none", projections={}, width=64)
    optimizer = torch.optim.AdamW(dynamics.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(50):
        clip = moving_blobs(16, 3, g)
        loss, metrics = dynamics.loss(clip, g)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(dynamics.parameters(), 1.0)
        optimizer.step()
        errors.append(metrics["latent_error"] / metrics["copy_error"])
    assert np.mean(errors[-10:]) < 0.4


def moving_blobs(batch: int, length: int, g: torch.Generator) -> Clip:
    """Column p is lit; the first action dimension moves it by two columns left or right at each frame."""
    clip = make_clip(batch, length)
    move = torch.randint(0, 2, (batch, length), generator=g) * 2 - 1
    move[:, 0] = 0
    at = 2 * (torch.randint(0, 4, (batch, 1), generator=g) + move.cumsum(1)) % 8
    lit = (torch.arange(8) == at[..., None]) | (torch.arange(8) == at[..., None] + 1)
    latents = 2.0 * lit[:, :, None, None, None, :].expand(batch, length, 1, *SHAPE)
    values = torch.zeros(batch, length, FRAME_STEPS, ACTION_DIM)
    values[..., 0] = move[..., None]
    return replace(
        clip,
        frames=Frames(latents.clone(), torch.zeros(batch, length, STATE_DIM)),
        actions=Actions(values, clip.actions.executed),
    )
