"""DAgger: the expert's chunk from the states that the student visits, on a line that can be counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sim.tabletop import TabletopConfig
from vla_rl.methods.env.dagger import DaggerConfig, LedEnv
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.types import EpisodeSpec, Observation, StepResult
from vla_rl.workflows.record_dataset import collect_dataset

HORIZON = 6


class Line:
    """A position from 10 times the initial state's number on; an action is added. The expert goes back by 1."""

    num_envs, spec = 1, None

    def reset(self, specs, env_ids=None):
        self.at, self.steps = 10.0 * specs[0].index, 0
        return self.seen()

    def seen(self):
        return Observation(images={}, state=np.array([[self.at]], np.float32), instruction=["go"])

    def step(self, actions, env_ids=None):
        size = actions.shape[1]
        num = min(size, HORIZON - self.steps)
        self.at += float(actions[0, :num].sum())
        self.steps += num
        no, truncated = np.zeros((1, size), bool), np.zeros((1, size), bool)
        truncated[0, num - 1] = self.steps == HORIZON
        lone = np.zeros(1, bool)
        return StepResult(self.seen(), no.astype(np.float32), no, truncated, np.array([num]), lone, lone)

    def expert_action(self, env_ids=None):
        return np.full((1, 1), -1.0, np.float32)


class Student:
    """Two actions of +1 at each decision."""

    def act(self, obs, generator, temperature):
        return SimpleNamespace(actions=np.ones((1, 2, 1), np.float32))


def led(**options) -> LedEnv:
    config = DaggerConfig(of=TabletopConfig(), student="student", steps=3, **options)
    return LedEnv(config, Line(), Student())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("index", "position"),
    # Of 5 states an episode: after 0, 1 and 2 decisions; it ends at its third, so that 3 and 4 are 0 and 1 again.
    [(0, 0), (1, 2), (2, 4), (3, 0), (4, 2), (5, 10), (7, 14)],
)
def test_episodes_begin_where_the_student_has_got(index, position):
    assert led(decisions=5).reset([EpisodeSpec("stack", index=index)], [0]).state[0, 0] == position


def test_the_expert_drives_its_chunk_and_no_further():
    env = led()
    env.reset([EpisodeSpec("stack", index=1)], [0])
    results = [env.step(env.expert_action()[:, None], [0]) for _ in range(3)]
    assert [float(r.obs.state[0, 0]) for r in results] == [1, 0, -1]
    assert [bool(r.done[0]) for r in results] == [False, False, True]
    with pytest.raises(ValueError, match="one action at a time, got 2"):
        env.step(np.zeros((1, 2, 1), np.float32), [0])


def test_it_is_collected_as_any_dataset(tmp_path):
    of = TabletopConfig(tasks=("pick_place",), num_envs=2)
    env = DaggerConfig(of=of, student="pretrained:tabletop_base", num_envs=2)
    options = {"dataset": str(tmp_path / "set"), "keep": "all", "episodes_per_task": 4}
    summary = collect_dataset(env, CollectConfig(**options))
    assert summary["episodes"] == 4 and 8 < summary["frames"] <= 32
