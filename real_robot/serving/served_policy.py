"""A policy that one can only query: behind any server of openpi's WebSocket protocol, its weights unknown.

    policy.kind=real_robot.serving.served_policy:ServedPolicyConfig policy.address=gpu-box:8000

It draws by the server's own randomness: temperature and generator of `act` mean nothing there. What it sees is embedded
here, by an encoder of its own, so that a critic can choose among its chunks (`run: online`).
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from real_robot.client_package.vla_rl_client import NotAuthorized, NotTrusted, PolicyClient, PolicyClientError
from real_robot.client_package.vla_rl_client import ServerError as ServerSaid
from real_robot.serving.network import AddressError, client_context, read_token, server_url
from real_robot.serving.requests import PREFIX, UNKNOWN, PolicyIdentity, camera_keys, read_identity
from vla_rl.config import ConfigError, validate
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.policies.base import CONFIG_FILE, PolicyConfig, check_cameras, check_sizes, read_policy_config, resolve_path
from vla_rl.policies.checkpoint_files import write_folder
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk, EnvSpec, Observation

KIND = "real_robot.serving.served_policy:ServedPolicyConfig"
ENCODER_FOLDER = "encoder"
NUM_WORDS = 32  # Places that an instruction's hash may have.
ALIKE = 32  # Observations at which all chunks drawn were the same, before the server is taken for greedy.
CONNECT_SECONDS = 10.0
NO_RL_REASON = (
    "its weights lie behind a server. `run: online` (and hil) has a critic choose among its chunks; to clone or to "
    "train, one needs its checkpoint"
)


class Link:
    """Connections to one policy server, on which as many requests wait at the same time.

    Args:
        address: as a person writes it. token_file: with the server's token. ca: PEM file of the authorities trusted.
        connections: how many. timeout: seconds that an answer may take.

    Raises:
        ConfigError: an address or a file that cannot be read.
    """

    def __init__(
        self, address: str, token_file: Path | None, ca: Path | None, connections: int, timeout: float
    ) -> None:
        try:
            url = server_url(address, encrypted=ca is not None)
            token = read_token(token_file) if token_file else None
        except AddressError as error:
            raise ConfigError(f"policy.address: {error}") from None
        except ValueError as error:
            raise ConfigError(f"policy.token_file: {error}") from None
        if ca is not None and url.startswith("ws:"):
            raise ConfigError(f"policy.ca: got {ca}, but {url} is not encrypted; write wss://, or leave out ws://")
        tls = client_context(ca) if url.startswith("wss:") else None
        self._free: SimpleQueue[PolicyClient] = SimpleQueue()
        for _ in range(connections):
            self._free.put(PolicyClient(url, token, tls, CONNECT_SECONDS, timeout, timeout))
        self._threads = ThreadPoolExecutor(connections, "policy server")

    def ask(self, requests: Sequence[dict[str, Any]]) -> list[tuple[np.ndarray, PolicyIdentity]]:
        """The chunk that answers each request, float32 (H, A), finite, and whose it is.

        Raises:
            ConfigError: no answer.
        """
        try:
            return list(self._threads.map(self._ask, requests))
        except PolicyClientError as error:
            raise ConfigError(f"policy.{_field(error)}: {error}") from error

    def _ask(self, request: dict[str, Any]) -> tuple[np.ndarray, PolicyIdentity]:
        client = self._free.get()
        try:
            reply = client.infer(request)
            return np.asarray(reply["actions"], np.float32), read_identity(reply, client.metadata)
        finally:
            self._free.put(client)


def _field(error: PolicyClientError) -> str:
    """The option that an error is about."""
    if isinstance(error, ServerSaid):
        return "camera_keys or policy.state_keys"
    return "token_file" if isinstance(error, NotAuthorized) else "ca" if isinstance(error, NotTrusted) else "address"


def _who(identity: PolicyIdentity) -> str:
    return identity.hash or str(identity)


link_to = functools.cache(Link)  # Policies of one server share its connections, of which it has few.


class ServedPolicy(nn.Module, Policy):
    """A policy behind a server, with an encoder of its own.

    Args:
        config: which server, and what a request holds.
        sizes: "cameras", "state_dim", "chunk_size" (of those executed) and "action_dim".
        encoder: embeds observations; None: their pixels do.
        encoded_by: says which encoder.
        identity: who has to answer; `UNKNOWN`: whoever does, the same from then on.
    """

    no_rl_reason = NO_RL_REASON
    uses_state = True
    draws_at_once = True

    def __init__(
        self,
        config: ServedPolicyConfig,
        sizes: dict[str, Any],
        encoder: Policy | None = None,
        encoded_by: str = "",
        identity: PolicyIdentity = UNKNOWN,
    ) -> None:
        super().__init__()
        self.config, self.encoder, self.identity = config, encoder, identity
        self.cameras, self.state_dim = tuple(sizes["cameras"]), sizes["state_dim"]
        self.chunk_size, self.action_dim = sizes["chunk_size"], sizes["action_dim"]
        self._keys = config.keys_of(self.cameras)
        self._encoded_by = encoded_by or f"{config.pixels} pixels"
        self._alike = 0

    @property
    def source(self) -> str:
        """See `Policy.source`."""
        return json.dumps([_who(self.identity), self.cameras, self._encoded_by])

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """One query per row; the server draws as it does."""
        return ActionChunk(self._chunks(obs, np.arange(obs.batch_size)))

    def embed_and_draw(
        self, obs: Observation, count: int, generator: torch.Generator | None, temperature: float
    ) -> tuple[torch.Tensor, np.ndarray]:
        """See `SeveralChunksPolicy`; no draw is a greedy one.

        Raises:
            ConfigError: all draws are the same, so that there is nothing to choose.
        """
        rows = np.repeat(np.arange(obs.batch_size), count)
        drawn = self._chunks(obs, rows).reshape(obs.batch_size, count, self.chunk_size, self.action_dim)
        if self._alike >= 0:
            self._alike = self._alike + obs.batch_size if (drawn == drawn[:, :1]).all() else -1
        if self._alike >= ALIKE:
            raise ConfigError(
                f"policy.address: {self.config.address} gave the same chunk {count} times at each of {self._alike} "
                "observations, so there is nothing to choose; let it sample (`vla-rl serve --temperature 1`)"
            )
        return self.embed(obs), drawn

    @torch.no_grad()
    def embed(self, obs: Observation) -> torch.Tensor:
        """The encoder's features, or (B, D): each camera's mean pixels in [0, 1], state, instruction's hash."""
        if self.encoder is not None:
            return self.encoder.embed(obs)
        size, parts = self.config.pixels, []
        for camera in self.cameras:
            image = torch.as_tensor(obs.images[camera]).permute(0, 3, 1, 2).float() / 255
            parts.append(adaptive_avg_pool2d(image, size).flatten(1))
        words = [zlib.crc32(text.encode()) % NUM_WORDS for text in obs.instruction]
        return torch.cat([*parts, torch.as_tensor(obs.state).float(), torch.eye(NUM_WORDS)[words]], 1)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """No server tells likelihoods."""
        raise NotImplementedError(NO_RL_REASON)

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Not for cloning."""
        raise NotImplementedError(NO_RL_REASON)

    def save(self, folder: Path) -> None:
        """Write which server it is, and the encoder where it has one; all appears whole or not at all."""
        sizes = {name: getattr(self, name) for name in ("cameras", "state_dim", "chunk_size", "action_dim")}
        options = self.config.model_dump(mode="json", exclude={"path", "kind", "encoder"})
        facts = {"kind": KIND, "options": options, "sizes": sizes, "server": self.identity.to_wire()}

        def write(partial: Path) -> None:
            partial.mkdir(exist_ok=True)
            (partial / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n")
            if self.encoder is not None:
                self.encoder.save(partial / ENCODER_FOLDER)

        write_folder(folder, write)

    def _chunks(self, obs: Observation, rows: np.ndarray) -> np.ndarray:
        """A chunk for each of these rows, float32 (N, H, A).

        Raises:
            ConfigError: no answer, one of other sizes, or another policy's than before.
        """
        answers = self.config.link().ask([self.config.request(obs, row, self._keys) for row in rows])
        for actions, told in answers:
            if self.identity.is_known and _who(told) != _who(self.identity):
                raise ConfigError(
                    f"policy.address: the server now answers as {told}, before as {self.identity}, and what is learned "
                    "of one holds for no other; serve that one again, or start another run"
                )
            self.identity = told
            if len(actions) < self.chunk_size or actions.shape[1] != self.action_dim:
                raise ConfigError(
                    f"policy.chunk_size: {self.config.address} answered with {actions.shape[0]} actions of "
                    f"{actions.shape[1]} numbers; {self.chunk_size} of {self.action_dim} are executed"
                )
        return np.stack([actions[: self.chunk_size] for actions, _ in answers])


class ServedPolicyConfig(PolicyConfig):
    """A policy behind a server of openpi's protocol, such as `vla-rl serve`: to be queried, not trained."""

    kind: str = KIND
    address: str = Field(default="127.0.0.1:8000", description="Of the server: HOST:PORT, ws://... or wss://....")
    token_file: Path | None = Field(default=None, description="File with the server's token.")
    ca: Path | None = Field(default=None, description="PEM file of the authorities trusted; empty: the system's.")
    cameras: tuple[str, ...] | None = Field(default=None, description="Cameras sent; empty: all of the environment's.")
    camera_keys: dict[str, str] = Field(
        default={},
        description="Camera -> the request's key that holds its picture, such as images/top; of others openpi's for "
        "LIBERO: observation/image, observation/wrist_image.",
    )
    state_keys: dict[str, PositiveInt] = Field(
        default={},
        description="Key -> how many of the state's numbers it holds, in their order; empty: observation/state, all.",
    )
    chunk_size: PositiveInt | None = Field(
        default=None, description="Actions of each answer that are executed; empty: all."
    )
    encoder: str | None = Field(
        default=None, description="A policy whose features the critic sees: a folder, 'pretrained:NAME'; empty: pixels."
    )
    pixels: PositiveInt = Field(default=4, description="Without an encoder: a picture is averaged to so many a side.")
    connections: PositiveInt = Field(default=8, description="Requests that wait for the server at the same time.")
    timeout_s: PositiveFloat = Field(
        default=120.0, description="Seconds for an answer, the first one of a server that compiles included."
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> ServedPolicy:
        """Ask the server once, about a black picture, for the sizes of its chunks. See `PolicyConfig.build`."""
        if self.path is not None:
            chosen = self.model_dump(include=self.model_fields_set - {"path", "kind"})
            policy = self._load(resolve_path(self.path), device, chosen)
        else:
            policy = self._ask_for_sizes(env_spec, device)
        check_cameras(policy.cameras, env_spec)
        if policy.encoder is not None:
            check_cameras(policy.encoder.cameras, env_spec)
        check_sizes(policy, env_spec)
        return policy

    def _ask_for_sizes(self, env_spec: EnvSpec, device: str | torch.device) -> ServedPolicy:
        cameras = env_spec.cameras if self.cameras is None else self.cameras
        check_cameras(cameras, env_spec)
        folder = None if self.encoder is None else resolve_path(self.encoder)
        encoder = None if folder is None else load_policy(folder, device)
        sizes = {"cameras": cameras, "state_dim": env_spec.state_dim, "chunk_size": 1, "action_dim": None}
        policy = ServedPolicy(self, sizes, encoder, "" if folder is None else policy_hash(folder))
        image = np.zeros((1, *env_spec.image_size, 3), np.uint8)
        black = Observation(dict.fromkeys(cameras, image), np.zeros((1, env_spec.state_dim), np.float32), ["wait"])
        [(actions, policy.identity)] = self.link().ask([self.request(black, 0, self.keys_of(cameras))])
        policy.chunk_size, policy.action_dim = self.chunk_size or len(actions), actions.shape[1]
        if policy.chunk_size > len(actions):
            raise ConfigError(
                f"policy.chunk_size: got {self.chunk_size}, but {self.address} answers with {len(actions)} actions"
            )
        return policy

    @property
    def remote(self) -> str:
        """See `PolicyConfig.remote`."""
        return self.address

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> ServedPolicy:
        """See `PolicyConfig.load`; the server is first asked when it acts."""
        return cls._load(Path(folder), device, {})

    @classmethod
    def _load(cls, folder: Path, device: str | torch.device, chosen: dict[str, Any]) -> ServedPolicy:
        saved = read_policy_config(folder)
        config = validate(cls, saved["options"] | chosen, prefix="policy")
        inside = folder / ENCODER_FOLDER
        encoder, known = (load_policy(inside, device), policy_hash(inside)) if inside.is_dir() else (None, "")
        return ServedPolicy(config, saved["sizes"], encoder, known, PolicyIdentity(**saved["server"]))

    def link(self) -> Link:
        """To its server."""
        return link_to(self.address, self.token_file, self.ca, self.connections, self.timeout_s)

    def keys_of(self, cameras: Sequence[str]) -> dict[str, str]:
        """Camera -> its key in a request: the one given, else openpi's, else observation/NAME."""
        keys = {}
        for camera, known in camera_keys(tuple(cameras)).items():
            theirs = [key for key in known[2:] if key.startswith(PREFIX)] or [known[1]]
            keys[camera] = self.camera_keys.get(camera, theirs[0])
        if unknown := sorted(self.camera_keys.keys() - keys.keys()):
            raise ConfigError(f"policy.camera_keys: no camera {unknown[0]!r}; sent are {', '.join(cameras)}")
        return keys

    def request(self, obs: Observation, row: int, keys: dict[str, str]) -> dict[str, Any]:
        """One row of an observation as a request.

        Raises:
            ConfigError: `state_keys` are of another number of numbers.
        """
        state = np.asarray(obs.state[row], np.float32)
        held = self.state_keys or {f"{PREFIX}state": len(state)}
        if (count := sum(held.values())) != len(state):
            raise ConfigError(f"policy.state_keys: {held} hold {count} numbers, and the state has {len(state)}")
        message: dict[str, Any] = {"prompt": obs.instruction[row]}
        message |= dict(zip(held, np.split(state, np.cumsum(list(held.values()))[:-1]), strict=True))
        for camera, key in keys.items():
            name = key.removeprefix("images/")
            place = message if name == key else message.setdefault("images", {})
            place[name] = obs.images[camera][row]
        return message
