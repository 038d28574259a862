"""Task sampling: uniform order, finite states, VADE's preference, dynamic resampling, resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vla_rl.rollout.success import PENALTY, count_informative, rollout_metrics
from vla_rl.rollout.task_sampling import SamplingConfig, TaskSampler, groups_to_resample
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Keyframe, Observation

KEYFRAME = Keyframe("dummy", "a", 3, {})


def episode(task: str = "a", success: bool = True, group: int = 0, index: int = 0, lost: bool = False) -> Episode:
    obs = Observation({}, np.zeros((1, 2), np.float32), [task])
    end = np.array([[success]])
    return Episode(
        spec=EpisodeSpec(task, "train", index),
        obs=obs,
        chunks=ActionChunk(np.zeros((1, 1, 1), np.float32)),
        reward=end.astype(np.float32),
        terminated=end,
        truncated=~end,
        num_steps=np.ones(1, np.int64),
        success=success,
        final_obs=obs,
        group=group,
        lost=lost,
    )


def outcomes(task: str, successes: int, failures: int, index: int = 0) -> list[Episode]:
    return [episode(task, i < successes, index=index) for i in range(successes + failures)]


def test_uniform_visits_every_task_equally_with_fresh_states():
    specs = SamplingConfig().build(["a", "b", "c"], seed=3).draw(30)
    assert Counter(s.task for s in specs) == {"a": 10, "b": 10, "c": 10}
    for start in range(0, 30, 3):
        assert {s.task for s in specs[start : start + 3]} == {"a", "b", "c"}
    assert len({(s.task, s.index) for s in specs}) == 30
    assert {s.split for s in specs} == {"train"}
    assert sorted(s.index for s in specs if s.task == "a") == list(range(10))


def test_first_state_moves_the_indices():
    specs = SamplingConfig(first_state=100).build(["a"]).draw(3)
    assert [s.index for s in specs] == [100, 101, 102]


def test_finite_states_come_back_in_another_order():
    specs = SamplingConfig(train_states=6, first_state=10).build(["a"], seed=1).draw(18)
    laps = [[s.index for s in specs[i : i + 6]] for i in (0, 6, 12)]
    assert all(sorted(lap) == [10, 11, 12, 13, 14, 15] for lap in laps)
    assert len({tuple(lap) for lap in laps}) > 1


def test_seed_decides_the_draws():
    draws = [SamplingConfig(train_states=50).build(["a", "b"], seed=s).draw(20) for s in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def evidence(sampler: TaskSampler) -> dict[str, tuple[float, float]]:
    """Task -> successes and failures that count, of a sampler by task."""
    state = sampler.state()
    return dict(zip(state["tasks"], zip(state["successes"], state["failures"], strict=True), strict=True))


def test_vade_prefers_tasks_near_half():
    sampler = SamplingConfig(kind="vade").build(["easy", "half", "hard"], seed=0)
    sampler.update(outcomes("easy", 38, 2) + outcomes("half", 20, 20) + outcomes("hard", 1, 39))
    counts = Counter(s.task for s in sampler.draw(200))
    assert counts["half"] > 150
    assert evidence(sampler) == {"easy": (38, 2), "half": (20, 20), "hard": (1, 39)}


def test_vade_explores_what_it_does_not_know():
    sampler = SamplingConfig(kind="vade").build(["known", "unknown"], seed=0)
    sampler.update(outcomes("known", 36, 4))
    counts = Counter(s.task for s in sampler.draw(200))
    assert counts["unknown"] > counts["known"] > 0


def test_vade_decays_evidence_by_hand():
    sampler = SamplingConfig(kind="vade").build(["a", "b"])
    sampler.update(outcomes("a", 4, 0) + outcomes("b", 0, 10))
    sampler.update(outcomes("a", 0, 2))
    assert evidence(sampler) == {"a": (4 * 0.8, 2), "b": (0, 10 * 0.95)}


def test_vade_ignores_lost_episodes():
    sampler = SamplingConfig(kind="vade").build(["a"])
    sampler.update([episode("a", False, lost=True)])
    assert evidence(sampler) == {"a": (0, 0)}


def test_group_dro_ignores_lost_episodes_and_those_from_keyframes():
    sampler = SamplingConfig(kind="group_dro").build(["a", "b"])
    late = episode("a")
    late = replace(late, spec=replace(late.spec, keyframe=KEYFRAME))
    sampler.update(played := [episode("a", lost=True), late])
    metrics = sampler.metrics(played)
    assert metrics["sampling/a"] == metrics["sampling/b"] == 0.5  # Both still count as failing: nothing is known.


def test_a_share_of_the_groups_begins_at_keyframes_also_in_a_resumed_run():
    places = [EpisodeSpec("a", "train", i, keyframe=KEYFRAME) for i in range(2)]
    first, resumed = (TaskSampler(SamplingConfig(keyframe_share=0.3), ["a"], keyframes=places) for _ in range(2))
    draws = [first.draw(4)]
    resumed.load_state(json.loads(json.dumps(first.state())))
    draws += [first.draw(4), first.draw(4)]
    assert [[s.keyframe is not None for s in specs].count(True) for specs in draws] == [1, 1, 1]  # 1.2, 2.4, 3.6.
    assert all(specs[-1].keyframe is not None and specs[0].keyframe is None for specs in draws)
    assert {draws[0][-1].index, draws[1][-1].index} == {0, 1}, "each once before one comes again"
    assert [resumed.draw(4), resumed.draw(4)] == draws[1:]


def test_vade_per_state_draws_distinct_states_and_prefers_half():
    sampler = SamplingConfig(kind="vade", level="state", train_states=8).build(["a"], seed=0)
    sampler.update([e for i in range(8) for e in outcomes("a", 20 if i == 5 else 40, 20 if i == 5 else 0, index=i)])
    specs = sampler.draw(8)
    assert specs[0].index == 5
    assert sorted(s.index for s in specs) == list(range(8))
    assert len(sampler.draw(20)) == 20  # More than there are states: they come again.


@pytest.mark.parametrize(
    "config",
    [SamplingConfig(), SamplingConfig(kind="vade"), SamplingConfig(kind="vade", level="state", train_states=5)],
)
def test_resume_continues_the_same_draws(config):
    def run(sampler: TaskSampler) -> list[EpisodeSpec]:
        specs = sampler.draw(7)
        sampler.update([episode(s.task, s.index % 2 == 0, index=s.index) for s in specs])
        return specs

    whole = config.build(["a", "b", "c"], seed=5)
    first = [run(whole) for _ in range(3)]
    saved = json.loads(json.dumps(whole.state()))
    rest = [run(whole) for _ in range(2)]
    resumed = config.build(["a", "b", "c"], seed=5)
    resumed.load_state(saved)
    assert [run(resumed) for _ in range(2)] == rest
    assert first[0] != rest[0]


def test_load_state_of_other_tasks_is_refused():
    saved = SamplingConfig().build(["a", "b"]).state()
    with pytest.raises(ValueError, match=r"checkpoint is of tasks \['a', 'b'\].*this run has \['a'\]"):
        SamplingConfig().build(["a"]).load_state(saved)


def test_tasks_are_checked():
    with pytest.raises(ValueError, match="need at least one"):
        SamplingConfig().build([])


def test_groups_to_resample():
    mixed = [episode(success=s, group=g) for g in (0, 1) for s in (True, False)]
    same = [episode(success=g == 2, group=g) for g in (2, 3, 4) for _ in range(2)]
    # A lost failure does not make group 2 informative.
    broken = [episode(success=False, group=2, lost=True)]
    episodes = mixed + same + broken
    assert groups_to_resample(episodes, target=5, budget=10) == 3
    assert groups_to_resample(episodes, target=5, budget=2) == 2
    assert groups_to_resample(episodes, target=2, budget=10) == 0
    assert groups_to_resample(episodes, target=1, budget=10) == 0
    assert groups_to_resample([], target=4, budget=0) == 0


def test_a_group_is_informative_by_what_its_episodes_were_paid_without_penalties():
    def paid(group: int, *rewards: float, penalty: float = 0.0) -> list[Episode]:
        taken = {PENALTY: np.array([penalty], np.float32)} if penalty else {}
        return [
            replace(episode(success=False, group=group), reward=np.array([[r - penalty]], np.float32), info=taken)
            for r in rewards
        ]

    likely, alike = paid(0, 0.1, 0.4), paid(1, 0.3, 0.3)
    penalized = paid(2, 1.0, 1.0, penalty=0.3) + paid(2, 1.0, penalty=0.7)
    assert count_informative(likely + alike + penalized) == (1, 3)
    assert rollout_metrics(likely + alike + penalized)["rollout/informative_groups"] == 1 / 3
    assert groups_to_resample(likely + alike + penalized, target=3, budget=9) == 2


def test_groups_that_teach_nothing_are_told_apart_by_hand():
    """Collapse is told from failure and success by the actions, and has none where these are not known."""

    def acting(group: int, success: bool, *actions: float) -> list[Episode]:
        chunks = [ActionChunk(np.full((1, 1, 1), value, np.float32)) for value in actions]
        return [replace(episode(success=success, group=group), chunks=chunk) for chunk in chunks]

    failed, solved = acting(0, False, 1, 2) + acting(1, False, 3, 4), acting(2, True, 1, 1.5)
    collapsed = acting(3, True, 2, 2) + acting(4, False, 7, 7)
    mixed, lone = acting(5, True, 1) + acting(5, False, 1), acting(6, True, 5)
    episodes = failed + solved + collapsed + mixed + lone + [episode(success=False, group=2, lost=True)]
    found = rollout_metrics(episodes, compares_episodes=True)
    names = ("informative", "all_failed", "all_solved", "collapsed")
    assert [round(7 * found[f"rollout/{name}_groups"]) for name in names] == [1, 2, 2, 2]
    unknown = [replace(e, chunks=ActionChunk(np.zeros((0, 0, 0), np.float32))) for e in collapsed]
    told = rollout_metrics(unknown, compares_episodes=True)
    assert (told["rollout/all_solved_groups"], told["rollout/collapsed_groups"]) == (0.5, 0)
    assert "rollout/collapsed_groups" not in rollout_metrics(episodes)
