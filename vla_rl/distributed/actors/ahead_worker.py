"""An actor that runs episodes each on its own, while the policy is updated elsewhere: `rollout.staleness` above 0."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_rl.common.row_noise import RowGenerator
from vla_rl.distributed.actors.cluster import Setting, is_the_callers, release_freed_memory, where_here
from vla_rl.distributed.actors.host import Course, is_same, lost_result
from vla_rl.distributed.actors.ledger import Ticket
from vla_rl.distributed.actors.vec_env import MAX_MOVES, Troubles, start_host
from vla_rl.distributed.actors.weights import Packed
from vla_rl.distributed.actors.worker import PolicyCopy, stamped
from vla_rl.rollout.runner import assemble
from vla_rl.types import ActionChunk, Episode, Observation, StepResult

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
    """What episodes ask of one host, which answers all that has come in turns."""

    letters: list[_Letter] = field(default_factory=list)
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

    What waits is acted on together: `batch` observations, or fewer after `max_wait_ms`. Each episode draws from a seed
    of its own.
    """

    def __init__(self, recipe: Mapping[str, Any], setting: Setting) -> None:
        self._recipe, self._setting = recipe, setting
        self._copy: PolicyCopy | None = None
        self._troubles = Troubles()
        self._fatal: BaseException | None = None
        self._free: asyncio.Queue[_Seat | None] = asyncio.Queue()
        self._questions: list[_Question] = []
        self._asked, self._enough, self._ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_waiting = self._num_running = self._num_hosts = self._num_done = 0

    async def where(self) -> tuple[str, int]:
        """See `where_here`."""
        return where_here()

    async def load(self, version: int, *weights: Packed) -> None:
        """Act with these weights from the next decision on."""
        if self._copy is None:
            self._copy = copy = PolicyCopy(self._recipe, self._setting)
            copy.policy.eval()
            parts = np.array_split(np.arange(copy.recipe.env.num_envs), copy.config.hosts)
            self._tasks = [asyncio.create_task(self._keep_host(len(part))) for part in parts]
            self._tasks.append(asyncio.create_task(self._act_forever()))
            self._ready.set()
        if version > self._copy.version:
            self._copy.load(weights, version)
            release_freed_memory()

    async def status(self) -> dict[str, Any]:
        """Return how busy it is, and what broke since this was last asked."""
        return {
            "waiting": self._num_waiting,
            "running": self._num_running,
            "asking": len(self._questions),
            "hosts": self._num_hosts,
            "done": self._num_done,
            "troubles": self._troubles.taken(),
        }

    async def play(self, ticket: Ticket) -> tuple[dict[str, Any], Episode]:
        """Run an episode; returns its oldest version and whether it was lost, and the episode."""
        import torch

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
                steps.append((seen, chunk, result))
        finally:
            self._num_running -= 1
            self._free.put_nowait(seat)
        self._num_done += 1
        episode = stamped(assemble(ticket.spec, steps, ticket.group), versions)
        return {"oldest": min(versions), "lost": episode.lost}, episode

    # --- the policy -------------------------------------------------------------------------

    async def _decide(self, obs: Observation, generator: Any) -> tuple[ActionChunk, int]:
        question = _Question(obs, generator, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        self._asked.set()
        if self._copy is not None and len(self._questions) >= min(self._copy.config.batch, self._num_running):
            self._enough.set()
        return await question.answer

    async def _act_forever(self) -> None:
        assert self._copy is not None, "load begins this"
        copy, noise, most = self._copy, RowGenerator(), self._copy.config.batch
        noise.manual_seed(copy.recipe.seed)
        while True:
            await self._asked.wait()
            if len(self._questions) < min(most, self._num_running):
                self._enough.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), copy.config.max_wait_ms / 1000)
            batch, self._questions = self._questions[:most], self._questions[most:]
            if not self._questions:
                self._asked.clear()
            noise.rows = [question.generator for question in batch]
            obs = Observation.concatenate([question.obs for question in batch])
            try:
                chunk = copy.policy.act(obs, noise, copy.recipe.train.temperature)
            except Exception as error:  # The episodes' callers raise it.
                for question in batch:
                    question.answer.set_exception(error)
                continue
            for row, question in enumerate(batch):
                question.answer.set_result((chunk.select([row]), copy.version))
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
        import ray

        assert self._copy is not None, "load begins this"
        config, values = self._copy.config, self._copy.recipe.env.model_dump(mode="json")
        loop = asyncio.get_running_loop()
        broke: float | None = None
        while True:
            host = start_host(values, config, self._setting)
            try:
                await asyncio.wait_for(host.open.remote(0, num_envs), config.start_timeout_s)
            except ray.exceptions.RayTaskError as error:
                self._fatal = error.cause
                self._free.put_nowait(None)
                return
            except (ray.exceptions.RayError, TimeoutError):
                ray.kill(host)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if broke is not None:
                self._troubles.seconds += loop.time() - broke
            mailbox = _Mailbox()
            for row in range(num_envs):
                self._free.put_nowait(_Seat(mailbox, row))
            self._num_hosts += 1
            why = await self._serve(host, mailbox, config.timeout_s)
            self._num_hosts, broke = self._num_hosts - 1, loop.time()
            self._troubles.num_hosts += 1
            self._troubles.lines.append(f"a host of {num_envs} environments {why}")
            ray.kill(host)

    async def _serve(self, host: Any, mailbox: _Mailbox, timeout: float) -> str:
        """Pass on what episodes ask until the host breaks; returns why."""
        import ray

        while True:
            await mailbox.wake.wait()
            mailbox.wake.clear()
            letters, mailbox.letters = mailbox.letters, []
            starts = [letter for letter in letters if letter.chunk is None]
            steps = [letter for letter in letters if letter.chunk is not None]
            chunks = [letter.chunk for letter in letters if letter.chunk is not None]
            begun = [(letter.row, letter.course.spec, letter.course.chunks) for letter in starts]
            actions = np.stack(chunks) if chunks else None
            try:
                turn = host.turn.remote(0, begun, [letter.row for letter in steps], actions)
                seen, result = await asyncio.wait_for(turn, timeout)
            except ray.exceptions.RayTaskError as error:
                if not is_the_callers(error.cause):
                    return self._break(mailbox, letters, f"failed: {error.cause}")
                for letter in letters:
                    letter.answer.set_exception(error.cause)
                continue
            except TimeoutError:
                return self._break(mailbox, letters, f"said nothing for {timeout:g} s")
            except ray.exceptions.RayError as error:
                return self._break(mailbox, letters, f"is gone ({type(error).__name__})")
            for row, letter in enumerate(starts):
                letter.answer.set_result(seen.row(row))
            for row, letter in enumerate(steps):
                letter.answer.set_result(result.row(row))

    def _break(self, mailbox: _Mailbox, letters: list[_Letter], why: str) -> str:
        mailbox.is_broken = True
        for letter in [*letters, *mailbox.letters]:
            letter.answer.set_exception(HostGoneError(why))
        return why
