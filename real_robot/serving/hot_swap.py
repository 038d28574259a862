"""Hot swap of the served policy (`--follow`): the newest that a learner publishes, taken up between episodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import PolicyServer, ServeConfig, policy_facts, serve_until_stopped
from vla_rl.algorithms.offpolicy.published import Followed, Published, newest
from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.interfaces import Policy

LOOK_EVERY = 1.0  # seconds
IDLE = 1.0  # seconds without a request, after which another policy may act: most often no episode is under way


class HotSwap:
    """See the module. A policy that is half-written, damaged or another robot's is told, and the one before goes on.

    Args:
        folder: where policies are published.
    """

    def __init__(self, folder: Path, config: ServeConfig, say: Callable[[str], None] = print) -> None:
        self._folder, self._config, self._say = folder, config, say
        self._server: PolicyServer | None = None

    def load(self) -> tuple[Policy, PolicyFacts]:
        """The newest policy; waits for the first one.

        Raises:
            PublishedError: it must not act.
        """
        device = str(resolve_device(self._config.device))
        if newest(self._folder) is None:
            self._say(f"waiting for the first policy in {self._folder}; `run: hil` publishes one when it begins")
        while newest(self._folder) is None:
            time.sleep(LOOK_EVERY)
        later = f"is loaded, and acts once nothing was asked for {IDLE:g} s"
        self._newest: Followed = Followed(self._folder, self._offer, device, self._say, later)
        return self._newest.policy, self._facts(self._newest.policy, self._newest.published)

    def watch(self, server: PolicyServer) -> None:
        """Look for newer policies from now on, in a thread that ends with the program."""
        self._server = server
        threading.Thread(target=self._look, name="following", daemon=True).start()

    def _look(self) -> None:
        while not threading.Event().wait(LOOK_EVERY):
            self._newest.look()

    def _offer(self, policy: Policy, published: Published) -> None:
        """Hand a policy to the server, which warms it up and may refuse it."""
        if self._server is not None:
            self._server.offer(policy, self._facts(policy, published), IDLE)

    def _facts(self, policy: Policy, published: Published) -> PolicyFacts:
        name = published.folder.name
        facts = policy_facts(policy, str(published.folder), name, published.hash, self._config)
        return replace(facts, can_continue=False)  # The base can, and what a critic chooses cannot.


def main(folder: str, config: ServeConfig, say: Callable[[str], None] = print) -> None:
    """`vla-rl serve --follow`."""
    following = HotSwap(Path(folder), config, say)
    serve_until_stopped(following.load, config, say, following.watch)
