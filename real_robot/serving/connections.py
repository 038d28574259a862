"""Connection slots of a server: connections that say nothing lose theirs to those that come after them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from websockets.asyncio.server import ServerConnection

HANDSHAKE_SECONDS = 5.0  # for a connection's first request, and before that for its TLS handshake
PING_EVERY, PING_TIMEOUT = 5.0, 10.0  # seconds; a peer that has gone without a word loses its place after both
MAX_MUTE, MAX_MUTE_PER_ADDRESS = 256, 64  # connections without a request
TRY_AGAIN_LATER = 1013


class ConnectionSlots:
    """At most `most` connections. When all places are taken, the oldest that never spoke is sent away for a new one.

    Connections that have not even sent their HTTP request hold no place; of them the oldest goes when one address, or
    all together, have too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._mute: dict[ServerConnection, None] = {}  # in order of arrival; with a place, nothing said
        self._speaking: set[ServerConnection] = set()
        self._knocking: dict[ServerConnection, str] = {}  # their addresses
        self._closing: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._mute) + len(self._speaking)

    def has_place(self) -> bool:
        """Whether one more may come in."""
        return len(self._speaking) < self._most

    async def enter(self, connection: ServerConnection) -> bool:
        """Give it a place. Returns whether there was one; else, and for who loses theirs, the connection is closed."""
        if not self.has_place():
            await connection.close(TRY_AGAIN_LATER, "too many clients")
            return False
        loser = next(iter(self._mute)) if len(self) >= self._most else None
        self._mute[connection] = None
        if loser is not None:
            del self._mute[loser]
            closing = asyncio.ensure_future(loser.close(TRY_AGAIN_LATER, "others came, and this one said nothing"))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return True

    def spoke(self, connection: ServerConnection) -> None:
        """Remember that it has said something: it keeps its place."""
        if connection in self._mute:
            del self._mute[connection]
            self._speaking.add(connection)

    def leave(self, connection: ServerConnection) -> None:
        """Its place is free."""
        self._mute.pop(connection, None)
        self._speaking.discard(connection)

    # --- before the first request -------------------------------------------------------------

    def knocks(self, connection: ServerConnection) -> None:
        """A connection has been made; nothing came over it yet."""
        address = str((connection.remote_address or ("",))[0])
        self._knocking[connection] = address
        counts = Counter(self._knocking.values())
        if counts[address] > MAX_MUTE_PER_ADDRESS:
            self._turn_away(address)
        elif len(self._knocking) > MAX_MUTE:
            self._turn_away(counts.most_common(1)[0][0])

    def answered(self, connection: ServerConnection) -> None:
        """Its request has come, or it is gone."""
        self._knocking.pop(connection, None)

    def _turn_away(self, address: str) -> None:
        oldest = next(c for c, other in self._knocking.items() if other == address)
        del self._knocking[oldest]
        oldest.transport.abort()

    def connection_class(self) -> type[ServerConnection]:
        """For `serve(create_connection=...)`: connections that tell us when they come and go."""
        slots = self

        class CountedConnection(ServerConnection):
            """A connection of these slots."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                slots.knocks(self)

            def connection_lost(self, exc: Exception | None) -> None:
                slots.answered(self)
                super().connection_lost(exc)

        return CountedConnection
