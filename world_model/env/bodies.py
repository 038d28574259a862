"""The simulated bodies of imagined episodes, and a keyframe of one: its body's state, its world model's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vla_rl.data.keyframes import RECORDED, KeyframeError, SimulatorStates
from vla_rl.rollout.body import Body
from vla_rl.types import EpisodeSpec, Keyframe
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.types import Frames

KIND = "world_model"
BFLOAT16 = ":bfloat16"  # Ends the name of an array that holds the bits of one, which numpy does not know.


def memory_arrays(memory: Memory) -> dict[str, np.ndarray]:
    """Of one episode; its instruction is not among them."""
    return dict(_as_array(f"memory.{name}", tensor[0]) for name, tensor in memory.tensors().items())


def saved_memory(world_model: WorldModel, keyframe: Keyframe, instruction: str, seed: int | None) -> Memory:
    """What the keyframe remembers, with its own noise or that of a seed.

    Raises:
        ValueError: a keyframe of another world model.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, array in keyframe.arrays.items():
        if name.startswith("memory."):
            tensor = _as_tensor(name, array)[None].to(world_model.device)
            tensors[name.removeprefix("memory.").removesuffix(BFLOAT16)] = tensor
    other = "keyframe: is of another world model, or older than this version; use one that was saved in this one"
    facts = world_model.metadata
    expected = {
        "reference.latents": (1, 1, len(facts.cameras), *world_model.autoencoder.latent_shape),
        "reference.states": (1, 1, facts.state_dim),
    }
    if any(name not in tensors or tensors[name].shape != shape for name, shape in expected.items()):
        raise ValueError(other)
    reference = Frames(tensors["reference.latents"], tensors["reference.states"])
    blank = world_model.begin(reference, [instruction], [seed or 0])
    if {n: t.shape for n, t in blank.tensors().items()} != {n: t.shape for n, t in tensors.items()}:
        raise ValueError(other)
    memory = blank.with_tensors(tensors)
    return memory if seed is None else replace(memory, noise=blank.noise)


def _as_array(name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return name + BFLOAT16, tensor.view(torch.int16).numpy().copy()
    return name, tensor.numpy().copy()


def _as_tensor(name: str, array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if name.endswith(BFLOAT16) else tensor


PREFIX, ENV, STATE = "body.", "body_env", "body_state"  # Names of a keyframe's arrays that hold the body's own.


class Bodies:
    """One body for each of `num_envs` environments."""

    def __init__(self, body: Body, world_model: WorldModel, num_envs: int) -> None:
        self._body, self._world_model = body, world_model
        self._now: list[Keyframe | None] = [None] * num_envs
        self._state = np.zeros((num_envs, world_model.metadata.state_dim), np.float32)  # Of the bodies.
        self._states: dict[str, SimulatorStates] = {}  # By dataset.

    def begin(self, ids: Sequence[int], specs: Sequence[EpisodeSpec]) -> None:
        """Put the bodies of `ids` where their episodes begin.

        Raises:
            ValueError: a keyframe that does not say where the body is.
            KeyframeError: of a recorded episode, beside which the simulator's state was not saved.
        """
        real = {i: self._in_the_simulator(spec) for i, spec in zip(ids, specs, strict=True) if not _is(spec, KIND)}
        for i, body, state in zip(real, *self._body.begin(list(real.values())), strict=True):
            self._now[i], self._state[i] = body, state
        for i, spec in zip(ids, specs, strict=True):
            if i not in real:
                assert spec.keyframe is not None, "it has a kind"
                self._now[i], self._state[i] = _saved(spec.keyframe), spec.keyframe.arrays[STATE]

    def _in_the_simulator(self, spec: EpisodeSpec) -> EpisodeSpec:
        """The same beginning, where it is a recorded episode's as the simulator was then."""
        if not _is(spec, RECORDED):
            return spec
        assert spec.keyframe is not None, "it has a kind"
        path, start = (spec.keyframe.arrays[name].tobytes().decode() for name in ("dataset", "start"))
        try:
            if path not in self._states:
                self._states[path] = SimulatorStates(Path(path))
            return replace(spec, keyframe=self._states[path].at(start, spec.keyframe.step))
        except KeyframeError as error:
            raise KeyframeError(f"env.body: got 'simulated', which needs the robot's joints: {error}") from None

    def step(self, ids: Sequence[int], actions: np.ndarray) -> np.ndarray:
        """Move the bodies of `ids` by a chunk, float32 (B, H, A).

        Returns:
            Their states before the chunk and after each action, float32 (B, H + 1, S); NaN in what the body does not
            tell.
        """
        rows = list(ids)
        now = [body for i in ids if (body := self._now[i]) is not None]
        after, states = self._body.step(now, actions)
        found = np.concatenate([self._state[rows][:, None], states], 1)
        for i, body in zip(ids, after, strict=True):
            self._now[i] = body
        self._state[rows] = found[:, -1]
        return found

    def told(self, states: np.ndarray, planned: np.ndarray) -> torch.Tensor:
        """What `step` returned as the F frames' states, normalized, float32 (B, F, S).

        Args:
            planned: int64 (B,), how many actions of the chunk are executed.
        """
        model, length = self._world_model, states.shape[1] - 1
        ends = np.arange(model.frame_steps, length + model.frame_steps, model.frame_steps)
        last = np.minimum(ends, planned[:, None])
        told = torch.from_numpy(states[np.arange(len(states))[:, None], last]).to(model.device)
        return (told - model.state_mean) / model.state_std

    def arrays(self, env_id: int) -> dict[str, np.ndarray]:
        """Of the body of `env_id`, for a keyframe."""
        body = self._now[env_id]
        assert body is not None, "an environment runs, so its body has begun"
        own = {ENV: np.frombuffer(body.env.encode(), np.uint8), STATE: self._state[env_id].copy()}
        return own | {PREFIX + n: a for n, a in body.arrays.items()}

    def close(self) -> None:
        """Close the body."""
        self._body.close()


def _is(spec: EpisodeSpec, kind: str) -> bool:
    return spec.keyframe is not None and spec.keyframe.env == kind


def _saved(keyframe: Keyframe) -> Keyframe:
    if not {ENV, STATE} <= keyframe.arrays.keys():
        raise ValueError(
            "keyframe: was saved where no simulated body moved, and does not say where the robot's joints are; save it "
            "in this environment, or set env.body=learned with a world model without kinematics=body"
        )
    arrays = {n.removeprefix(PREFIX): array for n, array in keyframe.arrays.items() if n.startswith(PREFIX)}
    return Keyframe(keyframe.arrays[ENV].tobytes().decode(), keyframe.task, keyframe.step, arrays)
