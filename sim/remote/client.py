"""Our side of one environment host: a child process that runs `host.py`, or one on another machine.

Its options are those of an environment in a Python of its own: which Python, which class, what must be known of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from sim.remote.host import PROTOCOL, ProtocolError, proof, recv_message, send_message
from sim.vector.commands import Command, SharedArrays
from sim.vector.pool import THREAD_VARIABLES, ChildWorker, Worker
from vla_rl.config import Config, ConfigError
from vla_rl.interfaces import EnvConfig
from vla_rl.types import EnvSpec, EpisodeSpec

log = logging.getLogger(__name__)

HOST_FILE = Path(__file__).with_name("host.py")
CONNECT_SECONDS = 10.0
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of our Python, not the simulator's


class EnvFacts(Config):
    """What Gymnasium's interface does not say. Each may stand in the class's own mapping `env_facts` instead.

    A "path" is a key, or keys joined by dots, into what the environment returns.
    """

    name: str | None = Field(default=None, description="Kind of the environment; default: its class's name.")
    tasks: dict[str, str] | None = Field(default=None, description="Task name -> instruction.")
    horizon: PositiveInt | dict[str, PositiveInt] | None = Field(
        default=None, description="Control steps before truncation, or task -> steps."
    )
    cameras: dict[str, str] | None = Field(
        default=None, description='Camera name -> path of its image in the observation, or "render()".'
    )
    state: str | tuple[str, ...] | None = Field(default=None, description="Path or paths of the state's parts.")
    control_hz: float | None = Field(default=None, gt=0, description="Control steps per second of simulated time.")
    success: str | None = Field(
        default=None, description="Path in info of success; default: success or is_success, else `terminated`."
    )
    instruction: str | None = Field(default=None, description="Path in reset's info of the episode's instruction.")
    reward: Literal["success", "environment"] | None = Field(
        default=None, description="1 at success and else 0 (the default), or the environment's own reward."
    )
    action_low: tuple[float, ...] | None = Field(default=None, description="Bounds; default: of its action_space.")
    action_high: tuple[float, ...] | None = Field(default=None, description="Bounds; default: of its action_space.")
    eval_seeds: tuple[int, ...] | None = Field(
        default=None, description="Seeds of a benchmark's official initial states, below 2**29."
    )

    @field_validator("eval_seeds")
    @classmethod
    def _official_seeds(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if any(not 0 <= seed < 2**29 for seed in value or ()):
            raise ValueError("seeds are from 0 to 2**29 - 1; higher ones belong to the splits")
        return value


class RemoteOptions(EnvConfig):
    """The options of `RemoteConfig`, by which a host is started."""

    start_timeout: ClassVar[float] = 300.0  # Seconds for a host's start, and for a reset.

    kind: Literal["remote"] = "remote"
    env: str = Field(description='Class or function that makes one environment: "package.module:Class".')
    kwargs: dict[str, Any] = Field(default={}, description="Arguments to it.")
    facts: EnvFacts = EnvFacts()
    python: str = Field(
        default="", description="The simulator's interpreter; ~ and $VARIABLES are filled in; empty: this one."
    )
    python_path: tuple[str, ...] = Field(default=(), description="Folders it imports from, besides working_dir.")
    working_dir: str = Field(default="", description="Folder that it runs in; empty: this one.")
    num_hosts: PositiveInt = Field(default=1, description="Processes that hold them.")
    devices: tuple[int, ...] = Field(
        default=(), description="GPUs assigned to the hosts in turn, as CUDA_VISIBLE_DEVICES and MUJOCO_EGL_DEVICE_ID."
    )
    hosts: tuple[str, ...] = Field(
        default=(),
        description='Other machines, "name:port", where sim/remote/listen.py waits; the num_hosts processes go '
        "to them in turn. Empty: processes are started here.",
    )
    token_file: str = Field(default="", description="With hosts: file with the secret that listen.py was given.")
    step_timeout: float = Field(default=120.0, gt=0, description="Seconds after which a silent host counts as hung.")

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError('expected "package.module:Class"')
        return value

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            name, _, port = host.rpartition(":")
            if not name or not port.isdigit():
                raise ValueError(f'expected "name:port", got {host!r}')
        return value


class HostChannel:
    """A socket to a host, speaking whole messages."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self.sock = sock
        sock.settimeout(timeout)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        """Raises ConnectionError where the host is gone or takes nothing in."""
        try:
            send_message(self.sock, message)
        except TimeoutError as error:
            raise ConnectionError("takes in no message") from error

    def receive(self) -> Any:
        """Raises EOFError where the host is gone, ConnectionError where it says nothing that can be understood."""
        try:
            return recv_message(self.sock)
        except TimeoutError as error:
            raise ConnectionError("stopped within a message") from error

    def recv(self) -> tuple[int, int, str, Any]:
        """See `sim.vector.pool.Channel`."""
        message = self.receive()
        if not (isinstance(message, list) and [type(part) for part in message[:3]] == [int, int, str]):
            raise ProtocolError("sent something that is no answer")
        serial, env_id, status, payload = message
        return serial, env_id, status, payload

    def close(self) -> None:
        self.sock.close()


class HostWorker(Worker):
    """What is the same for both kinds of host: the handshake, and asking."""

    timeout_option = "env.step_timeout"

    connection: HostChannel
    spec: EnvSpec
    shared: SharedArrays | None = None  # observations; to be set once the spec is known

    def __init__(self, index: int, env_ids: list[int], config: RemoteOptions, record_frames: bool) -> None:
        super().__init__(f"host {index}", env_ids, config.start_timeout, config.step_timeout)
        self.config = config
        self._attached: dict[str, SharedArrays] = {}
        self._setup = {
            "env": config.env,
            "kwargs": config.kwargs,
            "facts": config.facts.model_dump(mode="json"),
            "python_path": [os.path.expandvars(os.path.expanduser(path)) for path in config.python_path],
            "env_ids": env_ids,
            "record_frames": record_frames,
        }

    @abstractmethod
    def open(self) -> socket.socket:
        """Start the process, or reach it."""

    def start(self) -> None:
        self.ready = False
        self._attached = {}
        self.connection = HostChannel(self.open(), self.start_timeout)
        with contextlib.suppress(ConnectionError):  # it died at once: wait_ready says why
            self.connection.send(self._setup)

    def wait_ready(self) -> None:
        if self.ready:
            return
        try:
            self._check_hello(self.connection.receive())
            answer = self.connection.receive()
        except (EOFError, ConnectionError) as error:
            hung = isinstance(error.__cause__, TimeoutError)
            why = f"did not start within {self.start_timeout:.0f} s." if hung else f"{error} "
            raise self._cannot_start(why + self.why_gone(hung)) from None
        if answer["status"] != "ready":
            raise self._cannot_start(f"{answer['text']}{self.log_tail()}")
        spec = read_spec(answer["spec"])
        if hasattr(self, "spec") and not same_spec(spec, self.spec):
            raise self._cannot_start("started again, its environment states other facts than before.")
        self.spec = spec
        self.connection.sock.settimeout(self.step_timeout)
        self.ready = True

    def _cannot_start(self, text: str) -> RuntimeError:
        missing = [name for name in ("msgpack", "numpy") if f"No module named '{name}'" in text]
        hint = (
            f"\nThe simulator's Python needs it: {self.config.python} -m pip install numpy msgpack" if missing else ""
        )
        return RuntimeError(f"{self.name} (environments {self.env_ids}) cannot start: {text.strip()}{hint}")

    def _check_hello(self, hello: Any) -> None:
        theirs = hello.get("protocol") if isinstance(hello, dict) else None
        if theirs != PROTOCOL:
            raise self._cannot_start(
                f"it speaks version {theirs!r} of the protocol, this vla-rl speaks {PROTOCOL}: copy host.py and "
                "listen.py of this version (in sim/remote) to where it runs"
            )
        log.info("%s: %s", self.name, ", ".join(f"{name} {v}" for name, v in hello["versions"].items()))

    def send(self, serial: int, command: Command, arguments: Mapping[int, Any], frames: SharedArrays | None) -> None:
        for name, arrays in (("observations", self.shared), ("frames", frames)):
            if arrays is not None and self._attached.get(name) is not arrays:
                self._attach(name, arrays)
                self._attached[name] = arrays
        listed = [[i, _plain(argument)] for i, argument in arguments.items()]
        self.connection.send({"serial": serial, "command": command, "arguments": listed})

    @abstractmethod
    def _attach(self, name: str, arrays: SharedArrays) -> None:
        """Share memory with the host, where that is possible."""


class LocalHost(ChildWorker, HostWorker):
    """A host that is our child process, alone at the other end of a socket pair."""

    def open(self) -> socket.socket:
        config = self.config
        python = os.path.expandvars(os.path.expanduser(config.python)) or sys.executable
        folder = os.path.expandvars(os.path.expanduser(config.working_dir)) or os.getcwd()
        for option, path, exists in (("python", python, os.path.isfile), ("working_dir", folder, os.path.isdir)):
            if not exists(path):
                raise ConfigError(f"env.{option}: there is no {path!r}; give the path as seen from {os.getcwd()}")
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as output:
            self.log_fd = os.dup(output.fileno())
            fcntl.fcntl(self.log_fd, fcntl.F_SETFL, os.O_APPEND)  # the host empties it when it grows large
            self.process = subprocess.Popen(
                [python, "-u", "-X", "faulthandler", str(HOST_FILE), "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=self._environ(),
                start_new_session=True,
            )
        return ours

    def _environ(self) -> dict[str, str]:
        config = self.config
        variables = {
            **dict.fromkeys(THREAD_VARIABLES, "1"),
            **{name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON},
        }
        if config.devices:
            device = str(config.devices[int(self.name.split()[-1]) % len(config.devices)])
            variables |= {"CUDA_VISIBLE_DEVICES": device, "MUJOCO_EGL_DEVICE_ID": device}
        return variables

    def end_process(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _attach(self, name: str, arrays: SharedArrays) -> None:
        layout = [[key, list(shape), dtype, arrays.offsets[key]] for key, (shape, dtype) in arrays.layout.items()]
        self.connection.send({"command": "memory", "name": name, "size": arrays.size, "layout": layout})
        socket.send_fds(self.connection.sock, [b"m"], [arrays.fd])


class DistantHost(HostWorker):
    """A host that `listen.py` starts for us on another machine. Images travel in the messages."""

    def __init__(self, index: int, env_ids: list[int], config: RemoteOptions, record_frames: bool) -> None:
        super().__init__(index, env_ids, config, record_frames)
        self._address = config.hosts[index % len(config.hosts)]
        self.name = f"host {index} at {self._address}"

    def open(self) -> socket.socket:
        token = _read_token(self.config.token_file)
        name, _, port = self._address.rpartition(":")
        try:
            sock = socket.create_connection((name, int(port)), CONNECT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            first = recv_message(sock, limit=1024)
            self._check_listener(first)
            challenge = os.urandom(32)
            send_message(sock, {"proof": proof(token, "client", first["challenge"]), "challenge": challenge})
            if recv_message(sock, limit=1024)["proof"] != proof(token, "host", challenge):
                raise self._cannot_start("it does not know the token (env.token_file).")
        except EOFError:
            raise self._cannot_start(
                "it refused us: the token (env.token_file) is another, or all its hosts are taken."
            ) from None
        except (OSError, KeyError, TypeError) as error:
            raise self._cannot_start(
                f"cannot be reached ({error}). Is listen.py running there, and the port open?"
            ) from error
        return sock

    def _check_listener(self, first: Any) -> None:
        if not isinstance(first, dict) or first.get("protocol") != PROTOCOL:
            self._check_hello(first)

    def _attach(self, name: str, arrays: SharedArrays) -> None:
        del name, arrays

    def kill(self) -> None:
        self.connection.close()

    def wait(self, seconds: float) -> None:
        del seconds

    def alive(self) -> bool:
        return True

    def why_gone(self, hung: bool) -> str:
        return ("" if hung else "closed its connection.") + self.log_tail()

    def log_tail(self) -> str:
        return " What it printed is where listen.py runs."


def _read_token(path: str) -> bytes:
    if not path:
        raise ConfigError("env.token_file: needed with env.hosts: the file with the secret that listen.py was given")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip().encode()
    except OSError as error:
        raise ConfigError(f"env.token_file: {error}") from error


def _plain(argument: Any) -> Any:
    """A command's argument as data that a message can hold."""
    if not isinstance(argument, EpisodeSpec):
        return argument
    frame = argument.keyframe
    keyframe = frame and {"env": frame.env, "task": frame.task, "step": frame.step, "arrays": frame.arrays}
    return {
        "task": argument.task,
        "split": argument.split,
        "index": int(argument.index),
        "instruction": argument.instruction,
        "keyframe": keyframe,
        "perturbation": argument.perturbation,
    }


def read_spec(values: Mapping[str, Any]) -> EnvSpec:
    """An `EnvSpec` from what a host says of its environment.

    Raises:
        RuntimeError: it is not one.
    """
    try:
        height, width = (int(size) for size in values["image_size"])
        spec = EnvSpec(
            kind=str(values["kind"]),
            tasks={str(name): str(text) for name, text in values["tasks"].items()},
            horizon={str(name): int(steps) for name, steps in values["horizon"].items()},
            cameras=tuple(str(name) for name in values["cameras"]),
            image_size=(height, width),
            state_dim=int(values["state_dim"]),
            action_dim=int(values["action_dim"]),
            action_low=np.asarray(values["action_low"], np.float32),
            action_high=np.asarray(values["action_high"], np.float32),
            control_hz=float(values["control_hz"]),
            num_eval_states={str(name): int(number) for name, number in values["num_eval_states"].items()},
            projections={str(name): np.asarray(matrix) for name, matrix in values["projections"].items()},
            suite=str(values["suite"]),
            labels={str(name): str(label) for name, label in values["labels"].items()},
            official={str(name): (str(a), str(b)) for name, (a, b) in values.get("official", {}).items()},
        )
        _check_facts(spec)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"the environment's facts cannot be used: {type(error).__name__}: {error}") from error
    return spec


def _check_facts(spec: EnvSpec) -> None:
    """Refuse facts that do not go together: every episode would break, or every action be clipped to the same.

    Raises:
        ValueError: naming the fact.
    """
    if any(spec.horizon.get(task, 0) < 1 for task in spec.tasks):
        tasks = ", ".join(spec.tasks)
        raise ValueError(
            f"facts.horizon: got {spec.horizon}; give 1 control step or more for each of the tasks {tasks}"
        )
    low, high = spec.action_low, spec.action_high
    if low.shape != (spec.action_dim,) or low.shape != high.shape or not (low <= high).all():
        raise ValueError(
            f"facts.action_low, facts.action_high: got {low.tolist()} and {high.tolist()}; give as many numbers each "
            "as an action has, the lower ones below"
        )


def same_spec(a: EnvSpec, b: EnvSpec) -> bool:
    """Whether two specs state the same facts."""
    arrays = ("action_low", "action_high", "projections")
    return (
        {k: v for k, v in vars(a).items() if k not in arrays} == {k: v for k, v in vars(b).items() if k not in arrays}
        and np.array_equal(a.action_low, b.action_low)
        and np.array_equal(a.action_high, b.action_high)
    )
