"""Client of a vla-rl policy server: numpy, msgpack and websockets, Python 3.8 or newer.

    with PolicyClient("gpu-box:8000", token=token, ca="cert.pem") as client:
        actions = client.act({"wrist": image}, state, "pick up the cup")  # float32 (H, A)

This package imports nothing else of vla-rl, whose own client is another `PolicyConnection`.
"""

from __future__ import annotations

import inspect
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

from .wire import DEFAULT_LIMITS, PROTOCOL, ProtocolError, WireLimits, pack, short, unpack

__all__ = [
    "InferenceTimeout", "NotAuthorized", "NotTrusted", "PolicyClient", "PolicyClientError", "PolicyConnection",
    "ServerError", "ServerUnavailable",
]  # fmt: skip
__version__ = "0.1.0"

DEFAULT_PORT = 8000


class PolicyClientError(RuntimeError):
    """Base of what a client can meet: catch it to hold the robot."""


class ServerUnavailable(PolicyClientError):
    """No server there, the connection was lost, or it is not ready yet. The next request tries again."""


class NotAuthorized(PolicyClientError):
    """The server wants a token, or another one."""


class NotTrusted(PolicyClientError):
    """The server cannot show that it is the one meant: its certificate is expired, another's or a stranger's."""


class InferenceTimeout(PolicyClientError):
    """The server did not answer in time."""


class ServerError(PolicyClientError):
    """The server answered with an error; the text is its own."""


class PolicyConnection:
    """One connection to a policy server. Calls are made one at a time; a second thread waits for its turn.

    Every wait has a time-out. A request that is not answered in time costs the connection, so that its late answer can
    never be taken for that of the next; the next request connects anew.

    Args:
        address: host, host:port, [IPv6]:port, or one of them after ws:// or wss:// (encrypted).
        token: bearer token.
        ca: PEM file of the authorities that are trusted, alone, or a context that knows them; with it an address
            without scheme is wss. None: the system's.
        connect_timeout: seconds for the connection and its handshake.
        ready_timeout: seconds to wait for the metadata, which come when the policy is loaded and warm.
        infer_timeout: seconds from a request to its answer.
        retry_after: seconds after a failed connection in which further requests fail at once.

    Attributes:
        metadata: what the server told of its policy at the last connection; empty before the first.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        ca: str | ssl.SSLContext | None = None,
        connect_timeout: float = 2.0,
        ready_timeout: float = 10.0,
        infer_timeout: float = 2.0,
        retry_after: float = 0.0,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self.address = _url(address, ca is not None)
        self.metadata: dict[str, Any] = {}
        self._tls: ssl.SSLContext | None = None
        if self.address.startswith("wss:"):
            self._tls = ca if isinstance(ca, ssl.SSLContext) else ssl.create_default_context(cafile=ca)
        self._token, self._connect_timeout, self._ready_timeout = token, connect_timeout, ready_timeout
        self._infer_timeout, self._retry_after, self._limits = infer_timeout, retry_after, limits
        self._lock = threading.Lock()
        self._connection: Any = None
        self._not_before = 0.0
        self._failure = PolicyClientError("not connected yet")  # of the last attempt

    def __enter__(self) -> Any:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> Any:
        """Connect now, if not connected, and read the metadata. Returns itself.

        Raises:
            ServerUnavailable, NotAuthorized, NotTrusted, ServerError: see the classes.
        """
        with self._lock:
            self._connected()
        return self

    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request (keys: docs/serve.md) and wait for its answer, which has `actions`, float32 (H, A).

        Raises:
            ServerUnavailable, NotAuthorized, NotTrusted, InferenceTimeout, ServerError: see the classes.
            ProtocolError (a ValueError): the request holds something that may not travel.
        """
        data = pack(request)
        with self._lock:
            connection = self._connected()
            # A hung server with full buffers would let a send wait for ever.
            timer = threading.Timer(self._infer_timeout, _hang_up, [connection])
            timer.daemon = True
            timer.start()
            try:
                connection.send(data)
                timer.cancel()
                reply = self._receive(connection, self._infer_timeout)
                self._check_answer(reply)
                return reply
            except BaseException as error:  # an answer may still come, and must not meet the next request
                self._drop()
                if isinstance(error, (ConnectionClosed, OSError)):
                    raise ServerUnavailable(f"lost the policy server at {self.address}: {error}") from error
                raise
            finally:
                timer.cancel()

    def close(self) -> None:
        """Close the connection; the client may be used again."""
        with self._lock:
            self._drop()

    # --- parts --------------------------------------------------------------------------------

    def _check_answer(self, reply: dict[str, Any]) -> None:
        if not isinstance(reply.get("actions"), np.ndarray) or reply["actions"].ndim != 2:
            raise ServerError(f"answer without actions (H, A): it has {short(list(reply))}")

    def _connected(self) -> Any:
        if self._connection is not None and getattr(self._connection, "close_code", None) is None:
            return self._connection
        self._drop()
        if time.monotonic() < self._not_before:
            raise type(self._failure)(str(self._failure))
        self._not_before = time.monotonic() + self._retry_after
        try:
            self._connection = self._connect_anew()
        except PolicyClientError as error:
            self._failure = error
            raise
        self._not_before = 0.0
        return self._connection

    def _connect_anew(self) -> Any:
        options: dict[str, Any] = {"close_timeout": 0.2, "max_size": self._limits.max_message_bytes}
        options["compression"] = None
        if self._token is not None:
            options["additional_headers"] = {"Authorization": f"Bearer {self._token}"}
        known = inspect.signature(connect).parameters  # older websockets lack these; newer would ask for a proxy
        options.update({name: value for name, value in (("proxy", None), ("max_queue", 2)) if name in known})
        try:
            connection = open_connection(self.address, self._tls, self._connect_timeout, **options)
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            raise self._refusal(error) from error
        try:
            self.metadata = self._receive(connection, self._ready_timeout)
        except InferenceTimeout as error:
            connection.close()
            late = f"its policy was not ready in {self._ready_timeout:g} s"
            raise ServerUnavailable(f"{self.address} is there, but {late}") from error
        except (ConnectionClosed, PolicyClientError) as error:
            connection.close()
            raise ServerUnavailable(f"{self.address} closed the connection: {error}") from error
        spoken = self.metadata.get("protocol", PROTOCOL)  # openpi's servers tell none
        if spoken != PROTOCOL:
            connection.close()
            told = f"{self.address} speaks protocol {short(spoken)}, this client {PROTOCOL}"
            raise ServerError(f"{told}; update the older")
        return connection

    def _refusal(self, error: Exception) -> PolicyClientError:
        """Return what a connection that failed with `error` is told as."""
        if isinstance(error, InvalidStatus):
            status = error.response.status_code
            text = (getattr(error.response, "body", None) or b"").decode("utf-8", "replace").strip()
            kind = NotAuthorized if status in (401, 403) else ServerUnavailable
            return kind(f"{self.address} refused the connection ({status}): {text}")
        if isinstance(error, ssl.SSLCertVerificationError):
            return NotTrusted(f"{self.address} is not trusted: {error.verify_message}")
        hint = ". Is `vla-rl serve` running there, on that port?" if isinstance(error, ConnectionRefusedError) else ""
        if isinstance(error, ssl.SSLError):
            hint = f". Does it encrypt? Without --certificate it is ws{self.address[len('wss') :]}"
        return ServerUnavailable(f"no policy server at {self.address}: {error or type(error).__name__}{hint}")

    def _receive(self, connection: Any, timeout: float) -> dict[str, Any]:
        """Return the next message."""
        try:
            data = connection.recv(timeout=timeout)
        except TimeoutError:
            raise InferenceTimeout(f"{self.address} did not answer in {timeout:g} s") from None
        if isinstance(data, str):
            raise ServerError(f"the policy server says: {data[:4096]}")
        try:
            return unpack(data, self._limits)
        except ProtocolError as error:
            raise ServerError(f"unreadable answer: {error}") from error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class PolicyClient(PolicyConnection):
    """Asks a policy server for actions; see `PolicyConnection`."""

    def act(self, images: dict[str, np.ndarray], state: np.ndarray, instruction: str) -> np.ndarray:
        """Return a chunk of actions, float32 (H, A), in the units that the policy was trained in.

        Args:
            images: camera -> RGB, uint8 (height, width, 3). state: float32 (S,).

        Raises:
            PolicyClientError: see its subclasses; hold the robot.
        """
        state = np.asarray(state, np.float32)
        return self.infer({"images": images, "state": state, "instruction": instruction})["actions"]

    def _check_answer(self, reply: dict[str, Any]) -> None:
        super()._check_answer(reply)
        if not np.isfinite(reply["actions"]).all():
            raise ServerError("an answer without finite actions (H, A)")


def open_connection(address: str, tls: ssl.SSLContext | None, timeout: float, **options: Any) -> Any:
    """Connect to ws://... or wss://... (`tls`) within `timeout` seconds; `options` are those of websockets' connect.

    Raises:
        OSError (ssl.SSLError among them), TimeoutError, websockets' InvalidHandshake: no connection.
    """
    if tls is None:
        return connect(address, open_timeout=timeout, **options)
    deadline = time.monotonic() + timeout
    where = urlsplit(address)
    plain = socket.create_connection((where.hostname, where.port or 443), timeout)
    encrypted = TlsSocket(plain, tls, str(where.hostname))
    encrypted.settimeout(None)
    left = max(deadline - time.monotonic(), 0.01)
    return connect("ws" + address[len("wss") :], sock=encrypted, open_timeout=left, **options)


class TlsSocket(socket.socket):
    """A connected socket with TLS that one thread may read while others write, as those of websockets do.

    OpenSSL allows one call at a time for a connection, and `ssl.SSLSocket` does not see to it: what is sent while a
    session ticket is being read may never arrive. Here each call waits for its turn; waiting for the network has none.

    Args:
        plain: connected; taken over. Its time-out holds for each step of the handshake.
        server_hostname: the name that the server's certificate must have.

    Raises:
        OSError: no handshake; ssl.SSLCertVerificationError: the certificate is refused.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, server_hostname: str) -> None:
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self._arrived, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._turn = threading.Lock()  # of calls into OpenSSL
        self._sending = threading.Lock()  # from encryption to the network, so that records keep their order
        try:
            self.settimeout(timeout)
            self._tls = context.wrap_bio(self._arrived, self._to_send, server_hostname=server_hostname)
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Return all that has been decrypted, which may be more than `bufsize`; nothing at the end."""
        while True:
            data = self._decrypted(bufsize)
            if data is not None:
                return data
            self._take(super().recv(65536, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Encrypt and send it all."""
        view, done = memoryview(data).cast("B"), 0
        with self._sending:
            with self._turn:
                while done < len(view):
                    done += self._tls.write(view[done:])
                encrypted = self._to_send.read()
            super().sendall(encrypted, flags)

    def close(self) -> None:
        """Close it; a thread that waits in `recv`, perhaps for the rest of a record, goes on with nothing."""
        with suppress(OSError):  # not connected any more
            self.shutdown(socket.SHUT_RDWR)
        super().close()

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:  # also the alert that tells the server why not
                self._send_rest()
            self._take(super().recv(65536))

    def _decrypted(self, size: int) -> bytes | None:
        """What has arrived; None where more must come first."""
        parts, ended = [], False
        with self._turn:
            try:
                while not ended:
                    parts.append(self._tls.read(size))
                    ended = not parts[-1]
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                ended = True
            must_answer = not ended and self._to_send.pending > 0  # a change of keys
        if must_answer:
            self._send_rest()
        return b"".join(parts) if parts or ended else None

    def _take(self, encrypted: bytes) -> None:
        with self._turn:
            if encrypted:
                self._arrived.write(encrypted)
            else:
                self._arrived.write_eof()

    def _send_rest(self) -> None:
        with self._sending:
            with self._turn:
                encrypted = self._to_send.read()
            super().sendall(encrypted)


def _url(address: str, encrypted: bool) -> str:
    scheme, separator, rest = address.rpartition("://")
    scheme = scheme if separator else "wss" if encrypted else "ws"
    if scheme not in ("ws", "wss") or not rest or (encrypted and scheme == "ws"):
        raise ValueError(f"address {address!r}: expected host, host:port, ws://... or wss://... (wss with a ca)")
    host, slash, path = rest.rstrip("/").partition("/")
    if not re.search(r":\d+$", host if not host.endswith("]") else ""):
        host = f"{host}:{DEFAULT_PORT}"
    return f"{scheme}://{host}{slash}{path}"


def _hang_up(connection: Any) -> None:
    with suppress(OSError):  # it is closed already
        connection.socket.shutdown(socket.SHUT_RDWR)
