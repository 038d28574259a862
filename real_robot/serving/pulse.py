"""Whether a policy server lives, also while nothing is asked of it: it is pinged ten times a second."""

from __future__ import annotations

import math
import threading
import time

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

EVERY = 0.1  # seconds from an answer to the next ping


class Pulse:
    """Pings one connection in a thread of its own, which ends with the connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._heard = time.monotonic()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    @property
    def silence(self) -> float:
        """Seconds since the server last answered a ping; infinite once the connection is lost."""
        return math.inf if self._connection.close_code is not None else time.monotonic() - self._heard

    def _run(self) -> None:
        while True:
            try:
                answered = self._connection.ping(ack_on_close=True)
            except (ConnectionClosed, OSError):
                return
            answered.wait()
            self._heard = time.monotonic()
            time.sleep(EVERY)
