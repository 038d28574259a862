"""`vla-rl hil` on a real ROS 1 graph: what a person at the console does is learned from, and what is learned acts.

The simulated robot, the learner, the server that follows it, and deploy with the console and the recorder, all as
processes; the learner and deploy are killed on the way, and a published policy is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_socket import Browser
from processes import PATIENCE, Child, RosGraph, missing_ros, until

from real_robot.bridge.ros.master import free_port
from vla_rl.data.lerobot_io import list_shards, staging_folder
from vla_rl.offpolicy.published import POINTER, PublishedError, newest
from vla_rl.offpolicy.recorded import new_episodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
LONG = 10 * PATIENCE  # A busy machine starts five programs.
PATIENT = [
    *("rate=10", "silence=60", "pace_timeout=0.2", "execution.max_blind=2", "observation.max_age=2"),
    *("safety.observation_timeout=2", "safety.command_timeout=2", "episode.timeout=60"),
]
EPISODES = 3
LEARNER = [
    *("tabletop_hil", "policy.path=pretrained:tabletop_base", "sft=null", "hil.prior=none", "hil.warm_updates=0"),
    *("hil.actor=recordings", f"hil.episodes={EPISODES}", "hil.publish_every=1", "hil.updates_per_episode=2"),
    *("hil.critic.hidden=16", "hil.evaluate=never", "num_threads=1", "log.tensorboard=false"),
]


class Loop:
    """The five programs of a robot that learns beside a person."""

    def __init__(self, folder: Path) -> None:
        self.graph, self.port, self.server_port = RosGraph(folder), free_port(), free_port()
        self.run, self.recording = folder / "run", folder / "recordings" / "monday"
        self.published = self.run / "published"
        scene = ["env.horizons.push_to_zone=1000000", "env.success.hold_steps=1000000", "speed=0.5", "patience=600"]
        self.graph.cli("sim", "sim-robot", *scene, "--master", self.graph.master.uri)
        self.learner = self.learn(*LEARNER, f"hil.recordings={self.recording.parent}")
        until(lambda: self.graph.check_alive() or (self.published / POINTER).is_file(), "a policy", LONG)
        where = ("--port", str(self.server_port), "--device", "cpu")
        self.server = self.graph.cli("server", "serve", str(self.published), "--follow", *where)
        self.deploy = self.start_deploy("deploy")

    def learn(self, *arguments: str) -> Child:
        return self.graph.cli("learner", "hil", *arguments, "--output", str(self.run))

    def start_deploy(self, name: str) -> Child:
        return self.graph.cli(
            *(name, "deploy", "sim_robot", f"transport.master={self.graph.master.uri}", *PATIENT),
            *("--server", f"127.0.0.1:{self.server_port}", "--wait", str(LONG), "--console", str(self.port)),
            *("--record", str(self.recording), "--allow-policy-change"),
        )

    def browser(self, deploy: Child) -> Browser:
        until(lambda: deploy.says("console: http://"), "the console", LONG)
        browser = Browser(self)
        assert browser.take_control(force=True)["in_control"]
        return browser

    def forget(self, child: Child) -> None:
        """It was killed on purpose."""
        child.kill()
        self.graph.children.remove(child)

    def taken_up(self) -> list[dict[str, Any]]:
        files = sorted(self.run.glob("replay/segment-*/episodes.json"))
        return [json.loads(file.read_text())["notes"] for file in files]

    def await_learned(self, episodes: int) -> None:
        def learned() -> bool:
            try:
                found = newest(self.published)
            except PublishedError:  # Damaged by the test, until the learner publishes anew.
                return False
            return found is not None and found.number >= 2 * episodes

        until(lambda: self.graph.check_alive() or learned(), f"a policy of {episodes} episodes", LONG)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.graph.close()


def run_episode(browser: Browser, helps: bool) -> None:
    """The policy moves the robot; a person takes over or not, and says that it went well."""
    browser.until(lambda s: s.get("state") and s["phase"] in ("idle", "ended"))
    browser.press("start")
    at = browser.until(lambda s: s["phase"] == "autonomous" and s["mode"] == "running")["state"][:2]
    browser.until(lambda s: max(abs(a - b) for a, b in zip(s["state"], at, strict=False)) > 0.01)
    if helps:
        browser.press("take_over")
        begun = browser.until(lambda s: s["phase"] == "recovery")["state"][1]

        def driven(status: dict[str, Any]) -> bool:
            browser.drive(y=0.5)
            return abs(status["state"][1] - begun) > 0.01

        browser.until(driven)
        browser.press("recovery_done")
    browser.press("success")
    browser.until(lambda s: s["phase"] == "ended")


def versions(loop: Loop, number: int) -> tuple[str, ...]:
    until(lambda: len(list_shards(staging_folder(loop.recording))) > number, "the recorded episode")
    [episode] = new_episodes(loop.recording, number, ("agentview",), 1)
    return episode.policies


def test_a_persons_episodes_are_learned_from_and_the_learned_policy_acts(loop: Loop) -> None:
    browser = loop.browser(loop.deploy)
    run_episode(browser, helps=True)
    assert versions(loop, 0)[0].startswith("policy-00000000 ")
    loop.await_learned(1)
    [note] = loop.taken_up()
    assert note["interventions"] == 1 and note["person_minutes"] > 0 and note["successes"] == 1 and not note["alone"]

    loop.forget(loop.learner)  # SIGKILL, as of deploy: the recording is not finished.
    loop.forget(loop.deploy)
    until(lambda: loop.server.says("policy-00000002"), "the server has taken up the newer policy")
    (loop.published / POINTER).write_text('{"number": 9, "ha')
    until(lambda: loop.server.says("is refused, policy-00000002"), "the damaged one is refused")
    deploy = loop.start_deploy("deploy_again")
    browser = loop.browser(deploy)
    run_episode(browser, helps=False)
    assert all(version.startswith("policy-00000002 ") for version in versions(loop, 1)), "the old one goes on"

    loop.learn("--resume")
    loop.await_learned(2)
    assert [note["episodes"] for note in loop.taken_up()] == [1, 1], "none twice, none lost"
    until(lambda: loop.server.says("policy-00000004"), "the server has taken up the next policy")
    browser = loop.browser(deploy)  # The page that said nothing meanwhile was let go.
    run_episode(browser, helps=False)
    assert versions(loop, 2)[-1].startswith("policy-00000004 ")
    learner = loop.graph.children[-1]
    until(lambda: learner.process.poll() is not None, "the learner's end", LONG)
    assert learner.process.returncode == 0, learner.output()[-3000:]
    assert sum(note["episodes"] for note in loop.taken_up()) == EPISODES and (loop.run / "policy").is_dir()
