"""Access control of the console: its config, files, socket, and an emergency stop that always gets through.

A stop is a plain `POST /stop`. It holds no place, so that it works when every place for a browser is taken. Like
watching, and a stop over a socket, it needs no token; pages of strangers may not send it.
"""

from __future__ import annotations

import http
from collections.abc import Callable
from pathlib import Path

from pydantic import Field
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from real_robot.serving.connections import ConnectionSlots
from real_robot.serving.network import HostNames, ListenHost, hostname, is_loopback
from vla_rl.config import Config

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


class ConsoleConfig(Config):
    """Where and how the console is served."""

    host: ListenHost = Field(
        default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required."
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port; 0 takes a free one.")
    token: str | None = Field(default=None, repr=False, description="What a person must give to take control.")
    token_file: str = Field(
        default="", description="Name of the token's file, which a person who gives a wrong token is told."
    )
    origins: tuple[str, ...] = Field(
        default=(), description="Pages of other consoles that may show this robot too, such as http://bench2:8080."
    )
    allow_host: tuple[str, ...] = Field(
        default=(), description="Further names by which browsers may address it, besides this machine's."
    )
    certificate: Path | None = Field(default=None, description="PEM file; with it the page is https, its sockets wss.")
    key: Path | None = Field(default=None, description="PEM file of the certificate's key, where it is another file.")
    status_rate: float = Field(default=10.0, gt=0, le=60, description="Status messages a second, to each browser.")
    camera_rate: float = Field(default=10.0, gt=0, le=60, description="Pictures a second of each camera, at most.")
    link_timeout: float = Field(
        default=1.0, gt=0, le=30, description="Seconds of silence of the console in control after which it holds."
    )
    max_clients: int = Field(default=16, ge=1, description="Browsers at a time.")


class ConsoleAccess:
    """Answers each request, or lets a socket in.

    Args:
        stop: called with who asked for an emergency stop. script: of the page, in place of the console's.
    """

    def __init__(
        self, config: ConsoleConfig, slots: ConnectionSlots, stop: Callable[[str], None], script: str = _SCRIPT
    ) -> None:
        self._index = (_FOLDER / "index.html").read_bytes().replace(_SCRIPT.encode(), script.encode())
        self._config, self._slots, self._stop = config, slots, stop
        named = [name for name in map(hostname, config.origins) if name]
        self._names = HostNames(config.host, [*config.allow_host, *named])

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer; None lets a socket in."""
        self._slots.answered(connection)
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
        if not self._slots.has_place():
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
