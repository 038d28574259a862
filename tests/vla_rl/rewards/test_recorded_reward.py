"""`run: hil` on recordings with `env.reward`: whether an episode succeeded is what the reward says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import planted_reward  # noqa: F401  A recipe names it.
import pytest
from tiny_run import make_recipe, save_policy

from real_robot.operator.recorder import Recording
from vla_rl.algorithms.offpolicy.replay import FACTS_FILE
from vla_rl.data.lerobot_io import RecordedEpisode, encode_png
from vla_rl.workflows.hil import run_hil

STEPS = 6


def recorded(index: int, closed: list[int], success: bool) -> RecordedEpisode:
    """An episode whose fingers are closed after these steps, `STEPS` is its end; `success`: as was recorded."""
    states = np.full((STEPS + 1, 8), 0.04, np.float32)
    states[closed, 6] = 0
    state = states[:-1]
    png = encode_png(np.full((32, 32, 3), index, np.uint8))
    actions = np.zeros((STEPS, 7), np.float32)
    return RecordedEpisode(
        task="reach_red",
        split="train",
        index=index,
        instruction="move to the red square",
        png={"agentview": [png] * STEPS},
        state=state,
        actions=actions,
        executed_actions=actions,
        requested_actions=actions,
        time=np.arange(STEPS) / 10,
        reward=np.zeros(STEPS, np.float32),
        success=success,
        control_source=["policy"] * STEPS,
        policy_version="one",
        final_png={"agentview": png},
        final_state=states[-1],
    )


def run(tmp_path: Path, reward: str, episodes: list[tuple[list[int], bool]], finished: bool) -> tuple[int, dict]:
    """How many episodes of a recording succeeded, and the run's figures."""
    recording = Recording(tmp_path / "recordings" / "monday", 10, "dummy")
    for index, (closed, success) in enumerate(episodes):
        recording.add(recorded(index, closed, success), {"agentview": (32, 32)})
    if finished:
        recording.close()
    count = len(episodes)
    recipe = make_recipe(
        save_policy(tmp_path / "policy"),
        "run=hil",
        *(f"env.reward={reward}", f"hil.recordings={tmp_path / 'recordings'}", "hil.actor=recordings"),
        *("hil.prior=none", "hil.warm_updates=0", f"hil.episodes={count}", f"hil.publish_every={count}"),
        *("hil.evaluate=never", "hil.updates_per_episode=1", "hil.critic.hidden=8", "hil.critic.batch_size=8"),
    )
    folder = tmp_path / "run"
    folder.mkdir()
    figures = run_hil(recipe, folder, lambda _: None)
    notes = [json.loads((path / FACTS_FILE).read_text())["notes"] for path in folder.glob("replay/segment-*")]
    assert sum(note["episodes"] for note in notes) == count
    return sum(note["successes"] for note in notes), figures


@pytest.mark.parametrize(("reward", "successes"), [("{kind: planted_reward:GripRewardConfig}", 1), ("null", 2)])
def test_the_reward_says_which_recorded_episodes_succeeded(tmp_path: Path, reward: str, successes: int) -> None:
    """Closed from the first step on is no success; closed later is one, though a person said that it failed."""
    found, figures = run(tmp_path, reward, [([], True), ([0], True), ([3, 4], False)], finished=True)
    assert found == successes
    assert figures["rollout/success_rate"] == pytest.approx(successes / 3) and figures["person/resets_per_100"] == 100


@pytest.mark.parametrize("finished", [False, True])
def test_a_recording_is_judged_where_the_reward_was_fitted_to_judge(tmp_path: Path, finished: bool) -> None:
    """At steps 0, 4 and the end: closed in between is not seen, and what is seen last counts."""
    reward = "{kind: planted_reward:GripRewardConfig, every: 4}"
    episodes = [([1, 2, 3, 5], False), ([4], False), ([STEPS], False), ([0, STEPS], False)]
    assert run(tmp_path, reward, episodes, finished)[0] == 3
