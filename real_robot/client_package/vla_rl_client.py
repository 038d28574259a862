"""Ask a vla-rl policy server for actions: numpy, msgpack and websockets, Python 3.8 or newer.

    with PolicyClient("gpu-box:8000", token=token, ca="cert.pem") as client:
        actions = client.act({"wrist": image}, state, "pick up the cup")  # float32 (H, A)

The wire format is that of real_robot/serving/protocol.py, which is openpi's: msgpack, arrays as maps of bytes. Only
numbers travel; a message is bounded. This file imports nothing else of vla-rl.
"""

import inspect
import math
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any, Dict, Optional
from urllib.parse import urlsplit

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

__all__ = ["InferenceTimeout", "NotAuthorised", "PolicyClient", "PolicyClientError", "ServerError", "ServerUnavailable"]
__version__ = "0.1.0"

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_ITEMS = 1024
DEFAULT_PORT = 8000
_DTYPE = re.compile(r"^(?:[<>=|]?(?:[iu][1248]|f[248])|[|]?b1|\?)$")


class PolicyClientError(RuntimeError):
    """Base of what a client can meet: catch it to hold the robot."""


class ServerUnavailable(PolicyClientError):
    """No server there, the connection was lost, or it is not ready yet. The next request tries again."""


class NotAuthorised(PolicyClientError):
    """The server wants a token, or another one."""


class InferenceTimeout(PolicyClientError):
    """The server did not answer in time."""


class ServerError(PolicyClientError):
    """The server answered with an error, or with what is no answer; the text says which."""


class PolicyClient:
    """One connection to a policy server. Calls are made one at a time; a second thread waits for its turn.

    Args:
        address: host, host:port, [IPv6]:port, or one of them after ws:// or wss:// (encrypted).
        token: bearer token.
        ca: PEM file of the authorities that are trusted, alone; with it an address without scheme is wss. None: the
            system's.
        connect_timeout: seconds for the connection and its handshake.
        ready_timeout: seconds to wait for the metadata, which come when the policy is loaded and warm.
        infer_timeout: seconds from a request to its answer.
    """

    def __init__(
        self,
        address: str,
        token: Optional[str] = None,
        ca: Optional[str] = None,
        connect_timeout: float = 2.0,
        ready_timeout: float = 10.0,
        infer_timeout: float = 2.0,
    ) -> None:
        self.address = _url(address, ca is not None)
        self.metadata: Dict[str, Any] = {}
        self._token, self._connect_timeout = token, connect_timeout
        self._ready_timeout, self._infer_timeout = ready_timeout, infer_timeout
        self._tls = ssl.create_default_context(cafile=ca) if self.address.startswith("wss:") else None
        self._lock = threading.Lock()
        self._connection: Any = None

    def __enter__(self) -> "PolicyClient":
        with self._lock:
            self._connected()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def act(self, images: Dict[str, np.ndarray], state: np.ndarray, instruction: str) -> np.ndarray:
        """Return a chunk of actions, float32 (H, A), in the units that the policy was trained in.

        Args:
            images: camera -> RGB, uint8 (height, width, 3). state: float32 (S,).

        Raises:
            PolicyClientError: see its subclasses; hold the robot.
        """
        state = np.asarray(state, np.float32)
        return self.infer({"images": images, "state": state, "instruction": instruction})["actions"]

    def infer(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Send one request (keys: docs/serve.md) and wait for its answer, which has `actions`, float32 (H, A).

        Raises:
            PolicyClientError: see its subclasses.
            ValueError, TypeError: the request holds something that may not travel.
        """
        data = msgpack.packb(request, default=_pack_array)
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
                actions = reply.get("actions")
                if not isinstance(actions, np.ndarray) or actions.ndim != 2 or not np.isfinite(actions).all():
                    raise ServerError("an answer without finite actions (H, A)")
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

    def _connected(self) -> Any:
        if self._connection is not None:
            return self._connection
        options: Dict[str, Any] = {"close_timeout": 0.2, "max_size": MAX_MESSAGE_BYTES, "compression": None}
        if self._token is not None:
            options["additional_headers"] = {"Authorization": f"Bearer {self._token}"}
        if "proxy" in inspect.signature(connect).parameters:  # websockets 15 and newer would ask the environment
            options["proxy"] = None
        try:
            connection = open_connection(self.address, self._tls, self._connect_timeout, **options)
        except InvalidStatus as error:
            status = error.response.status_code
            text = (getattr(error.response, "body", None) or b"").decode("utf-8", "replace").strip()
            kind = NotAuthorised if status in (401, 403) else ServerUnavailable
            raise kind(f"{self.address} refused the connection ({status}): {text}") from error
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            raise ServerUnavailable(
                f"no policy server at {self.address}: {error or type(error).__name__}. Is `vla-rl serve` running there?"
            ) from error
        try:
            self.metadata = self._receive(connection, self._ready_timeout)
        except (ConnectionClosed, PolicyClientError) as error:
            connection.close()
            raise ServerUnavailable(f"{self.address}: the policy was not ready: {error}") from error
        if self.metadata.get("protocol", PROTOCOL) != PROTOCOL:  # openpi's servers tell none
            connection.close()
            told = f"{self.address} speaks protocol {self.metadata['protocol']!r:.40}, this client {PROTOCOL}"
            raise ServerError(f"{told}; update the older")
        self._connection = connection
        return connection

    def _receive(self, connection: Any, timeout: float) -> Dict[str, Any]:
        try:
            data = connection.recv(timeout=timeout)
        except TimeoutError:
            raise InferenceTimeout(f"{self.address} did not answer in {timeout:g} s") from None
        if isinstance(data, str):
            raise ServerError(f"the policy server says: {data[:4096]}")
        try:
            message = msgpack.unpackb(
                data, object_hook=_on_map, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0
            )
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ServerError(f"unreadable answer: {error}") from error
        if not isinstance(message, dict):
            raise ServerError(f"unreadable answer: a {type(message).__name__} in place of a map")
        return message

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def open_connection(address: str, tls: Optional[ssl.SSLContext], timeout: float, **options: Any) -> Any:
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

    def _decrypted(self, size: int) -> Optional[bytes]:
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


def _pack_array(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and not _DTYPE.match(value.dtype.str):
        raise TypeError(f"an array of {value.dtype}: allowed are booleans, integers and floats")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} is neither a number, a string, a list, a map nor a numeric array")


def _on_map(value: Dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        dtype, shape, data = (value.get(key) for key in (b"dtype", b"shape", b"data"))
        if not isinstance(dtype, str) or not _DTYPE.match(dtype) or not isinstance(data, bytes):
            raise ValueError("an array of something else than numbers")
        if not isinstance(shape, list) or len(shape) > 5 or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"an array of shape {shape!r}")
        if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"an array of shape {shape} with {len(data)} bytes")
        return np.frombuffer(data, dtype).reshape(shape)
    if b"__npgeneric__" in value:
        dtype = value.get(b"dtype")
        if not isinstance(dtype, str) or not _DTYPE.match(dtype):
            raise ValueError("a number of another kind")
        return np.dtype(dtype).type(value.get(b"data"))
    return value
