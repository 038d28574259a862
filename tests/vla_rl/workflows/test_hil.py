"""`run: hil`: learner and actor as two processes; killed and resumed, no episode is lost or counted twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_run import metrics
from typer.testing import CliRunner, Result

from real_robot.operator.recording_folder import RecordingError, RecordingLock
from real_robot.operator.sim_interventions import OperatorOptions
from vla_rl.algorithms.offpolicy.published import newest
from vla_rl.algorithms.offpolicy.replay import FACTS_FILE, Replay
from vla_rl.cli.app import app
from vla_rl.common.child_process import start_child
from vla_rl.config import ConfigError
from vla_rl.data.lerobot_io import list_shards, staging_folder
from vla_rl.data.source import LeRobotSource
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows import hil, hil_actor
from vla_rl.workflows.hil import run_hil
from vla_rl.workflows.hil_actor import PUBLISHED, RECORDING, act

EPISODES = 16
TINY = [
    *("policy.path=pretrained:tabletop_base", "sft=null", "hil.prior=none", "hil.warm_updates=0", "num_threads=1"),
    *("env.num_envs=4", "env.num_workers=0", "env.horizons.push_to_zone=24"),
    *(f"hil.episodes={EPISODES}", "hil.publish_every=3", "hil.updates_per_episode=2"),
    *("hil.evaluate=never", "hil.critic.hidden=16", "hil.critic.batch_size=32", "log.tensorboard=false"),
]
ROOT = Path(__file__).resolve().parents[3]


def segments(run: Path) -> list[dict[str, Any]]:
    """What the replay says of each of its segments."""
    return [json.loads((path / FACTS_FILE).read_text())["notes"] for path in sorted(run.glob("replay/segment-*"))]


def learned(run: Path) -> int:
    """Updates behind the newest published policy."""
    found = newest(run / PUBLISHED)
    return 0 if found is None else found.number


class Command:
    """`run: hil` in a process of its own."""

    def __init__(self, run: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "vla_rl", "train", *arguments, "--output", str(run)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0].decode()
            time.sleep(0.05)


class ActorHere:
    """The actor in this process, in place of one of its own: it has ended where it was started."""

    def __init__(self, command: list[str], **_: Any) -> None:
        try:
            hil_actor.main(Path(command[-1]))
            self.returncode = 0
        except Killed:
            self.returncode = -signal.SIGKILL

    def poll(self) -> int:
        return self.returncode

    def wait(self, _: float | None = None) -> int:
        return self.returncode


class Killed(BaseException):
    """Stands for a kill of the actor."""


def recorded(run: Path) -> int:
    """Episodes that are recorded so far, while others are under way."""
    return len(list_shards(staging_folder(run / RECORDING)))


def wait_until_free(run: Path) -> None:
    """Nobody records: the actor has ended."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return RecordingLock(staging_folder(run / RECORDING)).close()
        except RecordingError:
            assert time.monotonic() < deadline, "the actor outlives the learner"
            time.sleep(0.05)


def here(*arguments: str) -> Result:
    """`run: hil` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vla-rl", "train", *arguments])  # Which the run's folder keeps.
        return CliRunner().invoke(app, sys.argv[1:])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the actor outlives a learner that is killed")
@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_actor_and_learner_are_killed_and_every_episode_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def start_and_kill(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        def kill() -> None:
            while recorded(run) < 3 and process.poll() is None:
                time.sleep(0.02)
            process.kill()

        process = start_child(command, **options)
        threading.Thread(target=kill).start()
        return process

    with monkeypatch.context() as patch:
        patch.setattr(hil, "start_child", start_and_kill)
        first = here("tabletop_hil", *TINY, "--output", str(run))
    assert first.exit_code == 2 and f"--resume --output {run}" in first.output
    assert f"error: the actor has ended ({-signal.SIGKILL})" in first.output
    before = recorded(run)
    assert 3 <= before < EPISODES

    second = Command(run, "--resume")
    second.until(lambda: bool(learned(run)) and recorded(run) > before)
    assert segments(run)
    second.process.kill()
    second.process.communicate()
    wait_until_free(run)

    monkeypatch.setattr(hil, "start_child", ActorHere)
    third = here("--resume", "--output", str(run))
    assert third.exit_code == 0, third.output
    assert Counter(LeRobotSource(run / RECORDING).initial_states()) == Counter(
        f"push_to_zone/train/{500_000 + number}" for number in range(EPISODES)
    ), "each initial state once, in spite of two kills"
    notes = segments(run)
    assert sum(note["episodes"] for note in notes) == EPISODES
    recording = LeRobotSource(run / RECORDING)
    tables = list(recording.batches(["control_source", "policy_version"]))
    source, versions = ([one for t in tables for one in t.column(name).to_pylist()] for name in tables[0].column_names)
    last = metrics(run)[-1]
    assert last["rollout/episodes"] == EPISODES and last["step"] == 2 * EPISODES
    assert recording.interventions is not None and last["person/interventions"] == recording.interventions.sum() > 0
    assert 0 < last["replay/prior_decisions"] < last["replay/decisions"] == recording.num_frames
    assert "per 100 episodes" in third.output and "100 resets" in third.output

    facts = json.loads(next(run.glob("replay/segment-*/episodes.json")).read_text())
    replay = Replay(run / "replay", None, 0.5, 10**6, facts["fingerprint"], person_is_prior=True)
    replay.restore()
    driven = np.isin(source, ("recovery", "correction")).sum()
    assert replay.num_prior == last["replay/prior_decisions"] == driven, "each takeover decision, marked"
    published = newest(run / PUBLISHED)
    assert published is not None and published.number == 2 * EPISODES
    assert len(set(versions)) > 1 and all(one.startswith("policy-") for one in versions), "newer policies acted"


def test_no_turn_has_anothers_noise_and_the_policy_explores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks in turns of one episode: two turns of the same state's number."""
    seeds, temperatures = [], []

    def run_interventions(*_: Any, seed: int, options: OperatorOptions, **__: Any) -> list[Any]:
        seeds.append(seed)
        temperatures.append(options.temperature)
        return []

    followed = SimpleNamespace(look=lambda: None, policy=None, published=SimpleNamespace(version="one", number=0))
    monkeypatch.setattr("vla_rl.workflows.hil_actor.run_interventions", run_interventions)
    monkeypatch.setattr("vla_rl.workflows.hil_actor.Followed", lambda *_: followed)
    options = ["hil.episodes=4", "hil.publish_every=1", "env.tasks=[push_to_zone,stack]"]
    act(load_recipe("tabletop_hil", [*TINY, *options]), tmp_path, print)
    assert len(set(seeds)) == 4 and temperatures == [1.0] * 4


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name them in sft\.datasets.*hil\.prior=none"):
        run_hil(load_recipe("tabletop_hil", ["sft=null", "policy.path=pretrained:tabletop_base"]), tmp_path, print)
    with pytest.raises(ConfigError, match="recordings: got '' with actor=recordings"):
        load_recipe("tabletop_hil", ["hil.actor=recordings"])
