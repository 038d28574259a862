"""Stand-ins for the Hub, served on loopback for a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol


class HasUrl(Protocol):
    url: str


@contextmanager
def served[H: HasUrl](hub: H, handler: type[BaseHTTPRequestHandler]) -> Iterator[H]:
    """Serve, for the block; the handler finds `hub`, and `hub` gets its `url`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
