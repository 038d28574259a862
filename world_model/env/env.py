"""The world model as an environment: `vla_rl.interfaces.VecEnv`, imagined from real first frames.

    env = build_component("env", {"kind": "world_model", "path": "pretrained:tabletop", "first_frames": {...}}).build()

The world model decides what is seen every G control steps, and whether the instruction has been carried out by then. So
an episode ends with the last action of a frame: `terminated` with reward 1 at the first frame that counts as a success
(see `world_model.imagination`), `truncated` where the horizon is reached, where futures disagree too much, or where a
branch ends (`branch_frames`), then worth the value. What is left of the chunk is not executed and counts for nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.data.keyframes import RECORDED
from vla_rl.interfaces import Admission
from vla_rl.rollout.body import Body
from vla_rl.rollout.env_checks import (
    EnvStatus,
    check_num_envs,
    check_running,
    check_specs,
    checked_actions,
    checked_ids,
)
from vla_rl.rollout.success import PENALTY, PROBABILITY
from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe, Observation, StepResult
from world_model.config import ImaginationConfig
from world_model.data.body_moves import moves_of
from world_model.data.initial_frames import InitialFrames, RecordedPrefixes, remember
from world_model.env.bodies import KIND, Bodies, memory_arrays, saved_memory
from world_model.env.recorded import RecordedImagining, Seen, read_chunk
from world_model.imagination.chunk import ImaginedChunk, imagine_chunk
from world_model.imagination.reward import LIKELY, branch_steps, check_reward, judge, leaf_values, penalties
from world_model.metadata import shortened
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.noise import RepeatCounter, start_name
from world_model.types import Frames

log = logging.getLogger(__name__)


class WorldModelEnv:
    """B imagined environments. See the module's text and `VecEnv`.

    `StepResult.info` has, for each environment, "discarded" (bool: a predicted success did not hold under new noise)
    and "disagreement" (float32: spread of the futures); where a penalty lowers rewards also "penalty" (float32: by how
    much) and "action_error" (see `reward.penalties`); where they are a verdict, "probability" (float32: the highest of
    success in the chunk), if the world model has one. Recorded frames repeat the last one that was imagined until there
    is a new one.

    A keyframe of a recorded episode (`KeyframeSet.recorded`) starts with the real frames that led there in memory. One
    of a real environment is where the first frames' environment is set to. One of this environment holds what the world
    model remembers, its noise too, so that the same actions lead to the same future; that is for the first episode that
    starts there, and others have noise of their own.

    Args:
        first_frames: of episodes; closed with the environment.
        spec: the tasks, with how long they take; None takes those of the world model. The environment's own `spec` is
            this with the trust horizon.
        seed: an episode's noise is drawn from it, its spec, and how many have begun there before.
        admission: what trust said of the world model, for the run's report.
        body: moves the robot alone; closed with the environment. None: all is imagined.
        shows_body: the body tells the robot's state, in what is shown and remembered; False: it is imagined, and the
            body is a condition of the dynamics.

    Raises:
        ValueError: num_envs below 1.
        ConfigError: the world model, or what is known of it, lacks what the config asks for.
    """

    def __init__(
        self,
        world_model: WorldModel,
        first_frames: InitialFrames,
        config: ImaginationConfig,
        num_envs: int,
        *,
        spec: EnvSpec | None = None,
        seed: int = 0,
        record_frames: bool = False,
        admission: Admission | None = None,
        body: Body | None = None,
        shows_body: bool = True,
    ) -> None:
        check_num_envs(num_envs)
        self.world_model, self.config, self.num_envs = world_model, config, num_envs
        self.observed_every = world_model.frame_steps  # Control steps from one new image to the next.
        spec = spec or world_model.metadata.env_spec()
        self.spec, self._horizon = shortened(spec, config.horizon), spec.horizon
        self.record_frames, self.admission = record_frames, admission
        self._first_frames, self._seed = first_frames, seed
        self._prefixes = RecordedPrefixes(world_model)
        self._repeats = RepeatCounter()
        if body is None and world_model.metadata.body:
            raise ValueError("body: got None, and the world model's dynamics has kinematics=body, which needs one")
        self._bodies = None if body is None else Bodies(body, world_model, num_envs)
        self._shows_body = shows_body
        self._memory: Memory | None = None
        self._recorded: RecordedImagining | None = None
        if config.compile and world_model.device.type != "cpu":
            self._recorded = RecordedImagining(world_model, config)
        self._shown = np.zeros((num_envs, len(self.spec.cameras), *self.spec.image_size, 3), np.uint8)
        self._state = np.zeros((num_envs, self.spec.state_dim), np.float32)
        self._task, self._instruction = [""] * num_envs, [""] * num_envs
        self._status: list[EnvStatus] = ["never started"] * num_envs
        # Control steps of the episode, and how many of them were imagined since a real frame.
        self._steps, self._imagined = np.zeros((2, num_envs), np.int64)
        self._paid = np.zeros(num_envs, np.float32)  # Reward of the episode so far.
        self._warned = False
        self._branch = branch_steps(world_model, config)
        check_reward(world_model, config)

    # --- starting ---------------------------------------------------------------------------

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """Start one episode in each given environment (see `VecEnv.reset`).

        Raises:
            ValueError: also for a keyframe of another task, simulator or world model, or without the robot's body.
        """
        ids = checked_ids(env_ids, self.num_envs)
        check_specs(specs, ids, self.spec)
        for spec in specs:
            if spec.keyframe is not None and spec.keyframe.task != spec.task:
                raise ValueError(f"keyframe: is of task {spec.keyframe.task!r}, the episode of {spec.task!r}")
        self._set_status(ids, "ended")
        if self._bodies is not None:
            self._bodies.begin(ids, specs)
        real, recorded = [], []
        for i, spec in zip(ids, specs, strict=True):
            kind = spec.keyframe.env if spec.keyframe else ""
            if spec.keyframe is not None and kind == KIND:
                self._restore(i, spec, spec.keyframe)
            else:
                (recorded if kind == RECORDED else real).append((i, spec))
        if real:
            self._begin([i for i, _ in real], [spec for _, spec in real])
        if recorded:
            self._begin_recorded([i for i, _ in recorded], [spec for _, spec in recorded])
        for i, spec in zip(ids, specs, strict=True):
            self._task[i] = spec.task
            self._paid[i] = float(spec.keyframe.arrays.get("paid", 0.0)) if spec.keyframe else 0.0
        self._set_status(ids, "running")
        return self._observation(ids)

    def _begin(self, ids: Sequence[int], specs: Sequence[EpisodeSpec]) -> None:
        """Start at real frames."""
        obs = self._first_frames.observe(specs)
        images = np.stack([obs.images[camera] for camera in self.spec.cameras], 1)
        first = self.world_model.encode(images[:, None], obs.state[:, None])
        positions = [self._repeats.next(spec) for spec in specs]
        seeds = [self._seed_of(*one) for one in zip(specs, positions, strict=True)]
        self._remember(ids, self.world_model.begin(first, obs.instruction, seeds))
        rows = list(ids)
        self._shown[rows], self._state[rows], self._imagined[rows] = images, obs.state, 0
        for i, spec, instruction in zip(ids, specs, obs.instruction, strict=True):
            self._steps[i] = spec.keyframe.step if spec.keyframe else 0
            self._instruction[i] = instruction

    def _begin_recorded(self, ids: Sequence[int], specs: Sequence[EpisodeSpec]) -> None:
        """Start in the middle of recorded episodes."""
        prefixes = [self._prefixes.of(spec) for spec in specs]
        positions = [self._repeats.next(spec) for spec in specs]
        seeds = [self._seed_of(*one) for one in zip(specs, positions, strict=True)]
        self._remember(ids, remember(self.world_model, prefixes, seeds))
        for i, spec, prefix in zip(ids, specs, prefixes, strict=True):
            assert spec.keyframe is not None, "only episodes with a keyframe begin here"
            self._shown[i], self._state[i] = prefix.images, prefix.state
            self._steps[i], self._imagined[i] = spec.keyframe.step, 0
            self._instruction[i] = prefix.instruction

    def _restore(self, env_id: int, spec: EpisodeSpec, keyframe: Keyframe) -> None:
        """Start at a keyframe of this environment."""
        arrays, position = keyframe.arrays, self._repeats.next(spec)
        instruction = spec.instruction or arrays["instruction"].tobytes().decode()
        seed = None if position == 0 else self._seed_of(spec, position)
        self._remember([env_id], saved_memory(self.world_model, keyframe, instruction, seed))
        self._shown[env_id], self._state[env_id] = arrays["images"], arrays["state"]
        self._steps[env_id], self._imagined[env_id] = keyframe.step, int(arrays["imagined"])
        self._instruction[env_id] = instruction

    def _remember(self, ids: Sequence[int], memory: Memory) -> None:
        """Put episodes' memory where it belongs."""
        if self._are_all(ids) and (self._recorded is None or self._memory is None):
            self._memory = memory
        else:
            # Environments never started are filled with any; nothing reads them before their own reset.
            whole = memory.select([0] * self.num_envs) if self._memory is None else self._memory
            self._memory = whole.put(ids, memory)

    def deal(self, specs: Sequence[EpisodeSpec], size: int = 1) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
        return self._repeats.deal(specs, size)

    def _seed_of(self, spec: EpisodeSpec, position: int | None) -> int:
        text = f"{self._seed}/{start_name(spec)}/{position}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())

    # --- stepping ---------------------------------------------------------------------------

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """Imagine a chunk in each given environment (see `VecEnv.step`)."""
        ids = checked_ids(env_ids, self.num_envs)
        array = checked_actions(actions, ids, self.spec.action_dim)
        check_running("step", ids, self._status)
        batch, length = array.shape[:2]
        self._warn_of_partial_frames(length)
        assert self._memory is not None, "an environment runs, so it has been reset"
        memory = self._memory if self._recorded or self._are_all(ids) else self._memory.select(ids)
        left = self._steps_left(ids)
        planned = np.minimum(length, left)
        told = None
        if self._bodies is not None:
            states = self._bodies.step(ids, array)
            told = self._bodies.told(states, planned) if self._shows_body else None
            if self.world_model.metadata.body:
                array = np.concatenate([array, moves_of(states)], 2)
        chunk, seen = self._ahead(ids, memory, array, planned, told)
        lost = self._broken(ids, seen)
        value, ends = judge(seen.worth, self.config, self._paid[ids])
        success = ends & ~lost[:, None]
        succeeded = success.any(1)
        frame_steps = self.world_model.frame_steps
        num_steps = np.where(succeeded, np.minimum((success.argmax(1) + 1) * frame_steps, planned), planned)
        num_steps = np.where(lost, 0, num_steps)
        reward = np.zeros((batch, length), np.float32)
        terminated, truncated = np.zeros((2, batch, length), bool)
        row, last = np.arange(batch), np.maximum(num_steps - 1, 0)
        reached = np.where(lost, self._paid[ids], value[row, last // frame_steps])
        leaf = ~succeeded & ~lost & self._at_leaf(ids, planned)
        if leaf.any():
            horizon = np.array([self._horizon[self._task[i]] for i in ids])
            steps_left = (horizon - self._steps[ids] - planned)[leaf]
            frame = (last // frame_steps)[leaf]
            place = np.array(ids)[leaf] if self._recorded else np.flatnonzero(leaf)
            reached[leaf] = leaf_values(self.world_model, memory, chunk, place, frame, steps_left)
        lowered = penalties(seen.action_error, num_steps, frame_steps, self.config)
        reward[row, last] = reached - self._paid[ids] - lowered.get(PENALTY, 0.0)
        self._paid[ids] = reached
        terminated[row, last] = succeeded
        truncated[row, last] = ~succeeded & ~lost & (planned == left)

        succeeded = succeeded | (truncated.any(1) & (reached > LIKELY))
        going = ~(succeeded | truncated.any(1) | lost)
        if going.any():  # What has ended is remembered too, and read by nothing before its reset.
            if self._recorded:
                self._memory = self._recorded.extend(memory, chunk.frames, chunk.actions)
            else:
                self._remember(ids, self.world_model.extend(memory, chunk.frames, chunk.actions))
        self._steps[ids] += num_steps
        self._imagined[ids] += num_steps
        info = {
            "discarded": seen.discarded & ~lost,
            "disagreement": seen.disagreement,
            **lowered,
            **_likely(seen, last // frame_steps),
            **self._show(ids, chunk, seen, num_steps),
        }
        self._set_status([i for i, goes_on in zip(ids, going, strict=True) if not goes_on], "ended")
        return StepResult(
            self._observation(ids), reward, terminated, truncated, num_steps, np.asarray(succeeded), lost, info
        )

    def _ahead(
        self, ids: Sequence[int], memory: Memory, actions: np.ndarray, planned: np.ndarray, told: torch.Tensor | None
    ) -> tuple[ImaginedChunk, Seen]:
        """What follows in the episodes of `memory`, and what is seen of those at `ids`."""
        if self._recorded is None:
            done = self.world_model.actions(actions, planned)
            chunk = imagine_chunk(self.world_model, memory, done, self.config, states=told)
            return chunk, read_chunk(self.world_model, memory, chunk, self.config, self.record_frames)
        if self._are_all(ids):
            return self._recorded.imagine(memory, self.world_model.actions(actions, planned), told)
        rows = list(ids)
        every = np.zeros((self.num_envs, *actions.shape[1:]), np.float32)
        every[rows], steps = actions, np.zeros(self.num_envs, np.int64)
        steps[rows] = planned
        if told is not None:
            nothing = told.new_full((self.num_envs, *told.shape[1:]), torch.nan)
            told = nothing.index_copy(0, torch.tensor(rows, device=told.device), told)
        chunk, seen = self._recorded.imagine(memory, self.world_model.actions(every, steps), told)
        return chunk, seen.select(rows)

    def _steps_left(self, ids: Sequence[int]) -> np.ndarray:
        """Control steps until an episode is truncated, int64 (B,), at least 1."""
        horizon = np.array([self._horizon[self._task[i]] for i in ids])
        left = horizon - self._steps[ids]
        if self.config.horizon is not None:
            left = np.minimum(left, self.config.horizon - self._imagined[ids])
        if self._branch is not None:
            left = np.minimum(left, self._branch - self._imagined[ids])
        return np.maximum(left, 1)

    def _at_leaf(self, ids: Sequence[int], planned: np.ndarray) -> np.ndarray:
        """bool (B,): with so many more control steps a branch ends, before its task's horizon."""
        if self._branch is None:
            return np.zeros(len(ids), bool)
        horizon = np.array([self._horizon[self._task[i]] for i in ids])
        return (self._imagined[ids] + planned >= self._branch) & (self._steps[ids] + planned < horizon)

    def _broken(self, ids: Sequence[int], seen: Seen) -> np.ndarray:
        """bool (B,): what was imagined is not finite."""
        lost = ~seen.finite
        for i in np.flatnonzero(lost).tolist():
            log.warning("environment %d: the world model imagined NaN or infinity; its episode is lost", ids[i])
        return lost

    def _show(self, ids: Sequence[int], chunk: ImaginedChunk, seen: Seen, num_steps: np.ndarray) -> dict[str, Any]:
        """Set what is seen after the last executed action; with recording, what was seen after each."""
        frame_steps = self.world_model.frame_steps
        last = np.maximum(-(-num_steps // frame_steps) - 1, 0)
        row = np.arange(len(ids))
        states, images = seen.states, seen.images
        recorded: dict[str, Any] = {}
        if self.record_frames:
            assert images is not None, "they were asked for"
            every_image = np.concatenate([self._shown[ids][:, None], images], 1)
            every_state = np.concatenate([self._state[ids][:, None], states], 1)
            recorded = {"frames": [], "states": []}
            for i, count in enumerate(num_steps.tolist()):
                number = np.arange(1, count + 1) // frame_steps
                number[-1:] = last[i] + 1
                views = every_image[i, number].swapaxes(0, 1)
                recorded["frames"].append(dict(zip(self.spec.cameras, views, strict=True)))
                recorded["states"].append(every_state[i, number])
        if images is not None:
            shown = images[row, last]
        else:
            final = Frames(chunk.frames.latents[row, last][:, None], chunk.frames.states[row, last][:, None])
            shown = self.world_model.decode(final)[:, 0]
        lost = num_steps == 0
        self._shown[ids] = np.where(lost[:, None, None, None, None], 0, shown)
        self._state[ids] = np.where(lost[:, None], 0, states[row, last])
        return recorded

    def _observation(self, ids: Sequence[int]) -> Observation:
        images = {camera: self._shown[ids, view] for view, camera in enumerate(self.spec.cameras)}
        return Observation(images, self._state[ids], [self._instruction[i] for i in ids])

    def _set_status(self, ids: Sequence[int], status: EnvStatus) -> None:
        for i in ids:
            self._status[i] = status

    def _are_all(self, ids: Sequence[int]) -> bool:
        return list(ids) == list(range(self.num_envs))

    def _warn_of_partial_frames(self, length: int) -> None:
        frame_steps = self.world_model.frame_steps
        if length % frame_steps and not self._warned:
            self._warned = True
            log.warning(
                "chunks have %d actions, the world model's frames %d: each chunk ends in a frame of %d, which it has "
                "seen only at the end of episodes. Fit it with a frame_steps that divides the chunk.",
                length,
                frame_steps,
                length % frame_steps,
            )

    # --- keyframes and the rest -------------------------------------------------------------

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """What is remembered of each given environment's episode, which must not have ended."""
        ids = checked_ids(env_ids, self.num_envs)
        check_running("save_state", ids, self._status)
        assert self._memory is not None, "an environment runs, so it has been reset"
        keyframes = []
        for i in ids:
            arrays = memory_arrays(self._memory.select([i])) | {
                "images": self._shown[i].copy(),
                "state": self._state[i].copy(),
                "imagined": self._imagined[i].copy(),
                "paid": self._paid[i].copy(),
                "instruction": np.frombuffer(self._instruction[i].encode(), np.uint8),
            }
            if self._bodies is not None:
                arrays |= self._bodies.arrays(i)
            keyframes.append(Keyframe(KIND, self._task[i], int(self._steps[i]), arrays))
        return keyframes

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """There is none: nothing here knows the true state."""
        raise NotImplementedError("world_model has no scripted expert; collect demonstrations in a simulator")

    def state(self) -> dict[str, int]:
        """For a checkpoint, JSON-able: how many episodes have begun where; all that `reset` does not set anew."""
        return self._repeats.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """Undo `state`: the same resets then draw the same noise."""
        self._repeats.load_state(state)

    def close(self) -> None:
        """Close the first frames and forget all episodes. May be called twice."""
        self._first_frames.close()
        if self._bodies is not None:
            self._bodies.close()
        self._memory = None
        self._set_status(range(self.num_envs), "ended")


def _likely(seen: Seen, last: np.ndarray) -> dict[str, np.ndarray]:
    """The highest probability of success up to each episode's last executed frame, float32 (B,), where it is told."""
    if seen.probability is None:
        return {}
    executed = np.arange(seen.probability.shape[1]) <= last[:, None]
    return {PROBABILITY: np.where(executed, seen.probability, 0).max(1)}
