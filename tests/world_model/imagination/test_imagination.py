"""What is believed of an imagined chunk, worked out by hand; and trust, which sees the same as the environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy import GAIN, GOAL, ToyInitialFrames, push, toy_env, toy_world_model

from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig
from world_model.imagination.chunk import ImaginedChunk, imagine_chunk
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.noise import NoiseStream
from world_model.trust.subject import OpenLoop
from world_model.types import Frames

SEEDS = list(range(100, 300))


def begin(world_model: WorldModel, position: float | list[float], seeds: list[int]) -> Memory:
    where = torch.tensor(position, dtype=torch.float32).expand(len(seeds))
    latents = where[:, None, None, None, None, None].expand(-1, 1, 2, 1, 1, 1)
    return world_model.begin(
        Frames(latents, torch.stack([where, 0 * where], 1)[:, None]), ["reach"] * len(seeds), seeds
    )


def imagine(
    world_model: WorldModel, memory: Memory, actions: np.ndarray, num_steps: int | None = None, **options: object
) -> ImaginedChunk:
    steps = np.full(len(actions), actions.shape[1] if num_steps is None else num_steps)
    return imagine_chunk(
        world_model, memory, world_model.actions(actions, steps), ImaginationConfig.model_validate(options)
    )


def path(chunk: ImaginedChunk) -> torch.Tensor:
    """Positions, (B, F)."""
    return chunk.frames.latents[:, :, 0, 0, 0, 0]


def drawn(seeds: list[int], after: int = 1, count: int = 1) -> torch.Tensor:
    """The first number of each stream, and that of each of `count` other futures `after` draws, (B, 1 + count)."""
    stream = NoiseStream(seeds)
    own = torch.cat([stream.normal(1) for _ in range(after)], 1)[:, :1]
    return torch.cat([own, stream.other_futures(count).normal(1).view(-1, count)], 1)


# --- one chunk --------------------------------------------------------------------------------


def test_success_is_latched_within_a_chunk() -> None:
    world_model = toy_world_model()
    there_and_back = np.concatenate([push(1, 1, 4), push(-1, 1, 4)], 1)
    chunk = imagine(world_model, begin(world_model, 5.5, [0]), there_and_back)
    assert path(chunk).tolist() == [[6.5, 5.5]]
    torch.testing.assert_close(chunk.success_score, path(chunk) - GOAL)
    torch.testing.assert_close(chunk.clip_score, path(chunk) - GOAL + 1)
    assert chunk.success.tolist() == [[True, True]] and not chunk.discarded.any()


def test_frames_that_no_action_led_to_do_not_count() -> None:
    world_model = toy_world_model(noise=1.0)
    memory = begin(world_model, 6.0, SEEDS)
    chunk = imagine(world_model, memory, push(0, len(SEEDS), 8), num_steps=4, dual_noise=0)
    assert torch.equal(chunk.success, (path(chunk)[:, :1] > GOAL).expand(-1, 2))


def test_a_success_stands_only_if_it_holds_under_new_noise() -> None:
    world_model = toy_world_model(noise=0.5)
    chunk = imagine(world_model, begin(world_model, 6.0, SEEDS), push(0, len(SEEDS), 4))
    first, again = (6 + 0.5 * drawn(SEEDS)).T
    predicted, held = first > GOAL, again > GOAL
    assert torch.equal(chunk.success[:, 0], predicted & held)
    assert torch.equal(chunk.discarded, predicted & ~held)
    assert 20 < int(chunk.discarded.sum()) < 80 and 20 < int(chunk.success.sum()) < 80
    # A discarded success did not happen: the episode goes on in the future that failed.
    torch.testing.assert_close(path(chunk)[:, 0], torch.where(predicted & ~held, again, first))
    torch.testing.assert_close(chunk.success_score, path(chunk) - GOAL)
    torch.testing.assert_close(chunk.clip_score, path(chunk) - GOAL + 1)


def test_one_flip_of_several_discards_and_the_first_one_is_gone_on_with() -> None:
    world_model = toy_world_model(noise=0.5)
    chunk = imagine(world_model, begin(world_model, 6.0, SEEDS), push(0, len(SEEDS), 4), dual_noise=3)
    first, again = (6 + 0.5 * drawn(SEEDS, count=3)).split([1, 3], 1)
    first = first[:, 0]
    predicted, held = first > GOAL, again > GOAL
    assert torch.equal(chunk.success[:, 0], predicted & held.all(1))
    flipped = predicted & ~held.all(1)
    expected = torch.stack([row[row <= GOAL][0] for row in again[flipped]])
    torch.testing.assert_close(path(chunk)[flipped, 0], expected)


def test_verification_does_not_change_what_happens_next() -> None:
    world_model = toy_world_model(noise=0.5)
    memories = [begin(world_model, 7.0, SEEDS) for _ in range(3)]
    for memory, options in zip(memories, ({"dual_noise": 0}, {"dual_noise": 2}, {"ensemble": 3}), strict=True):
        imagine(world_model, memory, push(0, len(SEEDS), 4), **options)
    next_draws = [memory.noise.normal(1) for memory in memories]
    assert torch.equal(next_draws[0], next_draws[1]) and torch.equal(next_draws[0], next_draws[2])


def test_disagreement_is_the_spread_of_the_futures_over_executed_frames() -> None:
    world_model = toy_world_model(noise=0.5)
    memory = begin(world_model, 1.0, [1, 2])
    chunk = imagine(world_model, memory, push(1, 2, 8), num_steps=4, ensemble=3)
    expected = (0.5 * drawn([1, 2], after=2, count=2)).std(1)  # Frame 1 of the future and of two others.
    torch.testing.assert_close(chunk.disagreement, expected)
    assert not imagine(world_model, memory, push(1, 2, 8)).disagreement.any()


def test_a_batch_is_imagined_as_each_alone() -> None:
    world_model = toy_world_model(noise=0.5)
    options = {"ensemble": 2, "dual_noise": 2}
    seeds = SEEDS[:20]
    together = imagine(world_model, begin(world_model, 5.9, seeds), push(0.1, 20, 8), **options)
    for row, seed in enumerate(seeds):
        alone = imagine(world_model, begin(world_model, 5.9, [seed]), push(0.1, 1, 8), **options)
        assert torch.equal(alone.frames.latents[0], together.frames.latents[row])
        for name in ("success", "discarded", "disagreement", "success_score"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name


# --- as trust sees it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dual_noise": 0},
        {"dual_noise": 2},
        {"ensemble": 2},
        {"horizon": 12},
    ],
)
@pytest.mark.parametrize("chunk_frames", [1, 2])
def test_trust_sees_the_successes_that_rl_is_rewarded_for(options: dict[str, Any], chunk_frames: int) -> None:
    num, frames = 40, 6
    rng = np.random.default_rng(0)
    actions = push(1, num, 4 * frames) * rng.uniform(0.6, 1, (num, 4 * frames, 1)).astype(np.float32)
    env = toy_env(num, noise=0.5, **options)
    specs = [EpisodeSpec("reach", "train", i) for i in range(num)]
    obs = env.reset(specs)
    seen_success, ended = np.zeros((num, frames), bool), np.zeros(num, bool)
    for start in range(0, frames, chunk_frames):
        ids = np.flatnonzero(~ended).tolist()
        if not ids:
            break
        result = env.step(actions[ids, 4 * start : 4 * (start + chunk_frames)], ids)
        for row, i in enumerate(ids):
            if result.success[row]:
                seen_success[i, start + (result.num_steps[row] - 1) // 4 :] = True
        ended[ids] |= result.done

    world_model = toy_world_model(noise=0.5)
    trust = OpenLoop(world_model, ImaginationConfig.model_validate(options), chunk_frames)
    first = ToyInitialFrames().observe(specs)
    images = np.stack(list(first.images.values()), 1)
    seeds = [env._seed_of(spec, 0) for spec in specs]
    context = trust.begin(trust.encode(images[:, None], obs.state[:, None]), obs.instruction, seeds)
    frames_seen, scores = trust.imagine(context, world_model.actions(actions, np.full(num, 4 * frames)))
    np.testing.assert_array_equal(scores.success, seen_success)
    assert 3 < scores.success[:, -1].sum() < num - 3 or "horizon" in options
    assert frames_seen.latents.shape == (num, frames, 2, 1, 1, 1)
    looked = scores.probability[:, 0] > 0
    assert looked.all()
    reached = frames_seen.latents[:, 0, 0, 0, 0, 0] > GOAL
    np.testing.assert_array_equal((scores.probability > 0.5)[looked, 0], reached[looked])


@pytest.mark.parametrize("options", [{}, {"horizon": 12}, {"ensemble": 2}])
def test_trust_judges_the_probability_that_rl_is_paid(options: dict[str, Any]) -> None:
    num, frames = 40, 6
    options = {"reward": "probability", "dual_noise": 0, "stop_probability": 1 - 1e-9, **options}
    actions = push(0.8, num, 4 * frames)
    env = toy_env(num, noise=0.5, **options)
    specs = [EpisodeSpec("reach", "train", i) for i in range(num)]
    obs = env.reset(specs)
    paid, going = np.zeros(num), list(range(num))
    for start in range(0, 4 * frames, 8):
        if not going:
            break
        result = env.step(actions[going, start : start + 8], going)
        paid[going] += result.reward.sum(1)
        going = [i for i, done in zip(going, result.done, strict=True) if not done]
    assert not going
    world_model = toy_world_model(noise=0.5)
    trust = OpenLoop(world_model, ImaginationConfig.model_validate(options), chunk_frames=2)
    images = np.stack(list(obs.images.values()), 1)
    seeds = [env._seed_of(spec, 0) for spec in specs]
    context = trust.begin(trust.encode(images[:, None], obs.state[:, None]), obs.instruction, seeds)
    _, scores = trust.imagine(context, world_model.actions(actions, np.full(num, 4 * frames)))
    np.testing.assert_allclose(scores.probability.max(1), paid, rtol=1e-4, atol=1e-6)


def test_trust_scores_real_frames_with_the_same_heads() -> None:
    trust = OpenLoop(toy_world_model(), ImaginationConfig())
    position = torch.tensor([[7.0, 5.5, 6.5, 5.0], [1.0, 5.5, 6.0, 5.0]])
    latents = position[:, :, None, None, None, None].expand(-1, -1, 2, 1, 1, 1)
    frames = Frames(latents, torch.stack([position, position], 2))
    scores = trust.score(frames, ["reach", "reach"])
    assert scores.success.tolist() == [[False, False, True, True], [False] * 4]  # The first frame is no success.
    slope, _ = trust.world_model.metadata.success_probability
    np.testing.assert_allclose(scores.probability, (slope * (position - GOAL)).sigmoid(), rtol=1e-6)
    assert trust.frame_steps == 4 and trust.decode(frames).shape == (2, 4, 2, 8, 8, 3)


def test_the_toy_moves_as_its_text_says() -> None:
    world_model = toy_world_model()
    chunk = imagine(world_model, begin(world_model, 1.0, [0]), push(0.5, 1, 6))
    assert path(chunk).tolist() == [[1 + 4 * 0.5 * GAIN, 1 + 6 * 0.5 * GAIN]]
