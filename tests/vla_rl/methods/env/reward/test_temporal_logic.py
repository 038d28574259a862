"""Formulas of temporal logic as a reward: robustness by hand and by definition, bounds, errors, and a simulator's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.dummy import DummyConfig
from sim.metaworld import MetaWorldConfig
from sim.robosuite.env import RobosuiteConfig
from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.methods.env.reward.temporal_logic import Formula, TemporalLogicReward, read_formula
from vla_rl.rollout.success import TRUE_SUCCESS
from vla_rl.types import EpisodeSpec, Observation, StepResult

P = {"above": {"a": "p", "b": [0, 0, 0], "by": 0}}  # Its margin is the height of p.
Q = {"above": {"a": "q", "b": [0, 0, 0], "by": 0}}
HEIGHTS = {"p": [1.0, -2.0, 3.0, -1.0], "q": [-1.0, 2.0, -3.0, 4.0]}


def places(heights: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.array([[0.0, 0.0, z] for z in values]) for name, values in heights.items()}


def robustness(formula: object, heights: dict[str, list[float]] = HEIGHTS) -> list[float]:
    low, high = read_formula(formula).robustness(places(heights), is_over=True)
    np.testing.assert_array_equal(low, high)
    return low.tolist()


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ({"not": P}, [-1, 2, -3, 1]),
        ({"and": [P, Q]}, [-1, -2, -3, -1]),
        ({"or": [P, Q]}, [1, 2, 3, 4]),
        ({"eventually": P}, [3, 3, 3, -1]),
        ({"eventually": P, "within": 1}, [1, 3, 3, -1]),
        ({"always": P}, [-2, -2, -1, -1]),
        ({"always": Q, "within": 1}, [-1, -3, -3, 4]),
        ({"until": [P, Q]}, [-1, -2, -1, -1]),
        ({"until": [{"or": [P, Q]}, Q]}, [1, 2, 3, 4]),
        ({"until": [{"or": [P, Q]}, Q], "within": 1}, [1, 2, 3, 4]),
        ({"until": [{"or": [P, Q]}, {"and": [P, Q]}], "within": 2}, [-1, -1, -1, -1]),
        ({"then": [P, Q]}, [3, 3, 3, -1]),
        ({"then": [Q, P]}, [2, 2, -1, -1]),
        ({"then": [P, Q], "within": 1}, [1, 3, 3, -1]),
        ({"then": [Q, P, Q]}, [2, 2, -1, -1]),
    ],
)
def test_each_operator_by_hand(formula, expected):
    assert robustness(formula) == expected


def test_until_ends_with_its_steps():
    heights = {"p": [1.0, 1.0, 1.0, 1.0], "q": [-1.0, -2.0, -3.0, 4.0]}
    assert robustness({"until": [P, Q]}, heights) == [1, 1, 1, 1]
    assert robustness({"until": [P, Q], "within": 2}, heights) == [-1, 1, 1, 1]


def test_each_predicate_by_hand():
    track = {"a": np.array([[0, 0, 0.1], [0.3, 0.4, 0.2]]), "b": np.array([[0, 0, 0.0], [0, 0, 0.2]])}
    cases = {
        "near": ({"b": "b", "within": 0.2}, [0.1, -0.3]),
        "above": ({"b": "b", "by": 0.04}, [0.06, -0.04]),
        "inside": ({"b": "b", "radius": 0.6, "height": 0.15}, [0.05, 0.1]),
        "lifted": ({"by": 0.02}, [-0.02, 0.08]),
        "still": ({"within": 0.6}, [0.6, 0.6 - np.sqrt(0.26)]),
    }
    for name, (values, expected) in cases.items():
        found = read_formula({name: {"a": "a", **values}}).robustness(track, True)
        np.testing.assert_allclose(found, [expected, expected], atol=1e-12, err_msg=name)
    found = read_formula({"near": {"a": "a", "b": [0, 0, 0.1], "within": 0}}).robustness(track, True)[0]
    np.testing.assert_allclose(found, [0, -np.sqrt(0.26)])


def defined(formula: Formula, heights: dict[str, list[float]], t: int) -> float:
    """Donze and Maler's definition, from the step t on, of a whole trace."""
    last = len(heights["p"]) - 1
    until = range(t, last + 1 if formula.within is None else min(t + formula.within, last) + 1)
    parts, name = formula.parts, formula.operator
    if name == "above":
        return heights[str((formula.values or {})["a"])][t]
    if name == "not":
        return -defined(parts[0], heights, t)
    if name in ("and", "or"):
        return (min if name == "and" else max)(defined(part, heights, t) for part in parts)
    if name == "always":
        return min(defined(parts[0], heights, s) for s in until)
    if name == "until":
        held = (min(defined(parts[0], heights, r) for r in range(t, s + 1)) for s in until)
        return max(min(defined(parts[1], heights, s), hold) for s, hold in zip(until, held, strict=True))
    rest = replace(formula, parts=parts[1:])
    return max(min(defined(parts[0], heights, s), defined(rest, heights, s) if parts[1:] else np.inf) for s in until)


def drawn_formula(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    name = str(rng.choice(["not", "and", "or", "eventually", "always", "until", "then"])) if depth else "above"
    if name == "above":
        return P if rng.random() < 0.5 else Q
    parts = [drawn_formula(rng, depth - 1) for _ in range(3 if name == "then" else 2)]
    inner: object = parts[0] if name in ("not", "eventually", "always") else parts
    timed = name in ("eventually", "always", "until", "then") and rng.random() < 0.5
    return {name: inner, **({"within": int(rng.integers(1, 4))} if timed else {})}


@pytest.mark.parametrize("seed", range(40))
def test_any_formula_is_as_defined_and_its_bounds_hold_whatever_comes(seed):
    rng = np.random.default_rng(seed)
    formula = read_formula(drawn_formula(rng, 3))
    heights = {name: rng.normal(size=8).tolist() for name in "pq"}
    whole = formula.robustness(places(heights), True)
    np.testing.assert_allclose(whole, [[defined(formula, heights, t) for t in range(8)]] * 2)
    for known in range(1, 9):
        low, high = formula.robustness(places({name: values[:known] for name, values in heights.items()}), False)[:, 0]
        assert low <= whole[0, 0] <= high


@pytest.mark.parametrize(
    ("formula", "decided"),
    [
        ({"eventually": P}, [True, True, True, True]),
        ({"always": {"not": Q}, "within": 2}, [False, False, False, False]),
        ({"always": {"or": [P, Q]}, "within": 2}, [False, False, True, True]),
        ({"always": {"or": [P, Q]}}, [False, False, False, False]),
        ({"then": [Q, P]}, [False, False, True, True]),
    ],
)
def test_it_is_decided_as_soon_as_nothing_that_comes_can_matter(formula, decided):
    for known in range(1, 5):
        track = places({name: values[:known] for name, values in HEIGHTS.items()})
        assert (read_formula(formula).robustness(track, False)[0, 0] > 0) == decided[known - 1]


BAD = {
    "formula: got {}; write one of near, ": {},
    r"formula: got 'eventualy', allowed: near, .* Did you mean 'eventually'": {"eventualy": P},
    r"formula\.always\.near: got .*needs a, b, within, each once": {"always": {"near": {"a": "block", "within": 1}}},
    r"formula\.and\[1\]\.near\.within: got -0\.1; a number of meters": {
        "and": [P, {"near": {"a": "x", "b": "y", "within": -0.1}}]
    },
    r"formula\.lifted\.a: got \[0, 0, 1\]; an object's name$": {"lifted": {"a": [0, 0, 1], "by": 0.1}},
    r"formula\.near\.b: got \[0, 1\]; an object's name or \[x, y, z\]": {"near": {"a": "x", "b": [0, 1], "within": 1}},
    r"formula\.until: got .*; write a list of 2 formulas": {"until": [P, Q, P]},
    r"formula\.then: got .*; write a list of 2 or more formulas": {"then": [P]},
    r"formula\.within: steps are said beside eventually, .*beside 'and'": {"and": [P, Q], "within": 3},
    r"formula\.within: got 0\.5; a number of control steps": {"eventually": P, "within": 0.5},
    r"formula\.not: got 3; write one of": {"not": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_formula_is_refused_with_its_place(message):
    with pytest.raises(ConfigError, match=rf"env\.reward\.{message}"):
        build_component("env.reward", {"kind": "temporal_logic", "formula": BAD[message]})


def test_objects_that_are_not_told_are_refused():
    lifted = config("blok")
    with pytest.raises(ValueError, match=r"env\.reward\.formula: got 'blok'; dummy has red, blue"):
        DummyConfig(reward=lifted).build()
    with pytest.raises(ValueError, match=r"metaworld.*does not tell where its objects are; tabletop"):
        MetaWorldConfig(reward=lifted).build()


def step(objects: list[np.ndarray], done: bool = False, lost: bool = False) -> StepResult:
    """Of as many environments as there are poses; float32 (T + 1, K, 4) of each."""
    num = len(objects)
    obs = Observation({}, np.zeros((num, 8), np.float32), ["do it"] * num)
    ends, flags = np.full((num, 1), done), np.zeros(num, bool)
    reward = np.zeros((num, 1), np.float32)
    return StepResult(obs, reward, ends, ends & False, flags + 1, flags, flags | lost, {"objects": objects})


def poses(*heights: float) -> np.ndarray:
    return np.array([[[9, 9, 9, 9], [0, 0, z, 0]] for z in heights], np.float32)


def test_chunks_are_joined_and_an_end_decides():
    formula = read_formula({"eventually": {"lifted": {"a": "p", "by": 0.2}}, "within": 2})
    reward = TemporalLogicReward(formula, ("q", "p"))
    obs = step([poses(0)]).obs

    def judged(*heights: float, begins: bool = False, **ends: bool) -> tuple[bool, float]:
        reward.watch(step([poses(*heights)], **ends), [4])
        said = reward.observe(obs, [4], [begins])
        return bool(said.counts[0]), float(said.progress[0])

    reward.observe(obs, [4], [True])
    assert judged(0.1, 0.23) == (False, pytest.approx(0.3))  # 7 cm are missing from 20 above where the episode began.
    assert judged(0.23, 0.27) == (False, pytest.approx(0.7))
    assert judged(0.27, 0.5) == (False, pytest.approx(0.7))  # Too late.
    reward.observe(obs, [4], [True])
    assert judged(-0.3, 0.26) == (True, 1)
    reward.watch(step([np.full((1, 2, 4), np.nan, np.float32)], lost=True), [4])
    assert not reward.observe(obs, [4], [False]).counts[0]
    reward = TemporalLogicReward(read_formula({"always": {"still": {"a": "p", "within": 0.2}}}), ("q", "p"))
    reward.observe(obs, [4], [True])
    assert judged(0, 0.1) == (False, 1)
    assert judged(0.1, 0.15, done=True) == (True, 1), "nothing comes any more"


def test_an_object_that_the_scene_has_not_is_refused():
    env = TabletopConfig(tasks=("pick_place",), num_envs=1, image_size=32, reward=config("block_b")).build()
    env.reset([EpisodeSpec("pick_place")])
    with pytest.raises(ValueError, match=r"env\.reward\.formula: there is no 'block_b' in the scene of 'put the"):
        env.step(np.zeros((1, 2, 7), np.float32))
    env.close()


def config(name: str, **options: object) -> Any:
    return {"kind": "temporal_logic", "formula": {"eventually": {"lifted": {"a": name, "by": 0.04}}}, **options}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_simulator_is_paid_ended_and_evaluated_by_it(num_workers):
    """The scripted expert lifts the block on its way to the plate: the episode ends there, before the task is done."""
    formula = {"then": [{"near": {"a": "gripper", "b": "block", "within": 0.05}}, config("block")["formula"]]}
    env = TabletopConfig(
        tasks=("pick_place",),
        num_envs=2,
        image_size=32,
        num_workers=num_workers,
        reward=config("block", formula=formula),
    )
    assert env.exact() == env
    built = env.build()
    assert not built.spec.approximation
    obs = built.reset([EpisodeSpec("pick_place", "validation", i) for i in range(2)])
    heights, ended, ids = [], set(), [0, 1]
    while ids:
        actions = built.expert_action(ids)
        result = built.step(actions[:, None], ids)
        gripper = [told[-1, -1, :3] for told in result.info["objects"]]
        np.testing.assert_allclose(gripper, result.obs.state[:, :3], atol=1e-6)
        heights.append([told[-1, 0, 2] for told in result.info["objects"]])
        assert (result.reward[:, 0] == result.success).all() and not result.info[TRUE_SUCCESS].any()
        ended |= {i for i, over in zip(ids, result.success, strict=True) if over}
        ids = [i for i, over in zip(ids, result.done, strict=True) if not over]
    built.close()
    assert ended == {0, 1} and obs.batch_size == 2


def test_robosuites_expert_lifts_by_it():
    env = RobosuiteConfig(tasks=("Lift",), num_envs=1, image_size=32, reward=config("cube")).build()
    cube, can, gripper = map(env.spec.objects.index, ("cube", "Can", "gripper"))
    env.reset([EpisodeSpec("Lift", "validation")])
    heights, done = list[float](), False
    while not done:
        result = env.step(env.expert_action()[:, None])
        told = result.info["objects"][0]
        np.testing.assert_allclose(told[1, gripper, :3], result.obs.state[0, :3], atol=1e-6)
        assert np.isnan(told[:, can]).all()
        heights += told[:, cube, 2].tolist()
        done = bool(result.done[0])
        assert bool(result.success[0]) == (max(heights) - heights[0] > 0.04)
    env.close()
    assert max(heights) - heights[0] > 0.04
