"""What every `VecEnv` must do, as functions over one: `check_vec_env(make_env)` runs them all.

`make_env(num_envs, record_frames=False)` gives a fresh environment. A new kind of environment joins
`tests/test_conformance.py` with one entry.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest

from vla_rl.interfaces import StatefulEnv, VecEnv
from vla_rl.types import SPLITS, EpisodeSpec, Observation, StepResult

MakeEnv = Callable[..., VecEnv]
CHUNK = 4


def first_tasks(env: VecEnv, count: int) -> list[str]:
    """`count` task names, repeated when the environment has fewer."""
    tasks = list(env.spec.tasks)
    return [tasks[i % len(tasks)] for i in range(count)]


def random_actions(env: VecEnv, num_envs: int, length: int, seed: int = 0) -> np.ndarray:
    """float32 (num_envs, length, A), uniform within the bounds."""
    low, high = env.spec.action_low, env.spec.action_high
    rng = np.random.default_rng(seed)
    return rng.uniform(low, high, (num_envs, length, env.spec.action_dim)).astype(np.float32)


def assert_obs(env: VecEnv, obs: Observation, num_envs: int) -> None:
    """Shapes, dtypes and ranges of an observation."""
    spec = env.spec
    assert tuple(obs.images) == spec.cameras
    for camera, image in obs.images.items():
        assert image.shape == (num_envs, *spec.image_size, 3), camera
        assert image.dtype == np.uint8
        for picture in image:
            assert len(np.unique(picture)) > 1, f"{camera} shows one flat color"
    assert obs.state.shape == (num_envs, spec.state_dim) and obs.state.dtype == np.float32
    assert np.isfinite(obs.state).all()
    assert len(obs.instruction) == num_envs and all(isinstance(text, str) and text for text in obs.instruction)


def assert_result(env: VecEnv, result: StepResult, num_envs: int, length: int) -> None:
    """Shapes, dtypes, ranges, and that the parts of a step result agree with each other."""
    assert_obs(env, result.obs, num_envs)
    for name, dtype in (("reward", np.float32), ("terminated", bool), ("truncated", bool)):
        value = getattr(result, name)
        assert value.shape == (num_envs, length) and value.dtype == dtype, name
    for name, dtype in (("num_steps", np.int64), ("success", bool), ("lost", bool)):
        value = getattr(result, name)
        assert value.shape == (num_envs,) and value.dtype == dtype, name
    assert not result.lost.any()
    ends = result.terminated | result.truncated
    for row in range(num_envs):
        executed = result.num_steps[row]
        assert 1 <= executed <= length
        assert ends[row].sum() <= 1 and not (result.terminated[row] & result.truncated[row]).any()
        if executed < length:
            assert ends[row, executed - 1], "an environment stops inside a chunk only by ending"
        assert not ends[row, : executed - 1].any() and not ends[row, executed:].any()
        assert not result.reward[row, executed:].any()
        assert result.success[row] == result.terminated[row].any()
    np.testing.assert_array_equal(result.done, ends.any(1))


def assert_same(a: Observation, b: Observation) -> None:
    """Two observations are equal to the bit."""
    assert a.instruction == b.instruction
    np.testing.assert_array_equal(a.state, b.state)
    for camera in a.images:
        np.testing.assert_array_equal(a.images[camera], b.images[camera], err_msg=camera)


def check_spec(env: VecEnv) -> None:
    """The facts an environment states about itself hang together."""
    spec = env.spec
    assert spec.tasks and set(spec.horizon) == set(spec.tasks)
    assert all(steps >= 1 for steps in spec.horizon.values()) and set(spec.num_eval_states) <= set(spec.tasks)
    assert spec.action_low.shape == spec.action_high.shape == (spec.action_dim,)
    assert spec.action_low.dtype == spec.action_high.dtype == np.float32
    assert (spec.action_low < spec.action_high).all() and spec.control_hz > 0


def check_shapes(env: VecEnv) -> None:
    """Reset and step return what the contract says, for all and for some environments, in the order asked."""
    n = env.num_envs
    specs = [EpisodeSpec(task, "train", i) for i, task in enumerate(first_tasks(env, n))]
    obs = env.reset(specs)
    assert_obs(env, obs, n)
    assert_result(env, env.step(random_actions(env, n, CHUNK)), n, CHUNK)
    some = [n - 1, 0]
    assert_same(env.reset([specs[i] for i in some], some), obs.select(some))
    assert_result(env, env.step(random_actions(env, 2, 1), some), 2, 1)
    named = EpisodeSpec(specs[0].task, instruction="do it differently")
    assert env.reset([named], [0]).instruction == ["do it differently"]


def check_kept(env: VecEnv) -> None:
    """What was returned is the caller's: no later call writes in it, nor the caller in the environment."""
    specs = [EpisodeSpec(task, "train", i) for i, task in enumerate(first_tasks(env, env.num_envs))]
    given: list[Any] = [env.reset(specs)]
    result = env.step(random_actions(env, env.num_envs, CHUNK))
    going = np.flatnonzero(~result.done).tolist()
    given += [result, env.save_state(going) if isinstance(env, StatefulEnv) else []]
    kept = copy.deepcopy(given)
    env.step(random_actions(env, len(going), CHUNK, seed=1), going)
    last = env.reset(specs[::-1])
    for ours, theirs in zip(arrays(kept), arrays(given), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    kept_last = copy.deepcopy(last)
    for array in arrays([last, *given]):
        if array.flags.writeable:
            array[...] = 1
    again = env.reset(specs[::-1])
    assert_same(again, kept_last)


def arrays(value: Any) -> Iterator[np.ndarray]:
    """All arrays in a value, in order."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from arrays(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from arrays(part)
    elif is_dataclass(value):
        yield from arrays(list(vars(value).values()))


def check_determinism(env: VecEnv, other: VecEnv) -> None:
    """Same specs and actions, same results: in another environment, in another slot, and a second time."""
    n = env.num_envs
    specs = [EpisodeSpec(task, "validation", i) for i, task in enumerate(first_tasks(env, n))]
    actions = random_actions(env, n, CHUNK)
    backwards = list(reversed(range(n)))
    first, swapped = env.reset(specs), other.reset([specs[i] for i in backwards])
    assert_same(first.select(backwards), swapped)
    result, result_swapped = env.step(actions), other.step(actions[backwards])
    assert_same(result.obs.select(backwards), result_swapped.obs)
    np.testing.assert_array_equal(result.reward[backwards], result_swapped.reward)
    assert_same(env.reset(specs), first)
    assert_same(env.step(actions).obs, result.obs)


def check_independence(env: VecEnv) -> None:
    """Stepping or resetting some environments does not touch the others."""
    tasks = first_tasks(env, 2)
    specs = [EpisodeSpec(tasks[0], "train", 0), EpisodeSpec(tasks[1], "train", 1)]
    actions = random_actions(env, 2, 2 * CHUNK)
    env.reset(specs, [0, 1])
    env.step(actions[:, :CHUNK], [0, 1])
    undisturbed = env.step(actions[:1, CHUNK:], [0])

    env.reset(specs, [0, 1])
    env.step(actions[:, :CHUNK], [0, 1])
    env.step(actions[1:, CHUNK:], [1])
    env.reset([EpisodeSpec(tasks[1], "train", 5)], [1])
    env.step(actions[1:, :CHUNK], [1])
    again = env.step(actions[:1, CHUNK:], [0])
    assert_same(undisturbed.obs, again.obs)
    np.testing.assert_array_equal(undisturbed.num_steps, again.num_steps)


def check_ends(env: VecEnv) -> None:
    """The horizon truncates inside a chunk; an ended environment cannot be stepped, and others can."""
    task = min(env.spec.tasks, key=lambda name: env.spec.horizon[name])
    horizon = env.spec.horizon[task]
    env.reset([EpisodeSpec(task, "train", i) for i in range(2)], [0, 1])
    rest = np.zeros((1, horizon + 3, env.spec.action_dim), np.float32)
    result = env.step(rest, [0])
    assert_result(env, result, 1, horizon + 3)
    assert result.done[0], "the horizon ends every episode"
    if not result.success[0]:
        assert result.num_steps[0] == horizon and result.truncated[0, horizon - 1]
    with pytest.raises(ValueError, match="environment 0"):
        env.step(rest[:, :1], [0])
    assert_result(env, env.step(rest[:, :1], [1]), 1, 1)
    env.reset([EpisodeSpec(task, "train", 0)], [0])
    assert_result(env, env.step(rest[:, :1], [0]), 1, 1)


def check_splits(env: VecEnv) -> None:
    """The same index in different splits is a different initial state; so are different indices."""
    task = next(iter(env.spec.tasks))
    seen: list[np.ndarray] = []
    for split in SPLITS:
        for index in range(3):
            obs = env.reset([EpisodeSpec(task, split, index)], [0])
            seen.append(np.concatenate([image.ravel() for image in obs.images.values()]))
    for i, first in enumerate(seen):
        for second in seen[:i]:
            assert (first != second).any(), "two initial states look the same"


def check_keyframes(env: VecEnv) -> None:
    """A saved state, restored in another slot, shows the same and goes on the same, to the bit."""
    task = first_tasks(env, 1)[0]
    env.reset([EpisodeSpec(task, "train", 3)], [0])
    actions = random_actions(env, 1, 3 * CHUNK)
    before = env.step(actions[:, :CHUNK], [0])
    assert not before.done[0], "random actions should not end an episode so soon"
    keyframe = env.save_state([0])[0]
    assert (keyframe.env, keyframe.task, keyframe.step) == (env.spec.kind, task, CHUNK)
    after = env.step(actions[:, CHUNK:], [0])
    restored = env.reset([EpisodeSpec(task, "train", 0, keyframe=keyframe)], [1])
    assert_same(restored, before.obs)
    assert_same(env.step(actions[:, CHUNK:], [1]).obs, after.obs)
    start = env.reset([EpisodeSpec(task, "eval", 0)], [0])
    first = env.save_state([0])[0]
    assert first.step == 0
    assert_same(env.reset([EpisodeSpec(task, keyframe=first)], [1]), start)
    chunk = random_actions(env, 1, CHUNK, seed=1)
    assert_same(env.step(chunk, [0]).obs, env.step(chunk, [1]).obs)


def check_clipping(env: VecEnv) -> None:
    """Actions outside the bounds do what the bound does."""
    spec = EpisodeSpec(first_tasks(env, 1)[0], "train", 1)
    wild = 3.0 * random_actions(env, 1, CHUNK)
    wild[0, 0, 0] = np.inf
    env.reset([spec, spec], [0, 1])
    tame = np.clip(wild, env.spec.action_low, env.spec.action_high)
    assert_same(env.step(wild, [0]).obs, env.step(tame, [1]).obs)


def check_errors(env: VecEnv) -> None:
    """Wrong calls raise ValueError and say what is wrong; the environment can be used afterwards."""
    task = first_tasks(env, 1)[0]
    env.reset([EpisodeSpec(task)], [1])
    bad = np.zeros((1, CHUNK, env.spec.action_dim), np.float32)
    last = env.spec.action_dim - 1
    bad[0, 2, last] = np.nan
    with pytest.raises(ValueError, match=rf"NaN.*environment 1, action 2.*dimension {last}"):
        env.step(bad, [1])
    with pytest.raises(ValueError, match="no_such_task"):
        env.reset([EpisodeSpec("no_such_task")], [1])
    with pytest.raises(ValueError, match="split"):
        env.reset([EpisodeSpec(task, "test", 0)], [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        env.reset([EpisodeSpec(task, "train", -1)], [1])
    if limit := env.spec.num_eval_states.get(task):
        with pytest.raises(ValueError, match=str(limit)):
            env.reset([EpisodeSpec(task, "eval", limit)], [1])
    with pytest.raises(ValueError, match="once"):
        env.step(np.nan_to_num(np.concatenate([bad, bad])), [1, 1])
    with pytest.raises(ValueError, match="shape"):
        env.step(np.zeros((1, CHUNK, env.spec.action_dim + 1), np.float32), [1])
    assert_result(env, env.step(np.nan_to_num(bad), [1]), 1, CHUNK)


def check_frames(env: VecEnv, plain: VecEnv) -> None:
    """Recorded frames are those after each step, the last one is the observation, and recording changes nothing."""
    specs = [EpisodeSpec(task, "train", i) for i, task in enumerate(first_tasks(env, env.num_envs))]
    actions = random_actions(env, env.num_envs, CHUNK)
    env.reset(specs)
    plain.reset(specs)
    result, expected = env.step(actions), plain.step(actions)
    assert_same(result.obs, expected.obs)
    assert "frames" not in expected.info
    for row in range(env.num_envs):
        executed = int(result.num_steps[row])
        states = result.info["states"][row]
        assert states.shape == (executed, env.spec.state_dim) and states.dtype == np.float32
        np.testing.assert_array_equal(states[-1], result.obs.state[row])
        for camera in env.spec.cameras:
            frames = result.info["frames"][row][camera]
            assert frames.shape == (executed, *env.spec.image_size, 3) and frames.dtype == np.uint8
            np.testing.assert_array_equal(frames[-1], result.obs.images[camera][row])


def check_vec_env(make_env: MakeEnv) -> None:
    """All of the above, on two environments of two slots each."""
    env, other, recording = make_env(2), make_env(2), make_env(2, record_frames=True)
    try:
        assert isinstance(env, VecEnv) and env.num_envs == 2
        check_spec(env)
        check_shapes(env)
        check_kept(env)
        check_kept(recording)
        check_determinism(env, other)
        check_independence(env)
        check_ends(env)
        check_splits(env)
        check_keyframes(env)
        check_clipping(env)
        check_errors(env)
        check_frames(recording, other)
    finally:
        for each in (env, other, recording):
            each.close()
            each.close()
