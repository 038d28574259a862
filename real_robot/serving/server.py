"""The policy server, `vla-rl serve CHECKPOINT`: openpi's WebSocket protocol, several clients batched.

A connection gets the policy's metadata first, then one answer to each request, in order. `GET /healthz` says 200
when the policy is loaded and warm. An error is a text frame, then the connection is closed with code 1011.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from real_robot.serving.engine import Answer, InferenceEngine
from real_robot.serving.identity import POLICY_KEY
from real_robot.serving.protocol import (  # fmt: skip
    CLOSE_ERROR,
    DEFAULT_PORT,
    HEALTH_PATH,
    MiB,
    ProtocolError,
    WireLimits,
    is_loopback,
    pack,
    unpack,
)
from real_robot.serving.requests import PolicyFacts, Request, RequestError, read_request
from vla_rl.config import Config, ConfigError
from vla_rl.interfaces import ContinuingPolicy

if TYPE_CHECKING:
    from vla_rl.interfaces import Policy

log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # else each port scan leaves a traceback


class ServeConfig(Config):
    """Where and how to serve a policy."""

    host: str = Field(default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required.")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    token: str | None = Field(default=None, repr=False, description="Bearer token that clients must send.")
    max_clients: int = Field(default=16, ge=1, description="Connections at a time.")
    max_batch: int = Field(default=8, ge=1, description="Most requests in one forward pass.")
    max_message_bytes: int = Field(default=16 * MiB, ge=1024, description="Largest request.")
    hang_after: float = Field(default=60.0, gt=0, description="Seconds of one forward pass after which healthz is 503.")
    temperature: float = Field(default=0.0, ge=0, description="Temperature at which actions are drawn; 0 is greedy.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    control_hz: float | None = Field(default=None, gt=0, description="Told to clients: steps a second of the policy.")
    action_names: tuple[str, ...] | None = Field(default=None, description="Told to clients: name of each dimension.")


class PolicyServer:
    """Serves one policy. `await start()` listens at once; clients get their metadata when the policy is warm.

    Args:
        load: makes the policy and its facts; runs in the inference thread.

    Raises:
        ConfigError: listening beyond loopback without a token.
    """

    def __init__(self, load: Callable[[], tuple[Policy, PolicyFacts]], config: ServeConfig) -> None:
        if config.token is None and not is_loopback(config.host):
            raise ConfigError(
                f"host: {config.host} can be reached from other machines, so a token is required: give --token-file, "
                "or keep to 127.0.0.1 and reach it through an SSH tunnel"
            )
        self._config = config
        self._limits = WireLimits(max_message_bytes=config.max_message_bytes)
        self._engine = InferenceEngine(load, config.max_batch, config.temperature)
        self._clients: set[ServerConnection] = set()
        self._server: Server | None = None

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. The policy goes on loading."""
        config = self._config
        self._server = await serve(
            self._handle,
            config.host,
            config.port,
            process_request=self._admit,
            compression=None,
            max_size=config.max_message_bytes,
            max_queue=2,
            logger=_quiet,
            close_timeout=2,
        )

    @property
    def port(self) -> int:
        """The port listened on."""
        assert self._server is not None, "start() first"
        return next(iter(self._server.sockets)).getsockname()[1]

    async def ready(self) -> PolicyFacts:
        """Wait until the policy is loaded and warm. Raises what loading raised."""
        return await asyncio.shield(asyncio.wrap_future(self._engine.ready))

    async def stop(self) -> None:
        """Close all connections (code 1001) and cancel what waits."""
        self._engine.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._engine.num_waiting()

    # --- connections --------------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """Answer /healthz; refuse web pages, strangers and too many clients; None lets the connection in."""
        if request.path.partition("?")[0] == HEALTH_PATH:
            trouble = self._trouble()
            return connection.respond(
                http.HTTPStatus.SERVICE_UNAVAILABLE if trouble else http.HTTPStatus.OK, f"{trouble or 'OK'}\n"
            )
        if request.headers.get_all("Origin"):
            return connection.respond(http.HTTPStatus.FORBIDDEN, "web pages may not connect\n")
        if self._config.token is not None and not self._knows_token(request.headers.get_all("Authorization")):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN\n")
        if len(self._clients) >= self._config.max_clients:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    def _trouble(self) -> str | None:
        """Why the server cannot answer now; None when it can."""
        if not self._engine.ready.done():
            return "the policy is loading"
        busy = self._engine.busy_seconds()
        return f"inference has not returned for {busy:.0f} s" if busy > self._config.hang_after else None

    def _knows_token(self, values: list[str]) -> bool:
        """`Bearer` is the standard's word, `Api-Key` that of openpi's client."""
        assert self._config.token is not None, "checked by the caller"
        scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._config.token.encode())
        return same and scheme.lower() in ("bearer", "api-key")

    async def _handle(self, connection: ServerConnection) -> None:
        if len(self._clients) >= self._config.max_clients:
            await connection.close(1013, "too many clients")
            return
        self._clients.add(connection)
        log.info("client %s connected", connection.remote_address)
        gone = asyncio.ensure_future(connection.wait_closed())
        try:
            await self._converse(connection, gone)
        except ConnectionClosed:
            pass
        except (ProtocolError, RequestError) as error:
            await _refuse(connection, str(error))
        except Exception as error:  # the connection's edge: one client's failure must not end the others
            log.warning("client %s: %s: %s", connection.remote_address, type(error).__name__, error)
            await _refuse(connection, f"inference failed: {type(error).__name__}: {error}")
        finally:
            gone.cancel()
            self._clients.discard(connection)
            log.info("client %s gone", connection.remote_address)

    async def _converse(self, connection: ServerConnection, gone: asyncio.Future[None]) -> None:
        ready = asyncio.ensure_future(self.ready())
        await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            return
        facts = ready.result()
        await connection.send(pack(facts.metadata(self._limits)))
        total: float | None = None
        async for message in connection:
            start = time.monotonic()
            if isinstance(message, str):
                raise ProtocolError("expected a binary msgpack message, got text")
            answer = await self._infer(read_request(unpack(message, self._limits), facts), gone)
            if answer is None:
                return
            await connection.send(pack(_reply(answer, facts, total)))
            total = time.monotonic() - start

    async def _infer(self, request: Request, gone: asyncio.Future[None]) -> Answer | None:
        """The answer; None when the client has left, whose place in the queue is then free again."""
        future = asyncio.wrap_future(self._engine.submit(request))
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        future.cancel()
        return None


def _reply(answer: Answer, facts: PolicyFacts, previous_total: float | None) -> dict[str, Any]:
    timing: dict[str, Any] = {
        "infer_ms": answer.infer_seconds * 1000,
        "queue_ms": answer.queue_seconds * 1000,
        "batch_size": answer.batch_size,
    }
    if previous_total is not None:
        timing["prev_total_ms"] = previous_total * 1000
    reply: dict[str, Any] = {
        "actions": answer.actions,
        POLICY_KEY: facts.identity.to_wire(),
        "server_timing": timing,
    }
    if answer.embedding is not None:
        reply["embedding"] = answer.embedding
    return reply


async def _refuse(connection: ServerConnection, text: str) -> None:
    """openpi's way to report an error: a text frame, then close with 1011."""
    try:
        await connection.send(text)
        await connection.close(CLOSE_ERROR, "error; see the text frame before")
    except ConnectionClosed:
        pass


# --- loading a policy -----------------------------------------------------------------------


def load_for_serving(checkpoint: str, config: ServeConfig) -> tuple[Policy, PolicyFacts]:
    """The policy of a checkpoint folder or 'pretrained:NAME', and what clients must know of it.

    Raises:
        ConfigError: no such checkpoint, or action_names of another length than its actions.
        ValueError: a file of it is missing or damaged.
    """
    import torch

    from vla_rl.evaluation.evaluate import policy_hash
    from vla_rl.policies.base import resolve_path
    from vla_rl.policies.load import load_policy

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = resolve_path(checkpoint)
    policy = load_policy(checkpoint, device)
    policy.eval()
    return policy, policy_facts(policy, checkpoint, folder.name, policy_hash(folder), config)


def policy_facts(policy: Policy, checkpoint: str, name: str, policy_hash: str, config: ServeConfig) -> PolicyFacts:
    """Return what clients must know of a policy. Whether it can embed, the server finds out when it warms it up.

    The version is "NAME HASH", as `vla-rl collect` records it, so that detectors are fitted on recordings of it.
    """
    if config.action_names is not None and len(config.action_names) != policy.action_dim:
        raise ConfigError(
            f"action_names: got {len(config.action_names)} names, the policy's actions have {policy.action_dim} numbers"
        )
    return PolicyFacts(
        checkpoint=checkpoint,
        version=f"{name} {policy_hash[:12]}",
        cameras=policy.cameras,
        image_size=policy.image_size,
        state_dim=policy.state_dim,
        uses_state=policy.uses_state,
        chunk_size=policy.chunk_size,
        action_dim=policy.action_dim,
        action_names=config.action_names,
        control_hz=config.control_hz,
        can_continue=isinstance(policy, ContinuingPolicy) and config.temperature == 0,
        policy_hash=policy_hash,
    )


# --- the program ----------------------------------------------------------------------------


async def run(
    load: Callable[[], tuple[Policy, PolicyFacts]], config: ServeConfig, say: Callable[[str], None] = print
) -> None:
    """Serve until SIGINT or SIGTERM. Raises what loading the policy raised."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = PolicyServer(load, config)
    await server.start()
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        say(f"listening on ws://{config.host}:{server.port}; loading the policy")
        ready = asyncio.ensure_future(server.ready())
        await asyncio.wait({ready, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            facts = ready.result()
            say(
                f"ready: {facts.checkpoint} ({facts.version}), cameras {', '.join(facts.cameras)}, "
                f"chunks of {facts.chunk_size} actions of {facts.action_dim} numbers"
            )
            await waiting
        else:
            ready.cancel()
    finally:
        waiting.cancel()
        await server.stop()


def main(checkpoint: str, config: ServeConfig, say: Callable[[str], None] = print) -> None:
    """`vla-rl serve`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run(lambda: load_for_serving(checkpoint, config), config, say))
