"""`vla-rl hil` on recordings with `env.reward`: whether an episode succeeded is what the reward says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import planted_reward  # noqa: F401  A recipe names it.
import pytest
from tiny_run import make_recipe, save_policy

from real_robot.operator.recorder import Recording
from vla_rl.data.lerobot_io import RecordedEpisode, encode_png
from vla_rl.offpolicy.replay import FACTS_FILE
from vla_rl.workflows.hil import run_hil

STEPS = 6


def recorded(index: int, closed: list[int], success: bool) -> RecordedEpisode:
    """An episode whose fingers are closed at these steps; `success`: as was recorded."""
    state = np.full((STEPS, 8), 0.04, np.float32)
    state[closed, 6] = 0
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
        final_state=state[-1],
    )


@pytest.mark.parametrize(("reward", "successes"), [("{kind: planted_reward:GripRewardConfig}", 1), ("null", 2)])
def test_the_reward_says_which_recorded_episodes_succeeded(tmp_path: Path, reward: str, successes: int) -> None:
    """Closed from the first step on is no success; closed later is one, though a person said that it failed."""
    with Recording(tmp_path / "recordings" / "monday", 10, "dummy") as recording:
        for index, (closed, success) in enumerate([([], True), ([0], True), ([3, 4], False)]):
            recording.add(recorded(index, closed, success), {"agentview": (32, 32)})
    recipe = make_recipe(
        save_policy(tmp_path / "policy"),
        *(f"env.reward={reward}", f"hil.recordings={tmp_path / 'recordings'}", "hil.actor=recordings"),
        *("hil.prior=none", "hil.warm_updates=0", "hil.episodes=3", "hil.publish_every=3", "hil.evaluate=never"),
        *("hil.updates_per_episode=1", "hil.critic.hidden=8", "hil.critic.batch_size=8"),
    )
    run = tmp_path / "run"
    run.mkdir()
    figures = run_hil(recipe, run, lambda _: None)
    notes = [json.loads((path / FACTS_FILE).read_text())["notes"] for path in run.glob("replay/segment-*")]
    assert sum(note["episodes"] for note in notes) == 3 and sum(note["successes"] for note in notes) == successes
    assert figures["rollout/success_rate"] == pytest.approx(successes / 3) and figures["person/resets_per_100"] == 100
