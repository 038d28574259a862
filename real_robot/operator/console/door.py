"""The console's door: which requests come in. Files of the page, its socket, and an emergency stop that always fits.

A stop is a plain `POST /stop`. It holds no place, so that it works when every place for a browser is taken. Like
watching, and a stop over a socket, it needs no token; pages of strangers may not send it.
"""

from __future__ import annotations

import http
from collections.abc import Callable
from pathlib import Path

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from real_robot.operator.console.config import ConsoleConfig
from real_robot.serving.address import HostNames, hostname, is_loopback
from real_robot.serving.guests import Guests

SOCKET_PATH, STOP_PATH = "/socket", "/stop"
_FOLDER = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {f"/{path.name}": path for path in _FOLDER.iterdir()}
_SCRIPT = "console.js"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self' ws: wss: http: https:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Door:
    """Answers each request, or lets a socket in.

    Args:
        stop: called with who asked for an emergency stop. script: of the page, in place of the console's.
    """

    def __init__(
        self, config: ConsoleConfig, guests: Guests, stop: Callable[[str], None], script: str = _SCRIPT
    ) -> None:
        self._index = (_FOLDER / "index.html").read_bytes().replace(_SCRIPT.encode(), script.encode())
        self._config, self._guests, self._stop = config, guests, stop
        named = [name for name in map(hostname, config.origins) if name]
        self._names = HostNames(config.host, [*config.allow_host, *named])

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer; None lets a socket in."""
        self._guests.answered(connection)
        hosts, path = request.headers.get_all("Host"), request.path.partition("?")[0]
        if (refusal := self._names.refusal(hosts, connection.local_address)) is not None:
            return _respond(http.HTTPStatus.FORBIDDEN, f"{refusal}\n")
        method = "POST" if path == STOP_PATH else "GET"
        if request.method != method:
            return _respond(http.HTTPStatus.METHOD_NOT_ALLOWED, f"{path[:80]} takes {method}\n", {"Allow": method})
        if path == "/":
            return _respond(http.HTTPStatus.OK, self._index, {"Content-Type": "text/html; charset=utf-8"})
        if path in _FILES:
            file = _FILES[path]
            kind = {"Content-Type": f"{_KINDS[file.suffix]}; charset=utf-8"}
            return _respond(http.HTTPStatus.OK, file.read_bytes(), kind)
        if path not in (SOCKET_PATH, STOP_PATH):
            return _respond(http.HTTPStatus.NOT_FOUND, "not found\n")
        origins = request.headers.get_all("Origin")
        if origins and not (len(origins) == 1 and self._may_embed(origins[0], hosts[0])):
            return _respond(http.HTTPStatus.FORBIDDEN, "pages of this origin may not connect; see origins\n")
        if path == STOP_PATH:
            self._stop(f"POST from {(connection.remote_address or ('an address unknown',))[0]}")
            readable = {"Access-Control-Allow-Origin": origins[0]} if origins else {}
            return _respond(http.HTTPStatus.ACCEPTED, "the robot stops at its next control tick\n", readable)
        if not self._guests.has_place():
            return _respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many consoles; POST /stop stops all the same\n")
        return None

    def _may_embed(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may connect: our own page, or one that was named."""
        if origin in self._config.origins or origin.partition("://")[2].lower() == host.lower():
            return True
        return is_loopback(self._config.host) and is_loopback(hostname(origin))


def _respond(status: http.HTTPStatus, body: str | bytes, more: dict[str, str] | None = None) -> Response:
    data = body.encode() if isinstance(body, str) else body
    kind = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(data)), "Connection": "close"}
    return Response(status.value, status.phrase, Headers({**kind, **_HEADERS, **(more or {})}), data)
