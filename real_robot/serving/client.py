"""The policy client beside the robot: observations to the server, with who made each answer, and whether it lives.

`generation` counts connections: what was computed over an earlier one is to be dropped.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection

from real_robot.client_package.vla_rl_client import NotAuthorized, NotTrusted, PolicyClientError, PolicyConnection
from real_robot.client_package.vla_rl_client.wire import DEFAULT_LIMITS, WireLimits
from real_robot.serving.network import client_context, server_url, why_not_trusted
from real_robot.serving.requests import POLICY_KEY, UNKNOWN, PolicyIdentity, read_identity
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


class PolicyClient(PolicyConnection):
    """See `PolicyConnection`. Its `infer` takes the keys of real_robot/serving/requests.py.

    An answer also has `policy` (a `PolicyIdentity`), `server_timing`, and `embedding` (D,) where asked for.

    Args:
        ca: PEM file of the authorities that are trusted, alone. None: the system's.
        warm_up: seconds that the very first answer may take, where that is more than `infer_timeout`.

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
        warm_up: float = 0.0,
    ) -> None:
        url = server_url(address, encrypted=ca is not None)
        is_encrypted = url.startswith("wss:")
        if ca is not None and not is_encrypted:
            raise ConfigError(f"--ca {ca}: {url} is not encrypted; write wss://, or leave out ws://")
        tls = client_context(ca) if is_encrypted else None
        first = max(warm_up, infer_timeout)
        super().__init__(url, token, tls, connect_timeout, ready_timeout, first, retry_after, limits)
        self._usual_timeout = infer_timeout
        self.generation = 0
        self._heartbeat: Heartbeat | None = None
        self._identity = UNKNOWN

    @property
    def identity(self) -> PolicyIdentity:
        """The policy of the last answer; before the first of a connection, the one that its metadata name."""
        return self._identity

    @property
    def silence(self) -> float:
        """Seconds since the server's last sign of life, also while it computes; infinite where it is not connected."""
        heartbeat = self._heartbeat
        return math.inf if heartbeat is None else heartbeat.silence

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

    def _check_answer(self, reply: dict[str, Any]) -> None:
        super()._check_answer(reply)
        self._infer_timeout = self._usual_timeout
        self._identity = reply[POLICY_KEY] = read_identity(reply, self.metadata)

    def _connect_anew(self) -> ClientConnection:
        connection = super()._connect_anew()
        self._heartbeat = Heartbeat(connection)
        self._identity = read_identity({}, self.metadata)
        self.generation += 1
        return connection

    def _drop(self) -> None:
        super()._drop()
        self._heartbeat = None

    def _refusal(self, error: Exception) -> PolicyClientError:
        told = super()._refusal(error)
        if isinstance(error, InvalidStatus) and error.response.status_code == 401:
            mine = "the token given is not the server's" if self._token else "the server wants a token"
            return NotAuthorized(
                f"{self.address} refused the connection (401): {mine}. Give --token-file a copy of the file that "
                "`vla-rl serve --token-file` was started with"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return NotTrusted(f"{self.address} is not trusted: {why_not_trusted(error)}")
        if isinstance(error, InvalidMessage) and self._tls is None:
            other = f"wss{self.address.removeprefix('ws')}"
            return type(told)(f"{told}. If it was given a --certificate, it is {other}, with --ca")
        return told
