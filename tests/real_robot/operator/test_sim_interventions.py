"""The scripted person beside a policy, on the tabletop: who drives when, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from real_robot.operator.recorder import Recording
from real_robot.operator.sim_interventions import InterventionOutcome, OperatorOptions, ProgressAlarm, run_interventions
from sim.tabletop import TabletopConfig
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.types import CONTROL_SOURCES, ActionChunk, EpisodeSpec, Observation

TASK = "pick_place"
HORIZON = 16
SPECS = [EpisodeSpec(TASK, "train", i) for i in range(2)]
NEEDS = DataNeeds(cameras=("agentview",), action_dim=7, state_dim=8)


class Lazy(torch.nn.Module, Policy):
    """A policy that drifts sideways and solves nothing. Chunks of 4."""

    def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, 4, 7), np.float32)
        actions[:, :, 1], actions[:, :, 6] = 0.3, -1.0
        return ActionChunk(actions)


@pytest.fixture(scope="module")
def env() -> Iterator[VecEnv]:
    config = TabletopConfig(
        tasks=(TASK,), cameras=("agentview",), image_size=32, num_envs=2, num_workers=0, horizons={TASK: HORIZON + 48}
    )
    with closing(config.build()) as built:
        yield built


def run(env: VecEnv, folder: Path, **options: object) -> tuple[list[InterventionOutcome], EpisodeDataset]:
    chosen = OperatorOptions(**({"alarm": "clock", "alarm_fraction": 0.5} | options))  # type: ignore[arg-type]
    with Recording(folder, env.spec.control_hz, env.spec.kind) as recording:
        policy = None if chosen.demonstrate else Lazy()
        outcomes = run_interventions(
            policy,  # type: ignore[arg-type]
            env,
            SPECS,
            recording,
            horizons={TASK: HORIZON},
            options=chosen,
            policy_version="lazy",
        )
    return outcomes, open_dataset(DatasetConfig(path=str(folder), frames="rac"), NEEDS)


def runs(data: EpisodeDataset, episode: int) -> list[tuple[str, int]]:
    """Who drove, and for how many steps, in order."""
    first = data.starts[episode]
    found: list[tuple[str, int]] = []
    for code in data.source[first : first + data.lengths[episode]]:
        name = CONTROL_SOURCES[code]
        count = found.pop()[1] if found and found[-1][0] == name else 0
        found.append((name, count + 1))
    return found


def test_the_person_recovers_and_corrects_a_policy_that_fails(env: VecEnv, tmp_path: Path) -> None:
    outcomes, data = run(env, tmp_path / "set")
    assert all(o.success and o.intervened and o.recoveries == 1 and o.policy_frames == 8 for o in outcomes)
    by_index = {data.initial_states[e]: runs(data, e) for e in range(2)}
    for outcome in outcomes:
        drove = by_index[f"{TASK}/train/{outcome.index}"]
        assert drove == [
            ("policy", 8),
            ("recovery", outcome.recovery_frames),
            ("correction", outcome.correction_frames),
        ]
    codes = data.source[data.rows]
    assert CONTROL_SOURCES.index("policy") not in codes and len(codes) == len(data.source) - 16
    # The correction begins by lowering the hand where it is; recovery never does that.
    straight_down = (data.actions[:, 2] < -0.1) & (np.abs(data.actions[:, :2]).max(1) <= 0.5)
    recovery, correction = (data.source == CONTROL_SOURCES.index(name) for name in ("recovery", "correction"))
    assert not straight_down[recovery].any()
    for start in data.starts:
        assert straight_down[start + int(np.argmax(correction[start:]))]


def test_rewinding_goes_back_where_the_policy_came_from(env: VecEnv, tmp_path: Path) -> None:
    outcomes, data = run(env, tmp_path / "set", rewind_steps=5)
    assert all(o.success for o in outcomes)
    for episode in range(2):
        assert runs(data, episode)[:2] == [("policy", 8), ("rewind", 5)]
        start = data.starts[episode]
        # Eight steps there, five back: where it was after three. (The servo follows within some millimeters.)
        np.testing.assert_allclose(data.state[start + 13, :3], data.state[start + 3, :3], atol=0.01)
        assert abs(data.state[start + 8, 1] - data.state[start + 3, 1]) > 0.04


def after(remaining: list[float], patience: int = 3) -> int | None:
    """The step before which the alarm comes."""
    alarm = ProgressAlarm(patience)
    return next((step for step, left in enumerate(remaining) if alarm.update(left)), None)


@pytest.mark.parametrize(
    ("remaining", "step"),
    [
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], None),
        ([9, 8, 8, 8, 8], 4),  # The third step in a row without progress.
        ([9, 8, 7.8, 7.6, 7.4, 7.2], 4),  # Too little to be progress.
        ([9, 8, 10, 9, 10], 4),
        ([9, 8, 15, 14, 13, 12, 11, 10], None),  # Dropped, but at once it tries again.
        ([9, 8, 15, 15, 15], 4),
        ([9, 8, np.inf, np.inf, np.inf], 4),  # Out of reach.
        ([9, 8, np.inf, 9, 8, 7, 6], None),
    ],
)
def test_no_progress_is_an_alarm(remaining: list[float], step: int | None) -> None:
    assert after(remaining) == step


def test_the_person_leaves_alone_what_goes_well(tmp_path: Path) -> None:
    """A policy that is the expert is never interrupted, one that does nothing after `patience` steps."""
    config = TabletopConfig(
        tasks=(TASK,), cameras=("agentview",), image_size=32, num_envs=1, num_workers=0, horizons={TASK: 80}
    )
    with closing(config.build()) as env:

        class Able(Lazy):
            def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
                return ActionChunk(np.clip(env.expert_action(), -1, 1)[:, None])

        class Idle(Lazy):
            def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
                return ActionChunk(np.zeros((1, 8, 7), np.float32))

        results = []
        for name, policy in (("able", Able()), ("idle", Idle())):
            with Recording(tmp_path / name, env.spec.control_hz, env.spec.kind) as recording:
                options = OperatorOptions(patience=10)
                args = {"horizons": {TASK: 32}, "options": options}
                results += run_interventions(policy, env, SPECS[:1], recording, **args)  # type: ignore[arg-type]
    able, idle = results
    assert able.success and not able.intervened
    assert idle.success and idle.intervened and idle.policy_frames == 10


def test_who_cannot_help_does_not_take_over(env: VecEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = env.expert_remaining  # type: ignore[attr-defined]
    hopeless = lambda env_ids: np.where(np.array(env_ids) == 0, np.inf, true(env_ids))  # noqa: E731
    monkeypatch.setattr(env, "expert_remaining", hopeless)
    outcomes, data = run(env, tmp_path / "set", alarm="progress", patience=5)
    lost, helped = outcomes
    assert lost.given_up and not lost.intervened and not lost.success
    assert lost.policy_frames <= 5 and not lost.recovery_frames and not lost.correction_frames
    assert helped.intervened and helped.success and not helped.given_up
    assert sorted(len(runs(data, e)) for e in range(2)) == [1, 3]


def test_who_has_helped_as_often_as_was_agreed_helps_no_more(env: VecEnv, tmp_path: Path) -> None:
    outcomes, _ = run(env, tmp_path / "set", budget=1)
    assert [(o.intervened, o.given_up, o.success) for o in outcomes] == [(True, False, True), (False, True, False)]


def test_who_gets_nowhere_gives_up(env: VecEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "expert_action", lambda env_ids: np.zeros((len(env_ids), 7), np.float32))
    outcomes, _ = run(env, tmp_path / "set", alarm="progress", patience=5)
    for outcome in outcomes:
        assert outcome.intervened and outcome.given_up and not outcome.success
        assert outcome.recovery_frames + outcome.correction_frames == 5


def test_progress_must_be_known(env: VecEnv, tmp_path: Path) -> None:
    class Silent:
        num_envs, spec = env.num_envs, env.spec

    recording = Recording(tmp_path / "set", 20, "tabletop")
    with pytest.raises(ValueError, match=r"use rac\.person\.alarm=clock"):
        run_interventions(
            Lazy(),  # type: ignore[arg-type]
            Silent(),  # type: ignore[arg-type]
            SPECS,
            recording,
            horizons={TASK: HORIZON},
            options=OperatorOptions(),
        )


def test_a_whole_demonstration(env: VecEnv, tmp_path: Path) -> None:
    outcomes, data = run(env, tmp_path / "set", demonstrate=True)
    assert all(o.success and not o.intervened for o in outcomes)
    assert [name for name, _ in runs(data, 0) + runs(data, 1)] == ["demo", "demo"]
    assert len(data.rows) == len(data.source)


def test_the_environment_must_leave_room(env: VecEnv, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "set", 20, "tabletop")
    horizons = {TASK: HORIZON + 48}
    with pytest.raises(ValueError, match="leaves the person no step"):
        run_interventions(Lazy(), env, SPECS, recording, horizons=horizons, options=OperatorOptions())  # type: ignore[arg-type]


def test_what_is_interrupted_is_not_recorded_as_failed(env: VecEnv, tmp_path: Path) -> None:
    """Ctrl-C reaches the actor of `run: hil`, which runs again what is not recorded."""

    class Interrupted(Lazy):
        num_asked = 0

        def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
            self.num_asked += 1
            if self.num_asked > 2:
                raise KeyboardInterrupt
            return super().act(obs, generator, temperature)

    recording = Recording(tmp_path / "set", env.spec.control_hz, env.spec.kind)
    with pytest.raises(KeyboardInterrupt):
        run_interventions(
            Interrupted(),  # type: ignore[arg-type]
            env,
            SPECS,
            recording,
            horizons={TASK: HORIZON},
            options=OperatorOptions(alarm="clock"),
        )
    assert recording.num_episodes == 0
