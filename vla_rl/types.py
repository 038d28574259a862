"""Data types: observations, action chunks, steps, episodes.

Everything here is numpy, so that simulators, robots and datasets need no torch.

Shape legend, used throughout the project:
    B environments (a batch), H steps in an action chunk, A action dimensions,
    S state dimensions, T frames, K chunks in an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

Split = Literal["train", "validation", "eval"]
SPLITS: tuple[Split, ...] = ("train", "validation", "eval")

# Who acted: the policy; a scripted expert or a person who demonstrates a whole episode; a person who drives back to
# where the policy knows its way, and then completes the sub-task (RaC); "imagined": a policy in a world model, so none
# of it happened; the way back along the executed path. Decoded datasets hold positions in this tuple: add at its end.
ControlSource = Literal["policy", "expert", "recovery", "correction", "imagined", "demo", "rewind"]
CONTROL_SOURCES: tuple[ControlSource, ...] = (
    "policy", "expert", "recovery", "correction", "imagined", "demo", "rewind",
)  # fmt: skip
HUMAN_SOURCES: tuple[ControlSource, ...] = ("expert", "recovery", "correction", "demo")

# Of `Episode.inputs` that a process keeps of one rollout: 14,000 images of 224 pixels. What does not fit is prepared
# again whenever it is needed.
MAX_INPUT_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Observation:
    """What a policy sees, for B environments.

    Attributes:
        images: camera name -> uint8 (B, height, width, 3), upright RGB.
        state: float32 (B, S), proprioception. LIBERO's convention, kept by all our
            simulators, is S = 8: end-effector position in meters (3), axis-angle in
            radians (3), the two finger joint positions in meters (2).
        instruction: B strings.
        is_prepared: the images are what a policy's `prepare` made of them: any arrays (B, ...), by any names.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    instruction: list[str]
    is_prepared: bool = False

    @property
    def batch_size(self) -> int:
        return len(self.instruction)

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.state.nbytes + sum(image.nbytes for image in self.images.values())

    def select(self, indices: Sequence[int] | np.ndarray) -> Observation:
        """The observation of the environments at `indices`, in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return Observation(
            images={name: image[rows] for name, image in self.images.items()},
            state=self.state[rows],
            instruction=[self.instruction[i] for i in rows],
            is_prepared=self.is_prepared,
        )

    def row(self, row: int) -> Observation:
        """The observation of one environment, not copied: it keeps this one's memory."""
        images = {name: image[row : row + 1] for name, image in self.images.items()}
        return Observation(images, self.state[row : row + 1], self.instruction[row : row + 1], self.is_prepared)

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """One observation from several with the same cameras and state size, in order; all prepared, or none."""
        if not parts:
            raise ValueError("Observation.concatenate needs at least one observation, got none")
        return Observation(
            images={name: np.concatenate([p.images[name] for p in parts]) for name in parts[0].images},
            state=np.concatenate([p.state for p in parts]),
            instruction=[text for p in parts for text in p.instruction],
            is_prepared=parts[0].is_prepared,
        )


@dataclass(frozen=True)
class ActionChunk:
    """H actions for each of B environments, and what RL needs of how they were drawn.

    Attributes:
        actions: float32 (B, H, A), in the environment's own units.
        tokens: int64 (B, H, A), the drawn bin of each action dimension (0 .. bins-1), for
            policies with discrete actions; (B, N), -1 behind their end, where a chunk is a
            sequence of tokens that all its actions depend on (pi0-FAST); None otherwise.
        path: float32 (B, ...), what a continuous policy drew: the denoising path of a flow policy, or the
            normalized actions of a density over actions; None otherwise.
        log_prob: float32 (B, H, A), log-probability of each drawn component at the
            temperature it was drawn with; None for a greedy or scripted chunk. Of a chunk that
            is one sequence of tokens: the chunk's, in the first component, and 0 elsewhere.
        value: float32 (B,), the critic's estimate at the observation; None without a critic.
        version: int64 (B,), updates (RL iterations) that the policy which drew each chunk had seen; None: as many as
            the one that learns from it.
    """

    actions: np.ndarray
    tokens: np.ndarray | None = None
    path: np.ndarray | None = None
    log_prob: np.ndarray | None = None
    value: np.ndarray | None = None
    version: np.ndarray | None = None

    def select(self, indices: Sequence[int] | np.ndarray) -> ActionChunk:
        """The chunks of the environments at `indices`, in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return replace(self, **{name: part[rows] for name, part in vars(self).items() if part is not None})

    @staticmethod
    def concatenate(parts: Sequence[ActionChunk]) -> ActionChunk:
        """Return one chunk batch from several that carry the same fields, in order."""
        names = [name for name, part in vars(parts[0]).items() if part is not None]
        return ActionChunk(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class Keyframe:
    """A full simulator state from which an episode can start again exactly.

    Attributes:
        env: kind of the environment that wrote it ("tabletop", "libero", ...).
        task: the task it belongs to.
        step: control steps already taken in the episode.
        arrays: named arrays, the environment's own; enough for an exact restore.
    """

    env: str
    task: str
    step: int
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class EpisodeSpec:
    """Which episode to start: a task and an initial state.

    The same spec gives the same initial state, always. Splits are disjoint by construction:
    an environment derives the state from (task, split, index), or, for benchmarks with
    official initial states, takes those for `eval` alone.

    Attributes:
        task: task name, one of the environment's `tasks`.
        split: "train" to learn from, "validation" to choose checkpoints, "eval" for the claim.
        index: number of the initial state in its split, from 0.
        instruction: overrides the task's own instruction when not None.
        keyframe: start from this stored state in place of (split, index).
        perturbation: what differs from the usual episode, "camera-2" (axis and level) or "clean"; None: as the
            environment's section says.
        place: which of a run's episodes that begin like this it is, from 0: a world model imagines each otherwise;
            None: the environment counts them.
        group: the place of the first episode of its group; None: it is in none.
    """

    task: str
    split: Split = "train"
    index: int = 0
    instruction: str | None = None
    keyframe: Keyframe | None = field(default=None, compare=False)
    perturbation: str | None = None
    place: int | None = field(default=None, compare=False)
    group: int | None = field(default=None, compare=False)

    def member(self, number: int) -> EpisodeSpec:
        """That of another episode of the same group, of whose first one this is; from 0."""
        return self if self.place is None else replace(self, place=self.place + number)


@dataclass(frozen=True)
class StepResult:
    """What B environments answer to one action chunk.

    An environment that ends inside a chunk executes no further action of it; the rest of its
    row is zero/False. The observation is the one after the last executed action.

    Attributes:
        obs: observation after the chunk, B environments.
        reward: float32 (B, H), reward of each executed step (sparse tasks: 1 at success).
        terminated: bool (B, H), the episode ended for good at this step: a success, or a failure that nothing follows.
        truncated: bool (B, H), the horizon was reached at this step without termination.
        num_steps: int64 (B,), how many of the H actions were executed.
        success: bool (B,), the episode has succeeded; never set together with `lost`.
        lost: bool (B,), the episode broke (its worker died or hung) and must not be counted.
        info: extras. With frame recording on: "frames" is a list of B dicts
            camera -> uint8 (num_steps, height, width, 3) and "states" a list of B arrays
            float32 (num_steps, S), both *after* each executed step. Where the environment tells objects' poses:
            "objects" is a list of B arrays float32 (num_steps + 1, K, 4), x, y, z (meters) and yaw (radians) of
            `EnvSpec.objects` before each executed step and after the last. Others are arrays (B,) of numbers.
    """

    obs: Observation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: np.ndarray
    success: np.ndarray
    lost: np.ndarray
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> np.ndarray:
        """bool (B,): the episode ended within this chunk, for whatever reason."""
        return self.terminated.any(1) | self.truncated.any(1) | self.lost

    def row(self, row: int) -> StepResult:
        """The part of one environment, not copied: it keeps this one's memory."""
        arrays = (self.reward, self.terminated, self.truncated, self.num_steps, self.success, self.lost)
        info = {key: values[row : row + 1] for key, values in self.info.items()}
        return StepResult(self.obs.row(row), *(array[row : row + 1] for array in arrays), info=info)


PrefixSchedule = Literal["ZEROS", "ONES", "LINEAR", "EXP"]  # LeRobot's names: of the weight after the frozen actions
PREFIX_SCHEDULES: tuple[PrefixSchedule, ...] = ("ZEROS", "ONES", "LINEAR", "EXP")


@dataclass(frozen=True)
class ActionPrefix:
    """What B robots go on to do while their next chunk is computed, for real-time chunking (arXiv 2506.07339).

    Attributes:
        actions: float32 (B, P, A) in the environment's units, from the step of the observation on.
        num_frozen: how many of them will be over before the new chunk arrives; the paper's d.
        execution_horizon: how many of them the new chunk minds, falling off after the frozen ones.
        max_guidance_weight: bound on the pull towards them.
        prefix_attention_schedule: how it falls off. None, for each of the three: the policy's own.
    """

    actions: np.ndarray
    num_frozen: int = 0
    execution_horizon: int | None = None
    max_guidance_weight: float | None = None
    prefix_attention_schedule: PrefixSchedule | None = None

    def check(self, rows: int, most: int, action_dim: int) -> None:
        """Raise ValueError where it has other rows, no or more than `most` actions, or fewer than are frozen."""
        given = self.actions.shape
        if len(given) != 3 or given[::2] != (rows, action_dim) or not 1 <= given[1] <= most:
            raise ValueError(
                f"prefix: expected 1 to {most} actions, (B, P, A) with B {rows} and A {action_dim}; got shape {given}"
            )
        if not 0 <= self.num_frozen <= given[1]:
            raise ValueError(f"num_frozen: got {self.num_frozen}, must be 0 to {given[1]} (the prefix's length)")


@dataclass(frozen=True)
class EnvSpec:
    """Facts about an environment that a policy or a dataset must agree with.

    Attributes:
        kind: "tabletop", "libero", ...
        tasks: task name -> its instruction.
        horizon: task name -> control steps before truncation.
        cameras: camera names, in order.
        image_size: (height, width) in pixels.
        state_dim: S.
        action_dim: A.
        action_low, action_high: float32 (A,), bounds that the environment clips to.
        control_hz: control steps per second of simulated time; a dataset's fps.
        num_eval_states: task name -> number of official initial states in `eval`;
            empty when `eval` is unlimited.
        projections: camera that stands still -> 3 x 4 matrix from meters, in the frame of `state[:3]`, to
            homogeneous image coordinates in [0, 1] (x right, y down); empty where not known.
        approximation: how it deviates from what it stands for, so that no figure is measured in it; empty: not at all.
        suite: which of a simulator's sets of tasks; empty where there is one.
        labels: task name -> what tables and plots call it, its number in the suite first; empty: by its name.
        groups: task name -> what a benchmark sums it up by, (dimension, difficulty level or 0); empty: tasks alone.
        objects: names of the K objects whose poses `StepResult.info` tells; empty: it tells none.
        official: what of a benchmark's protocol -> (as it is here, as the benchmark has it), for pages; empty: none.
        action_names, state_names: of the A and S numbers; empty: by their numbers.
    """

    kind: str
    tasks: dict[str, str]
    horizon: dict[str, int]
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    state_dim: int
    action_dim: int
    action_low: np.ndarray
    action_high: np.ndarray
    control_hz: float
    num_eval_states: dict[str, int] = field(default_factory=dict)
    projections: dict[str, np.ndarray] = field(default_factory=dict)
    approximation: str = ""
    suite: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[str, int]] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    official: dict[str, tuple[str, str]] = field(default_factory=dict)
    action_names: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What headings call it: "tabletop", "libero/libero_goal"."""
        return f"{self.kind}/{self.suite}" if self.suite else self.kind


@dataclass
class Episode:
    """One finished episode: K decisions of a policy and what came of them.

    Attributes:
        spec: which initial state.
        obs: K observations, before each chunk (batch K).
        chunks: the K chunks drawn (batch K).
        reward: float32 (K, H). terminated, truncated: bool (K, H). num_steps: int64 (K,).
        success: the task was solved.
        group: episodes with the same group number started from the same state (GRPO).
        final_obs: observation after the last chunk (batch 1), for bootstrapping.
        lost: broken by its worker; carries no usable outcome.
        frames: camera -> uint8 (length, height, width, 3), after each executed control step, and
        states: float32 (length, S) likewise; None unless the environment records frames.
        info: what else the environment said of each chunk, name -> (K,).
        inputs: what the policy's `prepare` made of `obs`; None where that is `obs` itself, or it was not kept.
    """

    spec: EpisodeSpec
    obs: Observation
    chunks: ActionChunk
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: np.ndarray
    success: bool
    final_obs: Observation
    group: int = 0
    lost: bool = False
    frames: dict[str, np.ndarray] | None = None
    states: np.ndarray | None = None
    info: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: Observation | None = None

    @property
    def num_chunks(self) -> int:
        return int(self.num_steps.shape[0])

    @property
    def length(self) -> int:
        """Control steps executed."""
        return int(self.num_steps.sum())

    @property
    def total_reward(self) -> float:
        return float(self.reward.sum())
