"""Autonomous practice on the tabletop: which task is next in a scene, when a person resets it, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_hil import EPISODES, TINY, ActorHere, Killed, recorded, segments
from tiny_run import metrics

from real_robot.operator.recorder import Recording
from real_robot.operator.sim_interventions import InterventionOutcome, OperatorOptions, run_interventions
from sim.tabletop import TabletopConfig
from vla_rl.algorithms.offpolicy.recorded import new_episodes
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.data.lerobot_io import read_shards, staging_folder
from vla_rl.data.source import LeRobotSource
from vla_rl.interfaces import Policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.practice import Practice
from vla_rl.rollout.runner import RunningEpisode
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from vla_rl.workflows import hil
from vla_rl.workflows.hil import ActorError, run_hil
from vla_rl.workflows.hil_actor import RECORDING, act

PICK, OFF = "pick_place", "take_off"
PAIR = [f"env.tasks=[{PICK},{OFF}]", f"hil.practice={{reset_task: {OFF}, attempts: 2}}"]


class Scripted(torch.nn.Module, Policy):
    """A policy that is the expert, or does nothing, as told of each episode begun: E, or anything else."""

    def __init__(self, env: Any, plan: str) -> None:
        super().__init__()
        self.env, self.plan, self.begun = env, plan, list[EpisodeSpec]()

    def watched(self, specs: Iterator[EpisodeSpec | None]) -> Iterator[EpisodeSpec | None]:
        for spec in specs:
            self.begun += [spec] if spec else []
            yield spec

    def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
        if self.plan[len(self.begun) - 1] == "E":
            return ActionChunk(np.clip(self.env.expert_action(), -1, 1)[:, None])
        return ActionChunk(np.zeros((1, 4, 7), np.float32))


def practise(
    folder: Path, plan: str, attempts: int, reward: dict[str, str] | None = None, spoil: int = -1
) -> tuple[list[EpisodeSpec], list[InterventionOutcome], Practice]:
    """Run an episode for each letter, in turns of three; where `spoil` ends, the block is put out of reach."""
    config = TabletopConfig(
        tasks=(PICK, OFF),
        image_size=32,
        num_envs=1,
        horizons={PICK: 48, OFF: 48},
        reward=reward,  # type: ignore[arg-type]
    )
    states = [EpisodeSpec(PICK, "train", 70 + number) for number in range(len(plan))]
    env: Any = config.build()
    with closing(env), Recording(folder, 20, "tabletop") as recording:
        practice, policy, outcomes = Practice(env, PICK, OFF, attempts), Scripted(env, plan), []

        def ended(episode: RunningEpisode, outcome: InterventionOutcome) -> None:
            if outcome.index == 70 + spoil:
                scene = env._envs[0]
                scene._now.qpos[scene._scene.qpos["block"]] = 0.35
            practice.ended(episode.env_id, episode.spec, outcome.success, outcome.lost)

        for first in range(0, len(plan), 3):
            outcomes += run_interventions(
                policy,  # type: ignore[arg-type]
                env,
                policy.watched(practice.specs(states[first : first + 3])),
                recording,
                horizons={PICK: 24, OFF: 24},
                options=OperatorOptions(patience=10, budget=0),
                on_episode=ended,
            )
    return policy.begun, outcomes, practice


@pytest.mark.parametrize("reward", [None, {"kind": "simulator"}])
def test_tasks_take_turns_and_a_person_is_asked_after_so_many_failures(
    tmp_path: Path, reward: dict[str, str] | None
) -> None:
    begun, outcomes, practice = practise(tmp_path / "set", "EEfEffEEfff", 2, reward)
    assert [outcome.success for outcome in outcomes] == [letter == "E" for letter in "EEfEffEEfff"]
    expected = [PICK, OFF, PICK, PICK, OFF, OFF, PICK, OFF, PICK, PICK, PICK]
    assert [spec.task for spec in begun] == [outcome.task for outcome in outcomes] == expected
    fresh = [0, 6, 10]
    assert [number for number, spec in enumerate(begun) if spec.keyframe is None] == fresh
    assert practice.num_resets == 3 and not any(outcome.intervened for outcome in outcomes)
    recorded = new_episodes(tmp_path / "set", 0, ("agentview",), 20)
    assert [number for number, episode in enumerate(recorded) if not episode.continued] == fresh
    assert [one.initial_state for one in recorded] == [f"{t}/train/{70 + n}" for n, t in enumerate(expected)]


def test_each_episode_begins_where_the_last_one_has_left_its_block(tmp_path: Path) -> None:
    begun, _, _ = practise(tmp_path / "set", "EEE", 2)
    table = LeRobotSource(tmp_path / "set").episodes
    config = TabletopConfig(tasks=(PICK, OFF), image_size=32)
    for number in (1, 2):
        left = begun[number].keyframe
        assert left is not None and left.step == 0
        one = config.make()
        one.reset(begun[number])
        [first] = new_episodes(tmp_path / "set", number, ("agentview",), 1)
        assert np.array_equal(first.obs.state[0], one.proprioception()), "recorded from its beginning"
        before = new_episodes(tmp_path / "set", number - 1, ("agentview",), 1)[0].obs.state[-1]
        assert np.abs(before[:3] - first.obs.state[0, :3]).max() > 0.05, "the way home is no part of an episode"
        assert np.array_equal(one._scene_arrays()["physics"], left.arrays["physics"])
    assert table.column("continued").to_pylist() == [0, 1, 1]


def test_a_block_out_of_reach_is_a_persons_at_once(tmp_path: Path) -> None:
    begun, outcomes, practice = practise(tmp_path / "set", "EEE", 3, spoil=1)
    assert [outcome.success for outcome in outcomes] == [True, True, True]
    assert [spec.task for spec in begun] == [PICK, OFF, PICK]
    assert [spec.keyframe is None for spec in begun] == [True, False, True] and practice.num_resets == 2


def test_a_broken_episode_is_followed_by_a_reset() -> None:
    with closing(TabletopConfig(tasks=(PICK, OFF), image_size=32, num_envs=1).build()) as env:
        practice = Practice(env, PICK, OFF, 3)  # type: ignore[arg-type]
        specs = practice.specs([EpisodeSpec(PICK, "train", number) for number in range(2)])
        first = next(specs)
        assert first is not None and next(specs) is None, "nothing is needed while the scene is in use"
        practice.ended(0, first, success=False, lost=True)
        second = next(specs)
        assert second is not None and (second.task, second.keyframe, second.index) == (PICK, None, 1)


def test_killed_and_resumed_each_episode_counts_once_and_scenes_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside `test_hil`, where real processes are killed."""
    run, ended = tmp_path / "run", Practice.ended
    changes = [f"env.horizons.{task}=24" for task in (PICK, OFF)] + ["env.knock=0", "env.num_envs=2"]
    recipe = load_recipe("tabletop_hil", [*TINY, *PAIR, *changes])
    monkeypatch.setattr(hil, "start_child", ActorHere)

    def killed(*arguments: Any) -> None:
        if recorded(run) >= 5:
            raise Killed
        ended(*arguments)

    with monkeypatch.context() as patch, pytest.raises(ActorError, match=r"the actor has ended \(-9\)"):
        patch.setattr(Practice, "ended", killed)
        run_hil(recipe, open_run(recipe, run, resume=False), lambda _: None)
    before = [row for rows, _, _ in read_shards(staging_folder(run / RECORDING)) for row in rows]
    assert 5 <= len(before) < EPISODES
    run_hil(recipe, run, lambda _: None)
    table = LeRobotSource(run / RECORDING).episodes
    assert sorted(table.column("env_index").to_pylist()) == [500_000 + number for number in range(EPISODES)]
    continued, tasks = table.column("continued").to_pylist(), table.column("env_task").to_pylist()
    assert set(tasks) == {PICK, OFF} and not any(c == 0 and t == OFF for c, t in zip(continued, tasks, strict=True))
    assert continued[: len(before)] == [row["continued"] for row in before]
    assert continued[len(before) :][:1] == [0] and sum(continued) > EPISODES / 2
    notes, last = segments(run), metrics(run)[-1]
    resets = EPISODES - sum(continued)
    assert sum(note["resets"] for note in notes) == last["person/resets"] == resets
    assert sum(note["episodes"] for note in notes) == last["rollout/episodes"] == EPISODES
    assert all(0 <= row["person/resets_per_100"] <= 100 for row in metrics(run) if "rollout/success_rate" in row)
    act(load_recipe(str(run / "config.yaml"), ()), run, print)  # Nothing is left to run.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["hil.practice={reset_task: tidy}"], r"hil\.practice\.reset_task: got 'tidy'.*take_off \(undoes pick_place\)"),
        (["hil.practice={reset_task: take_off}"], r"env\.tasks: got push_to_zone;.*env\.tasks=\[pick_place,take_off\]"),
        ([f"env.tasks=[{PICK},stack,{OFF}]", PAIR[1]], "env.tasks: got pick_place, stack, take_off"),
        ([*PAIR, "hil.actor=recordings", "hil.recordings=there"], "practice: got a section with actor=recordings"),
        ([PAIR[0], "hil.practice={reset_task: take_off, attempts: 0}"], "attempts"),
    ],
)
def test_what_cannot_be_practised_is_refused_before_any_work(tmp_path: Path, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_hil(load_recipe("tabletop_hil", [*TINY, *changes]), tmp_path, print)
    assert not list(tmp_path.iterdir())


def test_nobody_need_take_over() -> None:
    recipe = load_recipe("tabletop_hil", [*TINY, "hil.interventions=0"])
    assert recipe.hil is not None and recipe.hil.interventions == 0
