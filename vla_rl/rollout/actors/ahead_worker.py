"""Actor of asynchronous rollouts (`rollout.staleness` above 0): runs each episode on its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vla_rl.common.row_noise import RowGenerator
from vla_rl.rollout.actors.cluster import (
    Setting,
    cause_of,
    how_gone,
    is_the_callers,
    ray,
    release_freed_memory,
    where_here,
)
from vla_rl.rollout.actors.host import Course, is_same, lost_result
from vla_rl.rollout.actors.ledger import Ticket
from vla_rl.rollout.actors.vec_env import MAX_MOVES, Troubles, no_host, start_host
from vla_rl.rollout.actors.weights import Packed
from vla_rl.rollout.actors.worker import PolicyCopy, stamped
from vla_rl.rollout.runner import assemble
from vla_rl.types import ActionChunk, Episode, Observation, StepResult

MOST_AT_ONCE = 64  # Observations that a worker acts on.
MAX_WAIT_SECONDS = 0.005  # that an observation waits for others to be acted on with
RETRY_SECONDS = 1.0  # before another host is asked for in place of one that did not start


class HostGoneError(RuntimeError):
    """The host of an episode died or hung; the episode goes on at another."""


@dataclass
class _Letter:
    """What an episode asks of its host: to begin, or to step.

    Attributes:
        chunk: float32 (H, A); None: begin, and go as far as the course went.
    """

    row: int
    course: Course
    chunk: np.ndarray | None
    answer: asyncio.Future[Any]


@dataclass
class _Mailbox:
    """What episodes ask of one host, which answers all that has come in turns.

    Attributes:
        letters: what has come. passed_on: what the host was asked, and has not answered.
    """

    letters: list[_Letter] = field(default_factory=list)
    passed_on: list[_Letter] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_broken: bool = False


@dataclass
class _Seat:
    """An environment of a host."""

    at: _Mailbox
    row: int

    async def ask(self, course: Course, chunk: np.ndarray | None) -> Any:
        """Begin or step; returns the observation, or the step's result.

        Raises:
            HostGoneError: the host broke before it answered.
        """
        if self.at.is_broken:
            raise HostGoneError
        letter = _Letter(self.row, course, chunk, asyncio.get_running_loop().create_future())
        self.at.letters.append(letter)
        self.at.wake.set()
        return await letter.answer


@dataclass
class _Question:
    """An observation that waits for the policy's chunk."""

    obs: Observation
    generator: Any
    answer: asyncio.Future[tuple[ActionChunk, int]]


class AheadWorker:
    """Runs an episode for each ticket, as many at a time as its hosts hold, with the newest weights at each decision.

    What waits is acted on together: `batch` observations, or fewer after MAX_WAIT_SECONDS. Each episode draws from a
    seed of its own.
    """

    def __init__(self, plan: Mapping[str, Any], setting: Setting) -> None:
        self._plan, self._setting = plan, setting
        self._copy: PolicyCopy | None = None
        self._troubles = Troubles()
        self._fatal: BaseException | None = None
        self._free: asyncio.Queue[_Seat | None] = asyncio.Queue()
        self._questions: list[_Question] = []
        self._asked, self._enough, self._ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_waiting = self._num_running = self._num_hosts = 0
        self._began = self._hostless_since = time.monotonic()  # The second where there is no host.
        self._moved_on = self._began  # When something was done last, or nothing was to be done.
        self._envs_s = self._policy_s = 0.0  # For which hosts stepped, all together, and the policy acted.

    async def where(self) -> tuple[str, int]:
        """See `where_here`."""
        return where_here()

    async def load(self, version: int, *weights: Packed) -> None:
        """Act with these weights from the next decision on."""
        if self._copy is None:
            self._copy = copy = PolicyCopy(self._plan, self._setting)
            copy.policy.eval()
            self._hostless_since = time.monotonic()
            parts = np.array_split(np.arange(copy.plan.env.num_envs), copy.config.hosts)
            for work in (*(self._keep_host(len(part)) for part in parts), self._act_forever()):
                self._tasks.append(task := asyncio.create_task(work))
                task.add_done_callback(self._end)
            self._ready.set()
        if version > self._copy.version:
            self._copy.load(weights, version)
            release_freed_memory()
        self._moved_on = time.monotonic()

    def _end(self, task: asyncio.Task[None]) -> None:
        """What was to go on for ever has ended: let every episode end with its error, here and from now on."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._fatal = self._fatal or error
        self._free.put_nowait(None)
        questions, self._questions = self._questions, []
        for question in questions:
            question.answer.set_exception(self._fatal)

    async def status(self) -> dict[str, Any]:
        """Return how busy it is, and what broke since this was last asked.

        `stuck_s`: seconds for which nothing was done although there was something to do. `clock_s`: since the start;
        `envs_s`, `policy_s`: for how many of them hosts stepped, all together, and the policy acted.
        """
        now = time.monotonic()
        return {
            "waiting": self._num_waiting,
            "running": self._num_running,
            "asking": len(self._questions),
            "hosts": self._num_hosts,
            "stuck_s": now - self._moved_on if self._num_waiting + self._num_running else 0.0,
            "clock_s": now - self._began,
            "envs_s": self._envs_s,
            "policy_s": self._policy_s,
            "troubles": self._troubles.taken(),
        }

    async def play(self, ticket: Ticket) -> tuple[dict[str, Any], Episode]:
        """Run an episode; returns its oldest version and whether it was lost, and the episode."""
        if not self._num_waiting + self._num_running:
            self._moved_on = time.monotonic()
        self._num_waiting += 1
        await self._ready.wait()
        course, generator = Course(ticket.spec), torch.Generator().manual_seed(ticket.seed)
        seat = await self._begin(course, await self._free_seat())
        self._num_waiting, self._num_running = self._num_waiting - 1, self._num_running + 1
        steps, versions = [], []
        try:
            while not (steps and steps[-1][2].done[0]):
                assert course.seen is not None, "it has begun"
                chunk, version = await self._decide(course.seen, generator)
                versions.append(version)
                seen, seat, result = course.seen, *await self._step(course, seat, chunk.actions[0])
                steps.append((seen, chunk, result, None))  # The learner prepares it anew: not to be sent beside it.
        finally:
            self._num_running -= 1
            self._free.put_nowait(seat)
        episode = stamped(assemble(ticket.spec, steps, ticket.group), versions)
        return {"oldest": min(versions), "lost": episode.lost}, episode

    # --- the policy -------------------------------------------------------------------------

    async def _decide(self, obs: Observation, generator: Any) -> tuple[ActionChunk, int]:
        if self._fatal is not None:
            raise self._fatal
        question = _Question(obs, generator, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        self._asked.set()
        if self._copy is not None and len(self._questions) >= min(MOST_AT_ONCE, self._num_running):
            self._enough.set()
        return await question.answer

    async def _act_forever(self) -> None:
        assert self._copy is not None, "load begins this"
        copy, noise, most = self._copy, RowGenerator(), MOST_AT_ONCE
        noise.manual_seed(copy.plan.seed)
        while True:
            await self._asked.wait()
            if len(self._questions) < min(most, self._num_running):
                self._enough.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), MAX_WAIT_SECONDS)
            batch, self._questions = self._questions[:most], self._questions[most:]
            if not self._questions:
                self._asked.clear()
            started = time.monotonic()
            try:
                noise.rows = [question.generator for question in batch]
                obs = Observation.concatenate([question.obs for question in batch])
                chunk = copy.policy.act(obs, noise, copy.plan.temperature)
                answers = [chunk.select([row]) for row in range(len(batch))]
            except Exception as error:  # The episodes' callers raise it.
                for question in batch:
                    question.answer.set_exception(error)
                continue
            self._moved_on = time.monotonic()
            self._policy_s += self._moved_on - started
            for question, answer in zip(batch, answers, strict=True):
                question.answer.set_result((answer, copy.version))
            await asyncio.sleep(0)  # Weights and answers come in between.

    # --- the hosts --------------------------------------------------------------------------

    async def _free_seat(self) -> _Seat:
        while True:
            seat = await self._free.get()
            if seat is None:
                self._free.put_nowait(None)
                assert self._fatal is not None, "a None follows it"
                raise self._fatal
            if not seat.at.is_broken:
                return seat

    async def _begin(self, course: Course, seat: _Seat) -> _Seat:
        """Bring a seat to where the course is; returns it, or another, where its host breaks."""
        while True:
            try:
                shown = await seat.ask(course, None)
            except HostGoneError:
                seat = await self._moved(course)
                continue
            course.is_lost = course.is_lost or (course.seen is not None and not is_same(course.seen, shown))
            course.seen = course.seen or shown
            return seat

    async def _moved(self, course: Course) -> _Seat:
        course.num_moves += 1
        course.is_lost = course.num_moves > MAX_MOVES
        self._troubles.num_moved += 1
        return await self._free_seat()

    async def _step(self, course: Course, seat: _Seat, chunk: np.ndarray) -> tuple[_Seat, StepResult]:
        """Step the course, if need be elsewhere; returns where it is then, and the result, which may say lost."""
        while True:
            try:
                result = await seat.ask(course, chunk)
                break
            except HostGoneError:
                seat = await self._begin(course, await self._moved(course))
                if course.is_lost:
                    assert course.seen is not None, "it has begun"
                    return seat, lost_result(course.seen, len(chunk), {})
        course.chunks.append(chunk)
        course.seen = result.obs
        return seat, result

    async def _keep_host(self, num_envs: int) -> None:
        """Keep a host with so many environments going: start one, serve it, and when it breaks start another."""
        assert self._copy is not None, "load begins this"
        config, values = self._copy.config, self._copy.plan.env.model_dump(mode="json")
        broke: float | None = None
        said = ""
        while True:
            host = start_host(values, config, self._setting)
            try:
                await asyncio.wait_for(host.open.remote(0, num_envs), config.start_timeout_s)
            except ray.exceptions.RayTaskError as error:
                raise cause_of(error) from error
            except (ray.exceptions.RayError, TimeoutError) as error:
                ray.kill(host)
                how = how_gone(error) if isinstance(error, ray.exceptions.RayError) else "it took too long"
                if said != (said := f"did not start ({how})"):
                    self._troubles.note(f"a host of {num_envs} environments {said}; another is asked for")
                if not self._num_hosts and time.monotonic() - self._hostless_since >= config.start_timeout_s:
                    raise no_host(config, said) from None
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._moved_on, said = time.monotonic(), ""
            if broke is not None:
                self._troubles.seconds += self._moved_on - broke
            mailbox = _Mailbox()
            for row in range(num_envs):
                self._free.put_nowait(_Seat(mailbox, row))
            self._num_hosts += 1
            why = "is left"
            try:
                why = await self._serve(host, mailbox, config.timeout_s)
            finally:
                self._num_hosts -= 1
                self._break(mailbox, why)
            self._moved_on = self._hostless_since = broke = time.monotonic()
            self._troubles.num_hosts += 1
            self._troubles.note(f"a host of {num_envs} environments {why}; another takes over")
            ray.kill(host)

    async def _serve(self, host: Any, mailbox: _Mailbox, timeout: float) -> str:
        """Pass on what episodes ask until the host breaks; returns why."""
        while True:
            await mailbox.wake.wait()
            mailbox.wake.clear()
            letters = mailbox.passed_on = mailbox.letters
            mailbox.letters = []
            starts = [letter for letter in letters if letter.chunk is None]
            steps = [letter for letter in letters if letter.chunk is not None]
            chunks = [letter.chunk for letter in letters if letter.chunk is not None]
            begun = [(letter.row, letter.course.spec, letter.course.chunks) for letter in starts]
            actions, started = np.stack(chunks) if chunks else None, time.monotonic()
            try:
                turn = host.turn.remote(0, begun, [letter.row for letter in steps], actions)
                seen, result = await asyncio.wait_for(turn, timeout)
            except ray.exceptions.RayTaskError as error:
                cause = cause_of(error)
                if not is_the_callers(cause):
                    return f"failed: {cause}"
                cause.__cause__ = error
                for letter in letters:
                    letter.answer.set_exception(cause)
                continue
            except TimeoutError:
                return f"said nothing for {timeout:g} s"
            except ray.exceptions.RayError as error:
                return f"is gone ({how_gone(error)})"
            self._moved_on = time.monotonic()
            self._envs_s += self._moved_on - started
            for row, letter in enumerate(starts):
                letter.answer.set_result(seen.row(row))
            for row, letter in enumerate(steps):
                letter.answer.set_result(result.row(row))

    def _break(self, mailbox: _Mailbox, why: str) -> None:
        mailbox.is_broken = True
        for letter in [*mailbox.passed_on, *mailbox.letters]:
            if not letter.answer.done():
                letter.answer.set_exception(HostGoneError(why))
