"""The policy client that runs beside the robot: numpy, msgpack and websockets, no torch.

Every wait has a time-out. A request that is not answered in time costs the connection, so that its late answer can
never be taken for that of the next; the next request connects anew. `generation` counts connections: what was
computed over an earlier one is to be dropped.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection

from real_robot.client_package.vla_rl_client import open_connection
from real_robot.serving.network import client_context, server_url, why_not_trusted
from real_robot.serving.protocol import (
    DEFAULT_LIMITS,
    POLICY_KEY,
    PROTOCOL,
    UNKNOWN,
    PolicyIdentity,
    ProtocolError,
    WireLimits,
    pack,
    read_identity,
    short,
    unpack,
)
from real_robot.types import RobotObservation
from vla_rl.config import ConfigError

PING_EVERY = 0.1  # seconds from an answer to the next ping


class Heartbeat:
    """Pings one connection in a thread of its own, which ends with the connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._heard = time.monotonic()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

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
            time.sleep(PING_EVERY)


class PolicyClientError(RuntimeError):
    """Base of what a client can meet: catch it to hold the robot."""


class ServerUnavailable(PolicyClientError):
    """No server there, the connection was lost, or it is not ready yet. The next request tries again."""


class NotAuthorised(PolicyClientError):
    """The server wants a token, or another one."""


class NotTrusted(PolicyClientError):
    """The server cannot show that it is the one meant: its certificate is expired, another's or a stranger's."""


class InferenceTimeout(PolicyClientError):
    """The server did not answer in time."""


class ServerError(PolicyClientError):
    """The server answered with an error; the text is its own."""


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
        retry_after: seconds after a failed connection in which further requests fail at once.

    Raises:
        AddressError: an address that cannot be read. ConfigError: no authorities in `ca`, or a ws:// address.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        connect_timeout: float = 2.0,
        ready_timeout: float = 10.0,
        infer_timeout: float = 2.0,
        retry_after: float = 0.5,
        limits: WireLimits = DEFAULT_LIMITS,
        ca: Path | None = None,
    ) -> None:
        self.address = server_url(address, encrypted=ca is not None)
        is_encrypted = self.address.startswith("wss:")
        if ca is not None and not is_encrypted:
            raise ConfigError(f"--ca {ca}: {self.address} is not encrypted; write wss://, or leave out ws://")
        self._tls = client_context(ca) if is_encrypted else None
        self.generation = 0
        self._token = token
        self._connect_timeout, self._ready_timeout = connect_timeout, ready_timeout
        self._infer_timeout, self._retry_after = infer_timeout, retry_after
        self._limits = limits
        self._lock = threading.Lock()
        self._connection: ClientConnection | None = None
        self._heartbeat: Heartbeat | None = None
        self._metadata: dict[str, Any] = {}
        self._identity = UNKNOWN
        self._not_before = 0.0
        self._failure = PolicyClientError("not connected yet")  # of the last attempt

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server told of its policy at the last connection; empty before the first."""
        return self._metadata

    @property
    def identity(self) -> PolicyIdentity:
        """The policy of the last answer; before the first of a connection, the one that its metadata name."""
        return self._identity

    @property
    def silence(self) -> float:
        """Seconds since the server's last sign of life, also while it computes; infinite where it is not connected."""
        heartbeat = self._heartbeat
        return math.inf if heartbeat is None else heartbeat.silence

    def connect(self) -> Self:
        """Connect now, if not connected, and read the metadata.

        Raises:
            ServerUnavailable, NotAuthorised, NotTrusted, ServerError: see the classes.
        """
        with self._lock:
            self._connected()
        return self

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Send one request (keys: real_robot/serving/requests.py) and wait for its answer.

        Returns:
            `actions` float32 (H, A), `policy` (a `PolicyIdentity`: who made them), `server_timing`, and `embedding`
            (D,) where asked for.

        Raises:
            ServerUnavailable, NotAuthorised, NotTrusted, InferenceTimeout, ServerError: see the classes.
            ProtocolError: the request cannot be packed.
        """
        data = pack(observation)
        with self._lock:
            connection = self._connected()
            try:
                with _given_up_after(connection, self._infer_timeout):
                    connection.send(data)
                reply = self._receive(connection, self._infer_timeout)
                if not isinstance(reply.get("actions"), np.ndarray) or reply["actions"].ndim != 2:
                    raise ServerError(f"answer without actions (H, A): it has {short(list(reply))}")
            except BaseException as error:  # an answer may still come, and must not meet the next request
                self._drop()
                if isinstance(error, ConnectionClosed | OSError):
                    raise ServerUnavailable(f"lost the policy server at {self.address}: {error}") from error
                raise
            self._identity = reply[POLICY_KEY] = read_identity(reply, self._metadata)
            return reply

    def act(
        self,
        observation: RobotObservation,
        prefix: np.ndarray | None = None,
        num_frozen: int = 0,
        embedding: bool = False,
        guidance: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`infer` for a robot's observation.

        Args:
            prefix: float32 (P, A), the actions under way, for real-time chunking. num_frozen: see `ActionPrefix`.
            embedding: ask for the policy's features too.
            guidance: options of `ActionPrefix` by name.
        """
        request: dict[str, Any] = {
            "images": observation.images,
            "state": observation.state,
            "instruction": observation.instruction,
        }
        if prefix is not None:
            request |= {"prefix": np.asarray(prefix, np.float32), "num_frozen": int(num_frozen), **(guidance or {})}
        if embedding:
            request["embedding"] = True
        return self.infer(request)

    def actions(
        self,
        observation: RobotObservation,
        prefix: np.ndarray | None = None,
        num_frozen: int = 0,
        guidance: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """The chunk float32 (H, A) of `act`: what `execution.ChunkExecutor` calls."""
        return self.act(observation, prefix, num_frozen, guidance=guidance)["actions"]

    def close(self) -> None:
        """Close the connection; the client may be used again."""
        with self._lock:
            self._drop()

    # --- parts --------------------------------------------------------------------------------

    def _connected(self) -> ClientConnection:
        if self._connection is not None and self._connection.close_code is None:
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

    def _connect_anew(self) -> ClientConnection:
        headers = None if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            connection = open_connection(
                self.address,
                self._tls,
                self._connect_timeout,
                additional_headers=headers,
                close_timeout=0.2,
                max_size=self._limits.max_message_bytes,
                max_queue=2,
                compression=None,
                proxy=None,
            )
        except InvalidStatus as error:
            status, body = error.response.status_code, error.response.body or b""
            text = body.decode("utf-8", "replace").strip()
            if status == 401:
                mine = "the token given is not the server's" if self._token else "the server wants a token"
                raise NotAuthorised(
                    f"{self.address} refused the connection ({status}): {mine}. Give --token-file a copy of the file "
                    "that `vla-rl serve --token-file` was started with"
                ) from error
            if status == 403:
                raise NotAuthorised(f"{self.address} refused the connection ({status}): {text}") from error
            raise ServerUnavailable(f"{self.address} refused the connection ({status}): {text}") from error
        except ssl.SSLCertVerificationError as error:
            raise NotTrusted(f"{self.address} is not trusted: {why_not_trusted(error)}") from error
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            raise ServerUnavailable(
                f"no policy server at {self.address}: {error or type(error).__name__}{self._hint(error)}"
            ) from error
        try:
            metadata = self._receive(connection, self._ready_timeout)
        except InferenceTimeout as error:
            connection.close()
            raise ServerUnavailable(
                f"{self.address} is there, but its policy was not ready in {self._ready_timeout:g} s"
            ) from error
        except (ConnectionClosed, PolicyClientError) as error:
            connection.close()
            raise ServerUnavailable(f"{self.address} closed the connection: {error}") from error
        if (spoken := metadata.get("protocol", PROTOCOL)) != PROTOCOL:  # openpi's servers tell none
            connection.close()
            raise ServerError(
                f"{self.address} speaks protocol {short(spoken)}, this client {PROTOCOL}; update the older"
            )
        self._heartbeat = Heartbeat(connection)
        self._metadata = metadata
        self._identity = read_identity({}, metadata)
        self.generation += 1
        return connection

    def _hint(self, error: Exception) -> str:
        """What to try where nothing listens, or where one side encrypts and the other does not."""
        if isinstance(error, ConnectionRefusedError):
            return ". Is `vla-rl serve` running there, on that port?"
        if isinstance(error, ssl.SSLError):
            return f". Does it encrypt? Without --certificate it is ws{self.address.removeprefix('wss')}"
        if isinstance(error, InvalidMessage) and self._tls is None:
            return f". If it was given a --certificate, it is wss{self.address.removeprefix('ws')}, with --ca"
        return ""

    def _receive(self, connection: ClientConnection, timeout: float) -> dict[str, Any]:
        """The next message."""
        try:
            data = connection.recv(timeout=timeout)
        except TimeoutError:
            raise InferenceTimeout(f"{self.address} did not answer in {timeout:g} s") from None
        if isinstance(data, str):
            raise ServerError(f"the policy server says: {data}")
        try:
            return unpack(data, self._limits)
        except ProtocolError as error:
            raise ServerError(f"unreadable answer: {error}") from error

    def _drop(self) -> None:
        connection, self._connection, self._heartbeat = self._connection, None, None
        if connection is not None:
            connection.close()


@contextmanager
def _given_up_after(connection: ClientConnection, seconds: float) -> Iterator[None]:
    """Let a send fail with OSError after this long: else one to a hung server with full buffers waits for ever."""
    timer = threading.Timer(seconds, _hang_up, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(connection: ClientConnection) -> None:
    with suppress(OSError):  # it is closed already
        connection.socket.shutdown(socket.SHUT_RDWR)
