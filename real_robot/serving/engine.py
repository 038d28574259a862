"""Batched inference for many clients in one thread; what nobody waits for any more is skipped."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from real_robot.serving.requests import PolicyFacts, PolicyIdentity, Request
from vla_rl.types import ActionPrefix, Observation

if TYPE_CHECKING:
    from vla_rl.interfaces import ContinuingPolicy, Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What inference gave one client.

    Attributes:
        actions: float32 (H, A), finite. embedding: float32 (D,) where it was asked for.
        infer_seconds: of the forward pass that it shared with `batch_size` - 1 others.
        queue_seconds: it waited before that.
        policy: who made it.
    """

    actions: np.ndarray
    embedding: np.ndarray | None
    infer_seconds: float
    queue_seconds: float
    batch_size: int
    policy: PolicyIdentity


@dataclass
class _Job:
    request: Request
    future: Future[Answer]
    asked: float


class InferenceEngine:
    """Owns the policy, and the one thread that loads it, warms it up and calls it. Another one may take its place.

    Args:
        load: makes the policy and tells its facts; called in the thread.
        max_batch: most requests in one forward pass.
        temperature: of `Policy.act`; 0 is greedy.
    """

    def __init__(
        self, load: Callable[[], tuple[Policy, PolicyFacts]], max_batch: int = 8, temperature: float = 0.0
    ) -> None:
        self.ready: Future[PolicyFacts] = Future()
        self._load, self._max_batch, self._temperature = load, max_batch, temperature
        self._waiting: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._busy_since: float | None = None
        self._next: tuple[Policy, PolicyFacts] | None = None
        self._idle, self._last_asked = 0.0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Answer]:
        """Ask for inference. Canceling the future before its turn takes the request out of the queue."""
        job = _Job(request, Future(), time.monotonic())
        with self._wake:
            if self._closed:
                raise RuntimeError("the server is closing")
            self._take_over()
            self._last_asked = time.monotonic()
            self._waiting.append(job)
            self._wake.notify()
        return job.future

    def offer(self, policy: Policy, facts: PolicyFacts, idle: float) -> None:
        """Let another policy act, of whom a client need know nothing new, once nothing was asked for `idle` seconds.

        So it is between episodes that it takes over. It is warmed up here, by the caller's thread.

        Raises:
            ValueError: clients were told otherwise of its sizes. RuntimeError: its actions are of no use.
        """
        now = self.ready.result()
        facts = self._warm_up(policy, facts)
        names = {"checkpoint": facts.checkpoint, "version": facts.version, "policy_hash": facts.policy_hash}
        if facts != (told := replace(now, **names)):
            wrong = next(f.name for f in fields(facts) if getattr(facts, f.name) != getattr(told, f.name))
            raise ValueError(
                f"its {wrong} is {getattr(facts, wrong)}, that of the policy served {getattr(now, wrong)}; restart the "
                "server to serve it"
            )
        with self._wake:
            self._next, self._idle = (policy, facts), idle

    def _take_over(self) -> None:
        """Where a policy was offered, and has waited long enough, it acts from here on."""
        if self._next is not None and not self._waiting and time.monotonic() - self._last_asked >= self._idle:
            (self._policy, self._facts), self._next = self._next, None
            log.info("%s acts from now on", self._facts.version)

    @property
    def facts(self) -> PolicyFacts:
        """Of the policy that acts; once it is ready."""
        return self._facts

    def busy_seconds(self) -> float:
        """How long the running forward pass has taken so far; 0 when idle. A large number means that it hangs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def num_waiting(self) -> int:
        """Requests that wait for their turn, canceled ones included."""
        return len(self._waiting)

    def close(self) -> None:
        """Take no more requests and cancel those that wait. A running forward pass is left to end by itself."""
        with self._wake:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._wake.notify()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._policy, facts = self._load()
            self._facts = facts = self._warm_up(self._policy, facts)
        except BaseException as error:  # the thread's edge: whoever awaits `ready` gets it
            self.ready.set_exception(error)
            return
        self.ready.set_result(facts)
        while (jobs := self._take()) is not None:
            self._serve(jobs)

    def _warm_up(self, policy: Policy, facts: PolicyFacts) -> PolicyFacts:
        """Run one pass for one and one for most requests: the first passes load kernels and take seconds.

        Returns:
            the facts, without `can_embed` where the policy turns out to have no `embed`.
        """
        height, width = facts.image_size or (224, 224)
        image = np.zeros((height, width, 3), np.uint8)
        state = np.zeros((1, facts.state_dim or 0), np.float32)
        request = Request(Observation({name: image[None] for name in facts.cameras}, state, ["warm up"]))
        for count in sorted({1, self._max_batch}):
            self._infer(policy, facts, [request] * count)
        if facts.can_embed:
            try:
                self._infer(policy, facts, [replace(request, embedding=True)])
            except NotImplementedError:
                facts = replace(facts, can_embed=False)
        if facts.can_continue:
            still = ActionPrefix(np.zeros((1, 1, facts.action_dim), np.float32), 1)
            self._infer(policy, facts, [replace(request, prefix=still)])
        return facts

    def _take(self) -> list[_Job] | None:
        """The next jobs that can share a forward pass, the oldest first; None when closed."""
        with self._wake:
            while not self._waiting and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            signature = self._waiting[0].request.signature
            jobs = [job for job in self._waiting if job.request.signature == signature][: self._max_batch]
            taken = {id(job) for job in jobs}
            self._waiting = deque(job for job in self._waiting if id(job) not in taken)
        return [job for job in jobs if job.future.set_running_or_notify_cancel()]

    def _serve(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        start = time.monotonic()
        self._busy_since = start
        with self._wake:
            policy, facts = self._policy, self._facts
        try:
            answers = self._infer(policy, facts, [job.request for job in jobs])
        except Exception as error:  # the thread's edge: one bad request must not end the service
            if len(jobs) > 1:  # find whose it was
                for job in jobs:
                    self._serve([job])
            else:
                log.exception("inference failed")
                jobs[0].future.set_exception(error)
        else:
            for job, answer in zip(jobs, answers, strict=True):
                job.future.set_result(replace(answer, queue_seconds=start - job.asked))
        finally:
            self._busy_since = None

    def _infer(self, policy: Policy, facts: PolicyFacts, requests: list[Request]) -> list[Answer]:
        start = time.monotonic()
        first = requests[0]
        obs = Observation.concatenate([request.observation for request in requests])
        obs = policy.prepare(obs) if first.embedding else obs  # For two passes.
        if first.prefix is not None:
            rows = np.concatenate([request.prefix.actions for request in requests if request.prefix is not None])
            continuing = cast("ContinuingPolicy", policy)
            actions = continuing.act_with_prefix(obs, replace(first.prefix, actions=rows)).actions
        else:
            actions = policy.act(obs, temperature=self._temperature).actions
        if actions.shape[0] != len(requests) or not np.isfinite(actions).all():
            raise RuntimeError(f"the policy gave actions of shape {actions.shape}, or NaN among them")
        embeddings: list[np.ndarray | None] = [None] * len(requests)
        if first.embedding:
            features = policy.embed(obs)
            embeddings = list(features if isinstance(features, np.ndarray) else features.float().cpu().numpy())
        spent = time.monotonic() - start
        return [
            Answer(np.asarray(action, np.float32), embedding, spent, 0.0, len(requests), facts.identity)
            for action, embedding in zip(actions, embeddings, strict=True)
        ]
