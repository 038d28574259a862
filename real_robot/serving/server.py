"""The policy server, `vla-rl serve CHECKPOINT`: openpi's WebSocket protocol, several clients batched.

A connection gets the policy's metadata first, then one answer to each request, in order. `GET /healthz` says 200
when the policy is loaded and warm. An error is a text frame, then the connection is closed with code 1011.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import http
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from real_robot.client_package.vla_rl_client.wire import MiB, ProtocolError, WireLimits, pack, unpack
from real_robot.serving.connections import HANDSHAKE_SECONDS, PING_EVERY, PING_TIMEOUT, ConnectionSlots
from real_robot.serving.engine import Answer, InferenceEngine
from real_robot.serving.network import DEFAULT_PORT, HostNames, ListenHost, bracketed, is_loopback, server_context
from real_robot.serving.requests import POLICY_KEY, PREFIX, PolicyFacts, Request, RequestError, read_request
from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.next_command import next_command
from vla_rl.config import Config, ConfigError
from vla_rl.data.statistics import action_range
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.interfaces import ContinuingPolicy, Policy
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy

HEALTH_PATH = "/healthz"
CLOSE_ERROR = 1011  # openpi's close code after an error frame
log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # else each port scan leaves a traceback


class ServeConfig(Config):
    """Where and how to serve a policy."""

    host: ListenHost = Field(
        default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required."
    )
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    token: str | None = Field(default=None, repr=False, description="Bearer token that clients must send.")
    allow_host: tuple[str, ...] = Field(
        default=(), description="Further names by which /healthz may be asked, besides this machine's."
    )
    certificate: Path | None = Field(default=None, description="PEM file; with it connections are encrypted (wss).")
    key: Path | None = Field(default=None, description="PEM file of the certificate's key, where it is another file.")
    max_clients: int = Field(default=16, ge=1, description="Connections at a time.")
    max_batch: int = Field(default=8, ge=1, description="Most requests in one forward pass.")
    max_message_bytes: int = Field(default=16 * MiB, ge=1024, description="Largest request.")
    hang_after: float = Field(default=60.0, gt=0, description="Seconds of one forward pass after which healthz is 503.")
    temperature: float = Field(default=0.0, ge=0, description="Temperature at which actions are drawn; 0 is greedy.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    control_hz: float | None = Field(default=None, gt=0, description="Told to clients: steps a second of the policy.")
    action_names: tuple[str, ...] | None = Field(default=None, description="Told to clients: name of each dimension.")
    default_prompt: str | None = Field(default=None, description="Instruction of requests that hold none.")
    camera_keys: dict[str, str] = Field(
        default={}, description="Camera of the policy -> the request's key that holds its picture, such as images/top."
    )


class PolicyServer:
    """Serves one policy. `await start()` listens at once; clients get their metadata when the policy is warm.

    Args:
        load: makes the policy and its facts; runs in the inference thread.

    Raises:
        ConfigError: listening beyond loopback without a token, or a certificate that cannot be used.
    """

    def __init__(self, load: Callable[[], tuple[Policy, PolicyFacts]], config: ServeConfig) -> None:
        if config.token is None and not is_loopback(config.host):
            raise ConfigError(
                f"host: {config.host} can be reached from other machines, so a token is required: give --token-file, "
                "or keep to 127.0.0.1 and reach it through an SSH tunnel"
            )
        self._config = config
        self._tls = server_context(config.certificate, config.key)
        self._names = HostNames(config.host, config.allow_host)
        self._limits = WireLimits(max_message_bytes=config.max_message_bytes)
        self._engine = InferenceEngine(load, config.max_batch, config.temperature)
        self._slots = ConnectionSlots(config.max_clients)
        self._server: Server | None = None

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. The policy goes on loading."""
        config = self._config
        try:
            self._server = await serve(
                self._handle,
                config.host,
                config.port,
                ssl=self._tls,
                process_request=self._admit,
                create_connection=self._slots.connection_class(),
                open_timeout=HANDSHAKE_SECONDS,
                ping_interval=PING_EVERY,
                ping_timeout=PING_TIMEOUT,
                compression=None,
                max_size=config.max_message_bytes,
                max_queue=2,
                logger=_quiet,
                close_timeout=2,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                f"--port: {config.port} of {config.host} is in use; end what listens there, or choose another"
            ) from None

    @property
    def port(self) -> int:
        """The port listened on."""
        assert self._server is not None, "start() first"
        return next(iter(self._server.sockets)).getsockname()[1]

    @property
    def url(self) -> str:
        """The address to give to clients."""
        return f"{'wss' if self._tls else 'ws'}://{bracketed(self._config.host)}:{self.port}"

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

    def offer(self, policy: Policy, facts: PolicyFacts, idle: float) -> None:
        """Let another policy act once nothing was asked for a while; see `InferenceEngine.offer`."""
        self._engine.offer(policy, facts, idle)

    # --- connections --------------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """Answer /healthz; refuse web pages, strangers and too many clients; None lets the connection in.

        A web page's socket always says its `Origin`; what it may read of /healthz hangs on the name that it used.
        """
        self._slots.answered(connection)
        if request.path.partition("?")[0] == HEALTH_PATH:
            refusal = self._names.refusal(request.headers.get_all("Host"), connection.local_address)
            if refusal is not None:
                return connection.respond(http.HTTPStatus.FORBIDDEN, f"{refusal}\n")
            trouble = self._trouble()
            return connection.respond(
                http.HTTPStatus.SERVICE_UNAVAILABLE if trouble else http.HTTPStatus.OK, f"{trouble or 'OK'}\n"
            )
        if request.headers.get_all("Origin"):
            return connection.respond(http.HTTPStatus.FORBIDDEN, "web pages may not connect\n")
        if self._config.token is not None and not self._knows_token(request.headers.get_all("Authorization")):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN\n")
        if not self._slots.has_place():
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
        if not await self._slots.enter(connection):
            return
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
            self._slots.leave(connection)
            log.info("client %s gone", connection.remote_address)

    async def _converse(self, connection: ServerConnection, gone: asyncio.Future[None]) -> None:
        ready = asyncio.ensure_future(self.ready())
        await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            return
        ready.result()  # Raises what loading raised.
        facts = self._engine.facts
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await connection.send(pack(facts.metadata(self._limits)))
        except TimeoutError:
            connection.transport.abort()  # it does not read: a farewell would wait for it too
            return
        total: float | None = None
        async for message in connection:
            start = time.monotonic()
            self._slots.spoke(connection)
            if isinstance(message, str):
                raise ProtocolError("expected a binary msgpack message, got text")
            answer = await self._infer(read_request(unpack(message, self._limits), facts), gone)
            if answer is None:
                return
            await connection.send(pack(_reply(answer, total)))
            total = time.monotonic() - start

    async def _infer(self, request: Request, gone: asyncio.Future[None]) -> Answer | None:
        """The answer; None when the client has left, whose place in the queue is then free again."""
        future = asyncio.wrap_future(self._engine.submit(request))
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        future.cancel()
        return None


def _reply(answer: Answer, previous_total: float | None) -> dict[str, Any]:
    timing: dict[str, Any] = {
        "infer_ms": answer.infer_seconds * 1000,
        "queue_ms": answer.queue_seconds * 1000,
        "batch_size": answer.batch_size,
    }
    if previous_total is not None:
        timing["prev_total_ms"] = previous_total * 1000
    reply: dict[str, Any] = {
        "actions": answer.actions,
        POLICY_KEY: answer.policy.to_wire(),
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
    device = resolve_device(config.device)
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
    for camera, key in config.camera_keys.items():
        if camera not in policy.cameras:
            raise ConfigError(f"camera_keys: no camera {camera!r}; this policy has {', '.join(policy.cameras)}")
        if not key.startswith(("images/", PREFIX)):
            raise ConfigError(f"camera_keys: {camera}: expected a key images/NAME or {PREFIX}NAME, got {key!r}")
    bounds = action_range(policy.norm_stats)
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
        default_prompt=config.default_prompt,
        camera_keys=tuple(config.camera_keys.items()),
        action_range=None if bounds is None else (bounds[0].tolist(), bounds[1].tolist()),
    )


# --- the program ----------------------------------------------------------------------------


async def run(
    load: Callable[[], tuple[Policy, PolicyFacts]],
    config: ServeConfig,
    say: Callable[[str], None] = print,
    watch: Callable[[PolicyServer], None] = lambda server: None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises what loading the policy raised.

    Args:
        watch: called once the policy is ready, to have others take its place.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = PolicyServer(load, config)
    await server.start()
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        say(f"listening on {server.url}; loading the policy")
        ready = asyncio.ensure_future(server.ready())
        await asyncio.wait({ready, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            facts = ready.result()
            say(
                f"ready: {facts.checkpoint} ({facts.version}), cameras {', '.join(facts.cameras)}, "
                f"chunks of {facts.chunk_size} actions of {facts.action_dim} numbers"
            )
            words = [*(["--token-file", "FILE"] * bool(config.token)), *(["--ca", "CA.pem"] * bool(config.certificate))]
            words += ["--instruction", "...", "--dry-run"]
            say(next_command("deploy", "ROBOT.yaml", "--server", server.url, *words, what="in another terminal"))
            watch(server)
            await waiting
        else:
            ready.cancel()
    finally:
        waiting.cancel()
        await server.stop()


def main(checkpoint: str, config: ServeConfig, say: Callable[[str], None] = print) -> None:
    """`vla-rl serve`."""
    serve_until_stopped(lambda: load_for_serving(checkpoint, config), config, say)


def serve_until_stopped(
    load: Callable[[], tuple[Policy, PolicyFacts]],
    config: ServeConfig,
    say: Callable[[str], None],
    watch: Callable[[PolicyServer], None] = lambda server: None,
) -> None:
    """Serve in the foreground, with a log; see `run`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run(load, config, say, watch))
