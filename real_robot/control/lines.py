"""Lines for a person, told in a thread of their own: no control tick waits for a terminal."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)
CAPACITY = 1000  # lines that wait; of more, the oldest are not told


class Lines:
    """Tells lines one after the other. A terminal that stands (Ctrl-S, a pipe that nobody reads) keeps them waiting.

    Args:
        tell: tells the person a line; may block.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()  # of a lock that a signal's handler may take again
        self._waiting: deque[str] = deque(maxlen=CAPACITY)
        self._is_busy = self._is_closed = False
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def put(self, text: str) -> None:
        """Tell a line soon. Does not wait."""
        with self._changed:
            self._waiting.append(text)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all is told; False where it is not in so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, seconds)

    def close(self) -> None:
        """End the thread once all is told. Does not wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if not self._waiting:
                    return
                text, self._is_busy = self._waiting.popleft(), True
            try:
                self._tell(text)
            except Exception as error:  # a line is lost; the next one may be told
                _log.warning("not told: %s (%s)", text, error)
