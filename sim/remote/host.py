"""The environment host: runs a simulator in the simulator's own Python, for vla-rl in another.

One file that needs Python 3.9, numpy and msgpack, and nothing of vla-rl: vla-rl starts it with the simulator's
interpreter. With `listen.py` beside it, it serves vla-rl on another machine.

It speaks length-prefixed msgpack over a socket of its own, so whatever the simulator prints is only printed. Nothing is
pickled. Images go through shared memory where both ends are on one machine. An environment is Gymnasium-style
(`GymEpisodes` says what is read) or has `run_chunk` (as vla-rl's `SingleEnv`).
"""

from __future__ import annotations

import argparse
import faulthandler
import hmac
import importlib
import mmap
import operator
import os
import select
import signal
import socket
import stat
import sys
import time
import traceback
import types
import warnings
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

PROTOCOL = 1
MAX_BYTES = 2**28  # of one message
FLUSH_SECONDS = 0.5  # an answer waits no longer for others
MAX_LOG_BYTES = 2**24  # of what the simulator prints; then the log starts afresh, but not a listener's, the user's own
GRACE_SECONDS = 5.0  # for the simulator to close once nobody listens any more
SPLITS = ("train", "validation", "eval")
SEEDS_PER_SPLIT = 2**29  # the split's seeds start at (its place + 1) times this; below are a benchmark's own
SPEC_FIELDS = ("kind", "tasks", "horizon", "cameras", "image_size", "state_dim", "action_dim")
SPEC_FIELDS += ("action_low", "action_high", "control_hz")
SPEC_MORE = ("num_eval_states", "projections", "labels", "official")
REPORTED = ("ValueError", "NotImplementedError")  # errors that are the caller's, and cross by name


class ProtocolError(ConnectionError):
    """The other side said something that cannot be understood, or that is too large."""


class ContractError(Exception):
    """The environment gives something else than it has declared."""


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"__array__": [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot send {type(value).__name__}: only numbers, text, bytes, lists, mappings and number arrays")


def _decode(value: dict[str, Any]) -> Any:
    if set(value) != {"__array__"}:
        return value
    try:
        name, shape, data = value["__array__"]
        if np.dtype(name).kind not in "biuf":
            raise ValueError(f"arrays of {name!r} are not allowed")
        return np.frombuffer(data, name).reshape(shape).copy()
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"sent an array that cannot be read: {error}") from error


def pack(message: Any) -> bytes:
    """Plain data with arrays of numbers in it, as sent. Raises ProtocolError above MAX_BYTES."""
    body = msgpack.packb(message, default=_encode, use_bin_type=True) or b""
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is above the limit of {MAX_BYTES}")
    return len(body).to_bytes(4, "big") + body


def send_message(sock: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError where the other side is gone, or does not read."""
    sock.sendall(pack(message))


def recv_message(sock: socket.socket, limit: int = MAX_BYTES) -> Any:
    """Receive what `send_message` sent. Raises EOFError where the other side has closed, or ProtocolError."""
    size = int.from_bytes(_receive(sock, 4), "big")
    if size > limit:
        raise ProtocolError(f"announced a message of {size} bytes, above the limit of {limit}")
    try:
        return msgpack.unpackb(_receive(sock, size), object_hook=_decode, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"sent bytes that are no message ({error})") from error


def _receive(sock: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return data


def to_numpy(value: Any) -> np.ndarray:
    """A torch tensor, on any device, or anything that numpy takes."""
    return np.asarray(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)


def look_up(values: Any, path: str) -> Any:
    """`values["a"]["b"]` for "a.b"; `values` itself for ""."""
    for key in path.split(".") if path else ():
        if not isinstance(values, Mapping) or key not in values:
            seen = ", ".join(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise ContractError(f"facts: there is no {path!r} in what the environment returns; at {key!r} found {seen}")
        values = values[key]
    return values


class GymEpisodes:
    """A Gymnasium-style environment, one episode at a time, with what vla-rl must know of it besides.

    Read of it: `reset(seed=, options=) -> (obs, info)`, `step(action) -> (obs, reward, terminated, truncated,
    info)`, `close()`; and if there: `action_space`, `observe() -> obs` (called once per chunk: then `reset` and
    `step` may return None as obs), `expert_action()`, `render()`, and `env_facts`, a mapping (or a method that
    returns one) with the keys of `facts`. `options` names the episode: task, split and index. A stored state is the
    actions so far; it is restored by replaying them.
    """

    def __init__(self, env: Any, facts: Mapping[str, Any], record_frames: bool) -> None:
        self.env, self.record_frames = env, record_frames
        said = getattr(getattr(env, "unwrapped", env), "env_facts", dict)
        own: Any = said() if callable(said) else said
        self.facts: dict[str, Any] = {**own, **{key: value for key, value in facts.items() if value is not None}}
        self.name = self.facts.get("name") or type(getattr(env, "unwrapped", env)).__name__
        self.tasks = dict(self._fact("tasks", "task name -> instruction"))
        horizon = self.facts.get("horizon") or getattr(getattr(env, "spec", None), "max_episode_steps", None)
        horizon = horizon or self._fact("horizon", "control steps before truncation")
        self.horizons = dict(horizon) if isinstance(horizon, Mapping) else dict.fromkeys(self.tasks, int(horizon))
        self.eval_seeds = [int(seed) for seed in self.facts.get("eval_seeds") or ()]
        if above := [seed for seed in self.eval_seeds if not 0 <= seed < SEEDS_PER_SPLIT]:
            raise ContractError(f"facts.eval_seeds: got {above}; from 0 to 2**29 - 1, higher ones belong to the splits")
        self.low, self.high = self._bounds()
        self._begin(next(iter(self.tasks)), "train", 0)
        self.spec = self._make_spec()

    def _fact(self, key: str, meaning: str) -> Any:
        if not self.facts.get(key):
            where = f"in the recipe (env.facts.{key}) or in the mapping `env_facts` of the environment's class"
            raise ContractError(f"facts.{key} ({meaning}) is needed: give it {where}")
        return self.facts[key]

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        space = getattr(self.env, "action_space", None)
        low = self.facts.get("action_low", getattr(space, "low", None))
        high = self.facts.get("action_high", getattr(space, "high", None))
        if low is None or high is None:
            raise ContractError("facts.action_low, facts.action_high: needed where there is no Box as action_space")
        return np.asarray(low, np.float32).reshape(-1), np.asarray(high, np.float32).reshape(-1)

    def _make_spec(self) -> types.SimpleNamespace:
        first = self.observe()
        sizes = {image.shape[:2] for image in first.images.values()}
        if len(sizes) != 1:
            raise ContractError(f"all cameras must have one size, found {sorted(sizes)}")
        rate = self.facts.get("control_hz") or (getattr(self.env, "metadata", None) or {}).get("render_fps")
        rate = float(rate or self._fact("control_hz", "control steps per second of simulated time"))
        shape = (list(first.images), list(sizes.pop()), len(first.state), len(self.low))
        values = (self.name, self.tasks, self.horizons, *shape, self.low, self.high, rate)
        limits = dict.fromkeys(self.tasks, len(self.eval_seeds)) if self.eval_seeds else {}
        return types.SimpleNamespace(**dict(zip(SPEC_FIELDS, values)), num_eval_states=limits)

    def seed(self, split: str, index: int) -> int:
        """The seed of an initial state; no two splits share one."""
        if split == "eval" and self.eval_seeds:
            return self.eval_seeds[index]
        if index >= SEEDS_PER_SPLIT:
            raise ValueError(f"no initial state {index}: indices are below {SEEDS_PER_SPLIT}")
        return (SPLITS.index(split) + 1) * SEEDS_PER_SPLIT + index

    def reset(self, spec: Any) -> Any:
        """Start the episode of (task, split, index), or of its keyframe."""
        if spec.keyframe is None:
            self._begin(spec.task, spec.split, spec.index)
        else:
            frame = spec.keyframe
            if (frame.env, frame.task) != (self.name, spec.task):
                asked = f"{self.name}/{spec.task}"
                raise ValueError(f"this keyframe is of {frame.env}/{frame.task}, the episode asked for of {asked}")
            self._begin(spec.task, SPLITS[int(frame.arrays["split"])], int(frame.arrays["index"]))
            for action in frame.arrays["actions"]:
                self._advance(action)
        self._instruction = spec.instruction or self._instruction
        obs = self.observe()
        if not np.isfinite(obs.state).all():
            raise ContractError(f"the state after reset holds NaN or infinity: {obs.state}")
        return obs

    def _begin(self, task: str, split: str, index: int) -> None:
        options = {"task": task, "split": split, "index": index}
        answer = self.env.reset(seed=self.seed(split, index), options=options)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ContractError("reset(seed=, options=) must return (obs, info), as Gymnasium does")
        self._latest, info = answer
        self._task, self._split, self._index = task, split, index
        self._actions: list[np.ndarray] = []
        named = self.facts.get("instruction")
        self._instruction = str(look_up(info, named)) if named else self.tasks[task]

    def _advance(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """One control step. Returns reward, whether the task is solved, whether all is over, and whether it is cut."""
        shape = getattr(getattr(self.env, "action_space", None), "shape", None) or self.low.shape
        answer = self.env.step(action.reshape(shape).copy())
        if not (isinstance(answer, tuple) and len(answer) == 5):
            expected = "(obs, reward, terminated, truncated, info)"
            raise ContractError(f"step(action) must return {expected}, as Gymnasium does")
        self._latest, reward, terminated, truncated, info = answer
        self._actions.append(action)
        terminated, truncated = (bool(np.all(to_numpy(end))) for end in (terminated, truncated))
        named = self.facts.get("success")
        if named is None:
            named = next((key for key in ("success", "is_success") if key in info), None)
        solved = terminated if named is None else bool(np.all(to_numpy(look_up(info, named))))
        reward = float(to_numpy(reward).reshape(-1)[0]) if self.facts.get("reward") == "environment" else float(solved)
        return reward, solved, solved or terminated, truncated

    def observe(self) -> types.SimpleNamespace:
        """Images, state and instruction now."""
        obs = self.env.observe() if hasattr(self.env, "observe") else self._latest
        images = {name: self._image(obs, path) for name, path in self._fact("cameras", "our name -> its key").items()}
        state = self._fact("state", "its key, or several")
        parts = [to_numpy(look_up(obs, path)).reshape(-1) for path in ([state] if isinstance(state, str) else state)]
        numbers = np.concatenate(parts).astype(np.float32)
        return types.SimpleNamespace(images=images, state=numbers, instruction=self._instruction)

    def _image(self, obs: Any, path: str) -> np.ndarray:
        image = to_numpy(self.env.render() if path == "render()" else look_up(obs, path))
        return image[0] if image.ndim == 4 and len(image) == 1 else image

    def run_chunk(self, actions: np.ndarray) -> types.SimpleNamespace:
        """Execute actions (H, A) until the chunk or the episode ends."""
        number = len(actions)
        reward, ends = np.zeros(number, np.float32), np.zeros((2, number), bool)
        recorded, executed, solved = [], 0, False
        for i in range(number):
            reward[i], solved, over, cut = self._advance(np.clip(actions[i], self.low, self.high))
            executed += 1
            ends[:, i] = over, not over and (cut or len(self._actions) >= self.horizons[self._task])
            if self.record_frames:
                recorded.append(self.observe())
            if ends[:, i].any():
                break
        obs = recorded[-1] if recorded else self.observe()
        frames = {c: np.stack([o.images[c] for o in recorded]) for c in obs.images} if recorded else {}
        states = np.stack([o.state for o in recorded]) if recorded else None
        names = ("obs", "reward", "terminated", "truncated", "num_steps", "success", "frames", "states")
        values = (obs, reward, *ends, executed, solved, frames, states)
        return types.SimpleNamespace(**dict(zip(names, values)))

    def save_state(self) -> types.SimpleNamespace:
        """The episode's seed and actions so far."""
        arrays = {"split": np.array(SPLITS.index(self._split)), "index": np.array(self._index)}
        arrays["actions"] = np.array(self._actions, np.float32).reshape(-1, len(self.low))
        return types.SimpleNamespace(env=self.name, task=self._task, step=len(self._actions), arrays=arrays)

    def expert_action(self) -> np.ndarray:
        """The environment's own expert's next action."""
        if not hasattr(self.env, "expert_action"):
            raise NotImplementedError(f"{self.name} has no scripted expert: it has no method expert_action()")
        return to_numpy(self.env.expert_action())

    def close(self) -> None:
        """Release the simulator."""
        self.env.close()


def make_environment(setup: Mapping[str, Any]) -> Any:
    """One environment of "module:Class" (or a function) with its kwargs. Raises whatever that raises."""
    module, _, name = setup["env"].partition(":")
    made = operator.attrgetter(name)(importlib.import_module(module))(**setup["kwargs"])
    if not hasattr(made, "reset") and hasattr(made, "make"):  # a config of ours, which makes its environment
        made = getattr(made, "start", made.make)(setup["record_frames"])
    return made if hasattr(made, "run_chunk") else GymEpisodes(made, setup["facts"], setup["record_frames"])


class Host:
    """Answers commands for its environments."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.envs: dict[int, Any] = {}
        self.memory: dict[str, dict[str, np.ndarray]] = {}

    def serve(self, allowed: str) -> None:
        """Say who we are, make the environments (only `allowed`, if given), answer until the other side closes."""
        versions = {"python": sys.version.split()[0], "numpy": np.__version__}
        send_message(self.sock, {"hello": "vla-rl environment host", "protocol": PROTOCOL, "versions": versions})
        setup = recv_message(self.sock)
        try:
            if allowed and setup["env"] != allowed:
                raise ValueError(f"env: got {setup['env']!r}; this host was started for {allowed!r} alone")
            sys.path[:0] = setup["python_path"]
            for env_id in setup["env_ids"]:
                self.envs[env_id] = make_environment(setup)
            spec = next(iter(self.envs.values())).spec
            self.spec = {name: getattr(spec, name) for name in SPEC_FIELDS}
            self.spec.update({name: getattr(spec, name, {}) for name in SPEC_MORE})
            self.spec["suite"] = getattr(spec, "suite", "")
        except (Exception, SystemExit):  # process edge: vla-rl raises it
            send_message(self.sock, {"status": "failed", "text": traceback.format_exc()})
            return
        send_message(self.sock, {"status": "ready", "spec": self.spec})
        while True:
            message = recv_message(self.sock)
            if message["command"] == "memory":
                (fd,) = socket.recv_fds(self.sock, 1, 1)[1]
                block = mmap.mmap(fd, message["size"])
                os.close(fd)
                arrays = {key: np.ndarray(shape, kind, block, start) for key, shape, kind, start in message["layout"]}
                self.memory[message["name"]] = arrays
                continue
            ready, since = [], time.monotonic()  # quick answers leave together: each would wake vla-rl
            for env_id, argument in message["arguments"]:
                status, answer = self._answer(env_id, message["command"], argument)
                ready.append(pack([message["serial"], env_id, status, answer]))
                if time.monotonic() - since > FLUSH_SECONDS:
                    self.sock.sendall(b"".join(ready))
                    ready, since = [], time.monotonic()
            self.sock.sendall(b"".join(ready))
            if not allowed and stat.S_ISREG((log := os.fstat(2)).st_mode) and log.st_size > MAX_LOG_BYTES:
                os.ftruncate(2, 0)

    def _answer(self, env_id: int, command: str, argument: Any) -> tuple[str, Any]:
        try:
            env = self.envs[env_id]
            if command == "reset":
                keyframe = argument["keyframe"] and types.SimpleNamespace(**argument["keyframe"])
                spec = types.SimpleNamespace(**{**argument, "keyframe": keyframe})
                env.succeeded_at, env.is_over = None, False  # of a `SingleEnv` whose last episode was given up
                return "ok", self._show(env_id, env.reset(spec))
            if command == "step":
                return "ok", self._outcome(env_id, env.run_chunk(argument))
            if command == "save_state":
                frame = env.save_state()
                return "ok", {"env": frame.env, "task": frame.task, "step": frame.step, "arrays": frame.arrays}
            if command == "expert_action":
                return "ok", np.asarray(env.expert_action(), np.float32)
            raise ProtocolError(f"unknown command {command!r}")
        except ContractError as error:
            return "contract", str(error)
        except (Exception, SystemExit) as error:  # process edge: vla-rl reports it
            name = type(error).__name__
            if name in REPORTED and command != "step":
                return name, str(error)
            return "broken" if command == "step" else "error", traceback.format_exc()

    def _show(self, env_id: int, obs: Any) -> Any:
        """Check the observation, put it where vla-rl reads it; what is left is the instruction."""
        shape = (*self.spec["image_size"], 3)
        parts = {f"image.{name}": (obs.images[name], shape, "uint8") for name in self.spec["cameras"]}
        parts["state"] = (obs.state, (self.spec["state_dim"],), "float32")
        for name, (value, expected, dtype) in parts.items():
            if value.shape != expected or value.dtype != dtype:
                found = f"{value.dtype} {value.shape}"
                raise ContractError(f"{name}: the environment gave {found}, at its start it was {dtype} {expected}")
        arrays = {name: value for name, (value, _, _) in parts.items()}
        for name, memory in self.memory.get("observations", {}).items():
            memory[env_id] = arrays[name]
        return [str(obs.instruction), None if "observations" in self.memory else arrays]

    def _outcome(self, env_id: int, result: Any) -> Any:
        numbers = [result.reward, result.terminated, result.truncated, int(result.num_steps), bool(result.success)]
        if not np.isfinite([*result.reward, *result.obs.state]).all():
            raise FloatingPointError(f"the reward or the state is not finite: {result.reward}, {result.obs.state}")
        frames = None
        if result.states is not None:
            frames = {"state": result.states, **{f"image.{name}": f for name, f in result.frames.items()}}
            if "frames" in self.memory:
                for name, value in frames.items():
                    self.memory["frames"][name][env_id, : result.num_steps] = value
                frames = None
        return [*self._show(env_id, result.obs), numbers, frames]

    def close(self) -> None:
        """Close every environment, whatever the others do."""
        for env in self.envs.values():
            try:
                env.close()
            except (Exception, SystemExit):
                traceback.print_exc()


def guard(sock: socket.socket, alive: int) -> None:
    """In a small process of its own: end this process group once vla-rl or the host is gone, even if the host hangs."""
    gone, both = select.poll(), select.poll()  # `alive` reads a pipe whose other end the host holds
    gone.register(alive, 0)
    both.register(alive, 0)
    both.register(sock, getattr(select, "POLLRDHUP", 0))
    both.poll()
    gone.poll(GRACE_SECONDS * 1000)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def run(sock: socket.socket, allowed: str = "") -> None:
    """Be the host behind this socket until the other side closes it, or is gone."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is vla-rl's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # vla-rl asks a hung host where it hangs
    alive, held = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads in the parent: the child only waits and kills
        child = os.fork()
    if child == 0:
        os.close(held)
        guard(sock, alive)
    os.close(alive)
    host = Host(sock)
    try:
        host.serve(allowed)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the other side has closed
    finally:
        host.close()


def proof(token: bytes, who: str, challenge: bytes) -> bytes:
    """What only a holder of the token can answer to a challenge."""
    return hmac.new(token, who.encode() + challenge, "sha256").digest()


def main() -> None:
    """`python host.py --fd N`: be the host behind a socket that the process was started with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fd", type=int, required=True, help="number of the open socket")
    parser.add_argument("--env", default="", metavar="MODULE:CLASS", help="the only environment it gives")
    args = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path and os.path.abspath(path) != here)]
    os.set_inheritable(args.fd, False)
    run(socket.socket(fileno=args.fd), args.env)


if __name__ == "__main__":
    main()
