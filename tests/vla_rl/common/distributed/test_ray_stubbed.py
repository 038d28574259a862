"""What Ray's actors and their callers do where something does not start, dies, hangs or is slow; with a stub of Ray."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_ray import MACHINE, StubRay, gone, never, ray
from tiny_run import RECIPE
from vla_rl.evaluation.report.status import status_lines

from vla_rl.common.progress import Stopwatch
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError, apply_overrides
from vla_rl.evaluation import evaluate as evaluate_module
from vla_rl.evaluation.report.report import write_report
from vla_rl.recipe.recipe import Recipe, read_recipe
from vla_rl.rollout.actors import ahead_worker, cluster, rollouts
from vla_rl.rollout.actors.ahead import AheadSource
from vla_rl.rollout.actors.cluster import Connection, cause_of
from vla_rl.rollout.actors.ledger import MAX_ATTEMPTS
from vla_rl.rollout.actors.source import LockstepSource, RaySource
from vla_rl.rollout.actors.vec_env import RayVecEnv
from vla_rl.rollout.source import GroupOrder, RolloutPlan
from vla_rl.types import Episode, EpisodeSpec, Observation

GROUPS, SIZE = 2, 2


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRay]:
    stub = StubRay(monkeypatch)
    yield stub
    stub.close()


def recipe(*rollout: str, **overrides: Any) -> Recipe:
    values = {**RECIPE, "policy": {"kind": "my_policy:BinsConfig"}, "rollout": {"kind": "ray", "hosts": 2}, **overrides}
    return read_recipe(apply_overrides(values, ["env.num_envs=4", *(f"rollout.{option}" for option in rollout)]))


def source(wanted: Recipe, version: int = 0) -> RaySource:
    config: Any = wanted.rollout
    parts = {name: getattr(wanted, name) for name in ("env", "policy", "rollout", "seed", "device")}
    plan = RolloutPlan(**parts, groups=GROUPS, temperature=1.0)
    made = (AheadSource if config.staleness else LockstepSource)(plan, config, Connection(is_ours=False))
    made.publish(wanted.policy.build(wanted.env.env_spec(), "cpu", 0), version)
    return made


def collect(made: RaySource) -> list[Episode]:
    specs = [EpisodeSpec("reach_red", "train", number) for number in range(GROUPS)]
    return made.collect(GroupOrder(specs, SIZE, 7, 0, GROUPS), Stopwatch())


# --- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rollout_where_nothing_breaks(staleness: int, stub: StubRay) -> None:
    """Else the others show nothing."""
    made = source(recipe(f"staleness={staleness}"))
    episodes = collect(made)
    assert [episode.group for episode in episodes] == [0, 0, 1, 1] and not any(e.lost for e in episodes)
    assert made.metrics()["rollout/redone"] == 0 == made.num_under_way
    assert {"rollout/envs_busy", "rollout/policy_busy"} <= made.metrics().keys()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_error_of_an_actor_is_told_with_where_it_was_raised(
    staleness: int, stub: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("left_arm")

    stub.rules["run" if staleness == 0 else "play"] = fail
    with pytest.raises(KeyError, match="left_arm"):
        collect(source(recipe(f"staleness={staleness}")))
    assert "Traceback, far away" in caplog.text


def test_a_users_mistake_is_told_without(caplog: pytest.LogCaptureFixture) -> None:
    def raised(error: Exception) -> BaseException:
        return cause_of(ray.exceptions.RayTaskError("f", "Traceback, far away", error, proctitle="a", ip="10.0.0.7"))

    for error in (ConfigError("algo.optim.lr: got -1"), ValueError("no such task")):
        assert raised(error) is error
    assert not caplog.text
    assert str(raised(KeyError("k"))) == "'k'" and "Traceback, far away" in caplog.text


def test_an_episode_that_was_too_old_often_is_begun_again_where_its_simulator_breaks(stub: StubRay) -> None:
    """What was dropped for its age is no loss: only `MAX_ATTEMPTS` losses count an episode as lost."""
    made = source(recipe("staleness=1"))
    made._ledger.add(EpisodeSpec("reach_red", "train", 9), [5])
    for _ in range(MAX_ATTEMPTS):
        (ticket,) = made._ledger.waiting()
        made._ledger.hand_out(ticket, "x")
        made._ledger.store(ticket, "an old one", -2)
        assert not made._ledger.ready(0)
    breaks = [True]

    async def play(worker: Any, ticket: Any) -> Any:
        outcome, episode = await worker.play(ticket)
        return (outcome | {"lost": True} if ticket.group == 0 and breaks and breaks.pop() else outcome), episode

    stub.rules["play"] = play
    made.collect(GroupOrder([], SIZE, 7, 0, 1), Stopwatch())
    assert not breaks and made.metrics()["rollout/redone"] == 1


def test_an_episode_whose_simulator_always_breaks_is_lost_in_the_end(stub: StubRay) -> None:
    async def play(worker: Any, ticket: Any) -> Any:
        outcome, episode = await worker.play(ticket)
        return outcome | {"lost": True}, episode

    stub.rules["play"] = play
    collect(made := source(recipe("staleness=1")))
    assert made.metrics()["rollout/redone"] == GROUPS * SIZE * (MAX_ATTEMPTS - 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_breaks_is_said_while_the_rollout_goes_on(
    staleness: int, stub: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    """The first host dies at its second turn; the rollout ends long after."""
    said, turns = list[bool](), list[int]()

    def turn(host: Any, *arguments: Any) -> Any:
        turns.append(1)
        said.append("another takes over" in caplog.text)
        if len(turns) == 2:
            raise gone()
        return host.turn(*arguments)

    stub.rules["turn"] = turn
    with caplog.at_level(logging.WARNING):
        episodes = collect(made := source(recipe(f"staleness={staleness}")))
    assert not any(episode.lost for episode in episodes)
    assert made.metrics()["rollout/hosts_lost"] == 1 and made.metrics()["rollout/moved"] >= 1
    assert "is gone (ActorDiedError); another takes over" in caplog.text
    assert said[-1] and not said[0]


def test_a_worker_tells_what_broke_before_its_rollout_ends(stub: StubRay, caplog: pytest.LogCaptureFixture) -> None:
    """With staleness 0 what a worker's hosts lost is asked for with what it has done, and told once."""
    stub.rules["run"] = never
    stub.rules["done"] = lambda worker: ((int(stub.now), 0), ["a host is gone"])
    made = source(recipe("staleness=0"))
    with caplog.at_level(logging.WARNING), pytest.raises(AssertionError, match="for ever"):
        collect(made)
    assert caplog.text.count("a host is gone") == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_status_and_page_tell_all_that_the_sources_log(staleness: int, stub: StubRay, tmp_path: Path) -> None:
    """Each figure by a number of its own, so that one that is logged by another name is missed."""
    made = source(recipe(f"staleness={staleness}"))
    collect(made)
    numbers = {name: 101 + number for number, name in enumerate(sorted(made.metrics()))}
    row = numbers | {name: numbers[name] / 100 for name in ("rollout/envs_busy", "rollout/policy_busy")}
    row |= {"step": 1, "train/episodes": 16, "train/success": 0.25, "time/total": 8.0, "time/simulation": 4.0}
    run = RunFolder(tmp_path)
    run.metrics.write_text(json.dumps(row) + "\n")
    write_report(tmp_path)
    for text in ("\n".join(status_lines(run)), run.report.read_text()):
        told = text[text.index("iteration 1: 16 episodes") :]
        missing = [name for name, number in numbers.items() if not re.search(rf"\b{number}\b", told)]
        assert missing == ["rollout/seconds"]


# --- staleness 0 --------------------------------------------------------------------------------


class Slow:
    """Jobs of several workers that end one after another; meanwhile each does something, or nothing."""

    def __init__(self, stub: StubRay, *ends: float) -> None:
        self.stub, self.ends, self.jobs = stub, list(ends), list[Any]()
        self.are_stuck = False
        stub.rules |= {"run": self.run, "done": self.done}

    def run(self, worker: Any, *arguments: Any) -> Any:
        number = len(self.jobs)
        self.jobs.append(worker)
        end = self.stub.now + (self.ends[number] if number < len(self.ends) else 0)

        async def at_the_end() -> Any:
            while self.stub.now < end:
                await asyncio.sleep(0)
            return worker.run(*arguments)

        return at_the_end()

    async def done(self, worker: Any) -> Any:
        asked = self.stub.now
        while self.stub.now < asked + 0.1:  # It takes its way.
            await asyncio.sleep(0)
        return (0 if self.are_stuck else int(self.stub.now), 0), []


def test_a_worker_that_is_slower_than_the_others_is_not_replaced(stub: StubRay) -> None:
    """The first one's part takes longer than any may be silent, and the second one's still longer."""
    Slow(stub, 600, 900)
    made = source(recipe("staleness=0", "workers=2", "timeout_s=60", "start_timeout_s=60"))
    assert len(collect(made)) == GROUPS * SIZE
    assert made.metrics()["rollout/workers_lost"] == 0 and not stub.killed


def test_a_worker_that_gets_nothing_done_is_replaced(stub: StubRay) -> None:
    slow = Slow(stub, 600)
    slow.are_stuck = True
    made = source(recipe("staleness=0", "timeout_s=60", "start_timeout_s=60"))
    assert len(collect(made)) == GROUPS * SIZE
    assert made.metrics()["rollout/workers_lost"] == 1


def test_a_worker_that_does_not_start_is_told_with_what_the_cluster_has(
    stub: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    stub.rules |= {"run": never, "done": never}
    with pytest.raises(
        RuntimeError, match=r"lost 5 times.*did not start within 120 s: .* 8 CPUs and 0 GPUs.*worker_gpus"
    ):
        collect(source(recipe("staleness=0", "timeout_s=60", "start_timeout_s=60")))


# --- staleness above 0 --------------------------------------------------------------------------


def test_weights_that_a_worker_cannot_load_end_the_run(stub: StubRay) -> None:
    """As where a path is missing on that machine: the worker answers questions, and plays nothing."""

    def load(*_: Any) -> None:
        raise FileNotFoundError("/models/base: no such folder")

    stub.rules |= {"load": load}
    with pytest.raises(FileNotFoundError, match="/models/base"):
        collect(source(recipe("staleness=1")))


def test_later_weights_that_a_worker_cannot_load_end_the_run(stub: StubRay) -> None:
    made = source(recipe("staleness=1"))
    collect(made)
    stub.rules["load"] = lambda *_: 1 / 0
    made.publish(recipe().policy.build(recipe().env.env_spec(), "cpu", 1), 1)
    with pytest.raises(ZeroDivisionError):
        collect(made)


@pytest.mark.parametrize("fails", [gone, None])
def test_hosts_that_never_start_end_the_run(
    fails: Callable[[], BaseException] | None, stub: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    def dies(*_: Any) -> None:
        assert fails is not None
        raise fails()

    stub.rules["open"] = dies if fails else never
    why = "ActorDiedError" if fails else "it took too long"
    with pytest.raises(RuntimeError, match=rf"hosts: none started within 50 s.*{why}.*8 CPUs and 0 GPUs.*host_gpus=0"):
        collect(source(recipe("staleness=1", "start_timeout_s=50")))
    assert caplog.text.count(f"did not start ({why}); another is asked for") >= 1


def test_a_host_that_dies_and_starts_again_within_the_time_ends_nothing(stub: StubRay) -> None:
    opens: list[int] = []

    def open_(host: Any, *arguments: Any) -> None:
        opens.append(1)
        if len(opens) <= 10:
            raise gone()
        host.open(*arguments)

    stub.rules["open"] = open_
    assert len(collect(source(recipe("staleness=1", "start_timeout_s=50")))) == GROUPS * SIZE


def test_what_is_wrong_with_an_environment_ends_the_run(stub: StubRay) -> None:
    def open_(*_: Any) -> None:
        raise OSError("no EGL device")

    stub.rules["open"] = open_
    with pytest.raises(OSError, match="no EGL device"):
        collect(source(recipe("staleness=1")))


@pytest.mark.parametrize("place", ["concatenate", "select", "turn"])
def test_a_background_task_that_fails_ends_the_run(place: str, stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError(place)

    if place == "turn":  # An answer that nobody can read.
        stub.rules["turn"] = lambda *_: (Broken(), None)
    else:
        name = "Observation" if place == "concatenate" else "ActionChunk"
        monkeypatch.setattr(getattr(ahead_worker, name), place, fail)
    with pytest.raises(ArithmeticError):
        collect(source(recipe("staleness=1")))


class Broken:
    def row(self, row: int) -> Observation:
        raise ArithmeticError(row)


def test_a_worker_whose_episodes_get_nowhere_is_replaced(stub: StubRay) -> None:
    """It answers; its host says nothing in time of ours, but less than for `timeout_s` of its own."""
    stub.rules["turn"] = never
    made = source(recipe("staleness=1", "timeout_s=60", "start_timeout_s=60"))
    stub.rules["status"] = lambda worker: stuck(worker, stub)
    with pytest.raises(
        RuntimeError, match=r"lost 5 times, the last time because its worker got nothing done for 120 s"
    ):
        collect(made)


async def stuck(worker: Any, stub: StubRay) -> dict[str, Any]:
    return (await worker.status()) | {"stuck_s": 121.0}


def test_how_long_a_worker_got_nothing_done_is_told_by_itself(stub: StubRay) -> None:
    """Its hosts do not start: one may wait for that, but for no longer than for all limits together."""
    worker = ahead_worker.AheadWorker({}, cluster.Setting.here())

    async def told() -> float:
        return (await worker.status())["stuck_s"]

    assert stub.loop.run_until_complete(told()) == 0
    stub.now += 500
    assert stub.loop.run_until_complete(told()) == 0, "nothing is to be done"
    task = stub.loop.create_task(worker.play(None))  # type: ignore[arg-type]  # It waits for weights first.
    stub.turn()
    stub.now += 30
    assert stub.loop.run_until_complete(told()) == pytest.approx(30, abs=0.1)
    task.cancel()
    stub.turn()


def test_shares_of_time_are_told_of_hosts_and_policy(stub: StubRay) -> None:
    status = {"clock_s": 10.0, "envs_s": 15.0, "policy_s": 1.0}
    stub.rules["status"] = lambda worker: told(worker, status)
    made = source(recipe("staleness=1", "workers=2"))
    for envs, policy in ((0.75, 0.1), (0.5, 0.3)):  # Of two hosts each.
        collect(made)
        made._look()  # type: ignore[attr-defined]
        stub.turn()
        collect(made)
        found = made.metrics()
        assert (found["rollout/envs_busy"], found["rollout/policy_busy"]) == pytest.approx((envs, policy))
        status |= {"clock_s": 20.0, "envs_s": 25.0, "policy_s": 4.0}


async def told(worker: Any, status: dict[str, float]) -> dict[str, Any]:
    return (await worker.status()) | status


# --- what a cluster can hold --------------------------------------------------------------------


def test_workers_that_no_machine_can_hold_are_refused_at_once(stub: StubRay) -> None:
    def refused(*rollout: str) -> str:
        with pytest.raises(ConfigError) as error:
            cluster.wait_for_room(recipe(*rollout).rollout, 1)  # type: ignore[arg-type]
        return str(error.value)

    assert "no machine has room for one worker: the cluster has 8 CPUs and 0 GPUs" in refused("worker_gpus=1")
    assert "no machine has room for one host" in refused("host_cpus=9")
    assert "no room for 3 workers with a host each" in refused("workers=3", "host_cpus=2")
    assert stub.now < 1001, "this machine alone gets no others"
    assert "worker_gpus=1" in refused("worker_gpus=1", "address=auto", "start_timeout_s=50")
    assert stub.now >= 1050


def test_machines_that_join_are_waited_for(stub: StubRay, caplog: pytest.LogCaptureFixture) -> None:
    def nodes() -> list[dict[str, Any]]:
        joined = stub.now >= 1020
        return [MACHINE, {"Alive": joined, "Resources": {"CPU": 8.0, "GPU": 2.0}}]

    ray.nodes = nodes  # type: ignore[assignment]  # The fixture puts it back.
    config: Any = recipe("workers=2", "worker_gpus=1", "address=auto").rollout
    cluster.wait_for_room(config, 1)
    assert 1020 <= stub.now < 1060 and "waiting for machines: no machine has room for one worker" in caplog.text
    with pytest.raises(ConfigError, match="no room for 4 workers"):
        cluster.wait_for_room(config, 2)


# --- evaluations --------------------------------------------------------------------------------


def test_an_evaluations_ray_ends_with_the_last_environment_there(
    stub: StubRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    is_there = [False]
    monkeypatch.setattr(ray, "is_initialized", lambda: is_there[0])
    monkeypatch.setattr(ray, "init", lambda **_: is_there.__setitem__(0, True))
    monkeypatch.setattr(ray, "shutdown", lambda: (ended.append(True), is_there.__setitem__(0, False)))
    wanted = recipe()
    config = wanted.rollout.placed(wanted.env)
    assert isinstance(config, rollouts.HostedEnvConfig)
    first, second = config.build(), config.build()
    first.close()
    first.close()
    assert not ended, "the other one needs it"
    assert second.reset([EpisodeSpec("reach_red")], [0]).state.shape[0] == 1
    second.close()
    assert ended == [True]
    is_there[0] = True  # Somebody else's.
    config.build().close()
    assert ended == [True]


def test_films_there_do_not_pile_up_in_memory(stub: StubRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each control step's images were not counted."""
    wanted, sizes = recipe(), []
    policy = wanted.policy.build(wanted.env.env_spec(), "cpu", 0)
    for record_frames in (False, True):
        env = RayVecEnv(wanted.env, wanted.rollout, cluster.Setting.here(), record_frames=record_frames)  # type: ignore[arg-type]
        sizes.append(evaluate_module._batch_size(env, policy))
        env.close()
    assert sizes[1] < sizes[0] / 2


def test_an_evaluation_says_what_breaks(stub: StubRay, caplog: pytest.LogCaptureFixture) -> None:
    wanted = recipe()
    env = RayVecEnv(wanted.env, wanted.rollout, cluster.Setting.here())  # type: ignore[arg-type]
    env.reset([EpisodeSpec("reach_red")] * 4)
    deaths = [1]

    def turn(host: Any, *arguments: Any) -> Any:
        if deaths:
            deaths.pop()
            raise gone()
        return host.turn(*arguments)

    stub.rules["turn"] = turn
    env.step(np.zeros((4, 4, 7), np.float32))
    assert "the host of environments [0, 1] is gone (ActorDiedError); another takes over" in caplog.text
