"""What the console's server keeps of each browser."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

from websockets.asyncio.server import ServerConnection

from real_robot.operator.console.messages import Seen

MAX_MESSAGES_PER_SECOND = 200
UNSEEN_PAUSE = 2.0  # seconds after which a page that says nothing gets one more


class Session:
    """One browser: what it has been sent, has seen and has said."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.name = ""
        self.num_bad = self.num_wrong = 0
        self.scores_shown = self.notices_shown = 0
        self.pictures_shown: dict[str, float] = {}
        self.refused: deque[str] = deque(maxlen=8)  # told with the next status, so that listening never waits
        self.heard: tuple[float, float] | None = None  # (the page's clock, ours) of its last word, not echoed yet
        self.quickest = float("inf")  # smallest (arrival - page's clock) seen, seconds
        self._window, self._in_window = 0.0, 0
        self.sent, self.seen = Seen(0, 0), Seen(0, 0)
        self._forced = dict.fromkeys(("statuses", "pictures"), time.monotonic())

    def may_send(self, what: Literal["statuses", "pictures"], ahead: int) -> bool:
        """Return whether the page keeps up. One that never says so gets little."""
        if getattr(self.sent, what) - getattr(self.seen, what) < ahead:
            return True
        now = time.monotonic()
        is_due = now - self._forced[what] > UNSEEN_PAUSE
        self._forced[what] = now if is_due else self._forced[what]
        return is_due

    def is_flooding(self, now: float) -> bool:
        """Count a message; return whether there were too many within a second."""
        if now - self._window > 1.0:
            self._window, self._in_window = now, 0
        self._in_window += 1
        return self._in_window > MAX_MESSAGES_PER_SECOND

    def delay(self, sent: float, now: float) -> float:
        """Return the seconds that a message came later than the quickest one: what waited in a stalled connection."""
        self.quickest = min(self.quickest, now - sent)
        return now - sent - self.quickest
