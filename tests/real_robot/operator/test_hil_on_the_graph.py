"""`run: hil` on a real ROS 1 graph: what a person at the console does is learned from, and what is learned acts.

The simulated robot, the learner, the server that follows it, and deploy with the console and the recorder, all as
processes; a scripted person at the console. The learner is killed while it learns, deploy in an episode, a published
policy is damaged; in the end each finished episode of both recordings is in the replay, once.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_at_console import ExpertAtConsole
from processes import PATIENCE, Child, RosGraph, missing_ros, until
from safetensors.numpy import load_file
from sim_observer import SceneObserver

from real_robot.transports.ros.master import free_port
from vla_rl.algorithms.offpolicy.published import POINTER, PublishedError, newest
from vla_rl.algorithms.offpolicy.recorded import RecordedFrames, new_episodes, num_recorded, recordings_in
from vla_rl.algorithms.offpolicy.replay import DECISIONS_FILE, FACTS_FILE
from vla_rl.algorithms.offpolicy.transitions import Transitions

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
LONG = 10 * PATIENCE  # A busy machine starts five programs.
PATIENT = [
    *("rate=10", "silence=60", "pace_timeout=0.2", "execution.max_blind=2", "observation.max_age=2"),
    *("safety.observation_timeout=2", "safety.command_timeout=2", "episode.timeout=60"),
]
EPISODES, UPDATES = 5, 100
LEARNER = [
    *("tabletop_hil", "policy.path=pretrained:tabletop_base", "sft=null", "hil.prior=none", "hil.warm_updates=0"),
    *("hil.actor=recordings", f"hil.episodes={EPISODES}", "hil.publish_every=1", f"hil.updates_per_episode={UPDATES}"),
    *("hil.critic.hidden=16", "hil.evaluate=never", "num_threads=1", "log.tensorboard=false"),
]


@dataclass(frozen=True)
class Ended:
    """An episode as the person has seen it end. helped: the person has driven."""

    recording: str
    helped: bool
    success: bool


class Loop:
    """The programs of a robot that learns beside a person, as docs/learn_from_experience.md starts them."""

    def __init__(self, folder: Path) -> None:
        self.graph, self.port, self.server_port = RosGraph(folder), free_port(), free_port()
        self.run, self.recordings = folder / "run", folder / "recordings"
        self.published = self.run / "published"
        self.ended: list[Ended] = []
        master = self.graph.master.uri
        self.graph.cli("sim", "robot", "sim", "publish_expert=true", "speed=0.5", "--master", master)
        where = ("--port", str(self.server_port), "--device", "cpu")
        self.server = self.graph.cli("server", "serve", str(self.published), "--follow", *where)
        self.learner = self.learn(*LEARNER, f"hil.recordings={self.recordings}")
        self.deploy = self.start_deploy("monday")

    def learn(self, *arguments: str) -> Child:
        return self.graph.cli("learner", "train", *arguments, "--output", str(self.run))

    def start_deploy(self, name: str) -> Child:
        self.name = name
        return self.graph.cli(
            *(f"deploy_{name}", "deploy", "sim_robot", f"transport.master={self.graph.master.uri}", *PATIENT),
            *("--server", f"127.0.0.1:{self.server_port}", "--wait", str(LONG), "--console", str(self.port)),
            *("--record", str(self.recordings / name), "--round", "1", "--allow-policy-change"),
        )

    @contextmanager
    def person(self, observer: SceneObserver) -> Iterator[ExpertAtConsole]:
        """At the console, as soon as it is there."""
        until(lambda: self.deploy.says("console: http://"), "the console", LONG)
        person = ExpertAtConsole(self, observer)
        yield person
        person.leave()

    def episode(self, observer: SceneObserver, helps: bool) -> RecordedFrames:
        """Run one, and return what was recorded of it."""
        place = num_recorded(self.recordings / self.name)
        with self.person(observer) as person:
            self.ended.append(Ended(self.name, *person.run_episode(helps)))
        until(lambda: num_recorded(self.recordings / self.name) > place, "the recorded episode")
        [episode] = new_episodes(self.recordings / self.name, place, ("agentview",), 1)
        return episode

    def kill(self, child: Child) -> None:
        """SIGKILL, on purpose."""
        child.kill()
        self.graph.children.remove(child)

    def segments(self) -> list[Path]:
        return sorted(self.run.glob("replay/segment-*"))

    def learned(self) -> int:
        """Updates behind the newest published policy."""
        try:
            found = newest(self.published)
        except PublishedError:  # Damaged by the test, until the learner publishes anew.
            return -1
        return -1 if found is None else found.number

    def await_learned(self, episodes: int) -> None:
        def is_there() -> bool:
            self.graph.check_alive()
            return self.learned() >= UPDATES * episodes

        until(is_there, f"a policy of {episodes} episodes", LONG)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.graph.close()


@pytest.fixture
def observer(loop: Loop) -> Iterator[SceneObserver]:
    with closing(SceneObserver(loop.graph.master.uri)) as made:
        yield made


def check_each_once(loop: Loop) -> int:
    """Each finished episode is in the replay, once, as it was recorded. Returns a person's decisions in it."""
    taken: Counter[str] = Counter()
    driven = 0
    for segment in loop.segments():
        decisions = Transitions(**load_file(segment / DECISIONS_FILE))
        notes = json.loads((segment / FACTS_FILE).read_text())["notes"]
        names = [name for name, count in notes["recordings"].items() for _ in range(count)]
        assert len(names) == len(decisions.success)
        for number, name in enumerate(names):
            [recorded] = new_episodes(loop.recordings / name, taken[name], ("agentview",), 1)
            own = decisions.episode == number
            np.testing.assert_array_equal(decisions.chunk[own, 0], recorded.actions)
            assert decisions.person is not None
            np.testing.assert_array_equal(decisions.person[own], recorded.person)
            ended = [one for one in loop.ended if one.recording == name][taken[name]]
            assert decisions.success[number] == recorded.success == ended.success
            assert recorded.interventions == ended.helped == recorded.person.any()
            taken[name] += 1
            driven += int(recorded.person.sum())
    assert taken == Counter(one.recording for one in loop.ended), "none lost, none twice"
    assert taken == {one.name: num_recorded(one) for one in recordings_in(loop.recordings)}
    return driven


def last_metrics(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_killed_and_resumed_no_episode_is_lost_and_what_is_learned_acts(loop: Loop, observer: SceneObserver) -> None:
    until(lambda: loop.server.says("waiting for the first policy"), "the server waits for the learner", LONG)
    first = loop.episode(observer, helps=True)
    assert [version.split()[0] for version in first.policies] == ["policy-00000000"]
    loop.await_learned(1)
    loop.episode(observer, helps=True)
    until(lambda: loop.graph.check_alive() or len(loop.segments()) == 2, "the second episode is taken up", LONG)
    loop.kill(loop.learner)
    until(lambda: loop.server.says(f"policy-{UPDATES:08d} "), "the server has taken up the newer policy")
    (loop.published / POINTER).write_text('{"number": 9, "ha')
    until(lambda: loop.server.says("is refused, policy-"), "the damaged policy is refused")
    alone = loop.episode(observer, helps=False)
    assert not alone.person.any() and alone.policies[-1] > first.policies[0], "the newer one acts, without a learner"
    with loop.person(observer) as person:
        person.begin()
        loop.kill(loop.deploy)  # In the episode: the recording is not finished.
    loop.deploy = loop.start_deploy("tuesday")
    loop.episode(observer, helps=False)

    loop.learner = loop.learn("--resume")
    loop.await_learned(4)
    newer = f"policy-{4 * UPDATES:08d} "
    until(lambda: loop.server.says(f"{newer}"), "the server has taken up the next policy")
    last = loop.episode(observer, helps=True)
    assert last.policies[-1].startswith(newer) and last.policies[-1] > alone.policies[-1]
    until(lambda: loop.learner.process.poll() is not None, "the learner's end", LONG)
    assert loop.learner.process.returncode == 0, loop.learner.output()[-3000:]

    driven, metrics = check_each_once(loop), last_metrics(loop.run)
    assert 0 < driven == metrics["replay/prior_decisions"] < metrics["replay/decisions"], "a person's are prior, too"
    assert (metrics["rollout/episodes"], metrics["person/interventions"]) == (
        EPISODES,
        sum(one.helped for one in loop.ended),
    )
    assert metrics["person/minutes"] == pytest.approx(driven / 10 / 60)
    assert metrics["step"] == loop.learned() == EPISODES * UPDATES and (loop.run / "policy").is_dir()
    loop.deploy.signal(signal.SIGINT)
    assert loop.deploy.process.wait(LONG) == 0, loop.deploy.output()[-3000:]
    assert [one.is_dir() for one in recordings_in(loop.recordings)] == [False, True], "tuesday is a dataset now"
    assert check_each_once(loop) == driven
