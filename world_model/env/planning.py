"""Best of N: draw several action chunks, imagine each, execute the one whose imagined future is judged best.

As V-GPS (arXiv 2410.13816) ranks samples by a value function and Cosmos Policy by values of imagined states; here the
score is the success head's highest logit over the imagined frames, or the value's at the last of them. All candidates
of a decision are imagined with the same noise, so that what differs between them is what they do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from vla_rl.common.row_noise import RowGenerator, by_row
from vla_rl.config import ConfigError
from vla_rl.interfaces import PlanningConfig, PlanningPolicy, Policy
from vla_rl.types import ActionChunk, Observation
from world_model.config import ImaginationConfig
from world_model.imagination.chunk import imagine_chunk
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel, load_world_model
from world_model.noise import NoiseStream
from world_model.types import Frames

FUTURES = 2  # Of a candidate, where a bonus asks how far they disagree.


class PlanConfig(PlanningConfig):
    """Of several action chunks that the policy draws, execute the one whose imagined future looks most successful."""

    kind: Literal["best_of_n"] = "best_of_n"
    world_model: str | Path = Field(description="A world model's folder, or pretrained:NAME.")
    candidates: PositiveInt = Field(default=8, description="N, action chunks drawn at each decision.")
    chunks: PositiveInt = Field(
        default=2, description="Chunks imagined of each: the candidate, then what the policy does next, greedily."
    )
    judge: Literal["success", "value"] = Field(
        default="success",
        description="success: the highest logit of success in the imagined frames. value: that of success by the end, "
        "at the last of them, for tasks that are much longer than what is imagined; the world model needs a value.",
    )
    temperature: PositiveFloat = Field(default=1.0, description="At which the candidates are drawn.")
    bonus: NonNegativeFloat = Field(
        default=0.0,
        description="Added to a candidate's score, a logit, for each time that its imagined futures disagree as much "
        "as the candidates' do on average. Real episodes then go where the world model is unsure (COPlanner); for "
        "collecting, collect.plan. 0: none.",
    )
    choose: Literal["best", "random"] = Field(
        default="best", description="random: any of the candidates, the control; nothing is imagined."
    )

    @model_validator(mode="after")
    def _bonus_is_for_the_best(self) -> PlanConfig:
        if self.bonus and self.choose == "random":
            raise ConfigError(
                f"plan.bonus: got {self.bonus:g} with choose 'random', which asks no score; set bonus to 0"
            )
        return self

    def build(self, policy: Policy, device: str = "cpu") -> PlanningPolicy:
        """The policy that plans.

        Raises:
            ValueError: no such world model, or one of other cameras or another chunk length than the policy's.
            ConfigError: `judge` is the value, and the world model has none.
        """
        return cast(PlanningPolicy, Planner(policy, self, device))  # What it lacks, it takes from the policy.

    def protocol(self) -> str:
        bonus = f", with a bonus of {self.bonus:g} for disagreement" if self.bonus else ""
        judge = ", by its value" if self.judge == "value" and self.choose == "best" else ""
        return f"{self.choose} of {self.candidates} chunks imagined in a world model{judge}{bonus}"


class Planner:
    """A policy that plans with a world model. It watches whole episodes: `watch` says which row is which.

    Attributes:
        seconds: of each `act`, and `num_decisions`, how many chunks they chose.

    Raises:
        ValueError: the world model lacks a camera of the policy's, or its frames are not the policy's chunks.
        ConfigError: the value is to judge, and the world model has none.
    """

    def __init__(self, policy: Policy, config: PlanConfig, device: str = "cpu") -> None:
        self.policy, self.config = policy, config
        self.world_model = load_world_model(config.world_model, device).compute_in("auto")
        check_fits(self.world_model, policy, "plan.world_model")
        if config.judge == "value":
            self.world_model.check_value()
        self.seconds: list[float] = []
        self.num_decisions = 0
        self._ids: list[int] = []
        self._begins: list[bool] = []
        self._tasks: list[str] = []
        self._memory: Memory | None = None
        self._last: dict[int, np.ndarray] = {}
        self._decision: dict[int, int] = {}  # Of an environment's episode, from 0.
        self._drawn: list[int] = []  # What each row's noise of this decision comes from, beside the seed.

    def __getattr__(self, name: str) -> Any:
        """All else is the policy's: chunk size, cameras, mode, device."""
        return getattr(self.policy, name)

    def watch(self, env_ids: Sequence[int], begins: Sequence[bool], tasks: Sequence[str]) -> None:
        """Before each `act`: the environment of each row, whether its episode begins, and its task."""
        self._ids, self._begins, self._tasks = list(env_ids), list(begins), list(tasks)

    def prepare(self, obs: Observation) -> Observation:
        """Nothing: the world model looks at the images themselves."""
        return obs

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """The chosen chunk of each row. At temperature 0 the first candidate is the policy's greedy chunk."""
        if len(self._ids) != obs.batch_size:
            raise ValueError(
                f"planning: got {obs.batch_size} observations and knows of {len(self._ids)} episodes; call watch first "
                "(vla_rl.rollout.runner does)"
            )
        started = time.perf_counter()
        count, size = self.config.candidates, obs.batch_size
        self._drawn = by_row(lambda shape, own: torch.randint(2**31, shape, generator=own), (size,), generator).tolist()
        self._see(obs)
        rows = np.repeat(np.arange(size), count)
        several = generator.select(rows.tolist()) if isinstance(generator, RowGenerator) else generator
        inputs = self.policy.prepare(obs)
        chunk = self.policy.act(inputs.select(rows), several, self.config.temperature)
        if temperature == 0:
            chunk = _with_first(chunk, self.policy.act(inputs, generator, 0.0), count)
        if self.config.choose == "random":
            best = np.array([np.random.default_rng(self._seed(row, 2)).integers(count) for row in range(size)])
        else:
            best = self._scores(chunk, rows).reshape(size, count).argmax(1)
        chosen = chunk.select(np.arange(size) * count + best)
        for env_id, actions in zip(self._ids, chosen.actions, strict=True):
            self._last[env_id] = actions
        self.num_decisions += size
        self.seconds.append(time.perf_counter() - started)
        return chosen

    def latency(self) -> dict[str, float]:
        """Milliseconds of a decision of all environments together (mean, 95th percentile), and per environment."""
        milliseconds = 1000 * np.array(self.seconds or [np.nan])
        return {
            "act_ms": float(milliseconds.mean()),
            "act_ms_p95": float(np.quantile(milliseconds, 0.95)),
            "decision_ms": float(milliseconds.sum() / max(self.num_decisions, 1)),
        }

    # --- what it remembers ---------------------------------------------------------------------

    def _see(self, obs: Observation) -> None:
        """Remember what is seen, with the chunk that led there."""
        images = views(self.world_model, obs, "plan.world_model")
        seen = self.world_model.encode(images[:, None], obs.state[:, None])
        new = [row for row, begins in enumerate(self._begins) if begins]
        old = [row for row, begins in enumerate(self._begins) if not begins]
        for row, begins in enumerate(self._begins):
            self._decision[self._ids[row]] = 0 if begins else self._decision[self._ids[row]] + 1
        if new:
            text = [obs.instruction[row] for row in new]
            seeds = [self._seed(row, 0) for row in new]
            self._remember(new, self.world_model.begin(seen.select(new), text, seeds))
        if old:
            assert self._memory is not None, "an episode that goes on has begun"
            actions = np.stack([self._last[self._ids[row]] for row in old])
            done = self.world_model.actions(actions, np.full(len(old), actions.shape[1]))
            memory = self._memory.select([self._ids[row] for row in old])
            self._remember(old, self.world_model.extend(memory, seen.select(old), done))

    def _remember(self, rows: Sequence[int], memory: Memory) -> None:
        """Put episodes' memory in their environments' places."""
        ids = [self._ids[row] for row in rows]
        size = max(self._ids) + 1
        if self._memory is None:
            self._memory = memory.select([0] * size)
        elif self._memory.size < size:
            self._memory = self._memory.select([*range(self._memory.size), *[0] * (size - self._memory.size)])
        self._memory = self._memory.put(ids, memory)

    # --- what it imagines ----------------------------------------------------------------------

    @torch.no_grad()
    def _scores(self, chunk: ActionChunk, rows: np.ndarray) -> np.ndarray:
        """float (rows,): what each candidate's imagined future is worth, a logit, and what `bonus` adds."""
        assert self._memory is not None, "what is seen has been remembered"
        world_model = self.world_model
        memory = self._memory.select([self._ids[row] for row in rows])
        seeds = [self._seed(row, 1) for row in rows]
        memory = replace(memory, noise=NoiseStream(seeds, world_model.device))
        best, bonus = np.full(len(rows), -np.inf), 0.0
        if self.config.bonus:  # First: imagining ahead writes into what is remembered.
            again = replace(memory, noise=NoiseStream(seeds, world_model.device))
            bonus = self.config.bonus * self._relative_disagreement(again, chunk.actions)
        for number, (before, frames) in enumerate(
            imagine_ahead(world_model, self.policy, memory, chunk.actions, self.config.chunks), start=1
        ):
            if self.config.judge == "success":
                score, _ = world_model.scores(before, frames)
                best = np.maximum(best, score.float().amax(1).cpu().numpy())
            elif number == self.config.chunks:
                left = self._steps_left(rows, number, chunk.actions.shape[1])
                left = np.repeat(left[:, None], frames.states.shape[1], 1)
                best = world_model.value_logits(before, frames, left)[:, -1].float().cpu().numpy()
        return best + bonus

    def _steps_left(self, rows: np.ndarray, chunks: int, size: int) -> np.ndarray:
        """int64 (rows,): control steps to each task's horizon, after `chunks` more chunks of `size` steps."""
        horizon = self.world_model.metadata.horizon
        ends = [horizon.get(self._tasks[row], max(horizon.values())) for row in rows]
        decided = np.array([self._decision[self._ids[row]] for row in rows])
        return np.maximum(np.array(ends) - (decided + chunks) * size, 0)

    def _relative_disagreement(self, memory: Memory, actions: np.ndarray) -> np.ndarray:
        """float (rows,): how far futures of each candidate disagree, over the mean of its decision's candidates."""
        world_model, config = self.world_model, ImaginationConfig(dual_noise=0, ensemble=FUTURES)
        done = world_model.actions(actions, np.full(len(actions), actions.shape[1]))
        spread = imagine_chunk(world_model, memory, done, config).disagreement.float().cpu().numpy()
        of_decision = spread.reshape(-1, self.config.candidates)
        return (of_decision / np.maximum(of_decision.mean(1, keepdims=True), 1e-9)).reshape(-1)

    def _seed(self, row: int, use: int) -> int:
        """Of a row's noise at this decision, by the episode's own generator: the same whatever others run beside it."""
        return int(np.random.SeedSequence([0, self._drawn[row], use]).generate_state(1)[0])


def _with_first(chunk: ActionChunk, first: ActionChunk, count: int) -> ActionChunk:
    """The candidates with each row's first one replaced; only the actions matter from here on."""
    actions = chunk.actions.copy()
    actions[::count] = first.actions
    return ActionChunk(actions)


@torch.no_grad()
def imagine_ahead(
    world_model: WorldModel, policy: Policy, memory: Memory, actions: np.ndarray, chunks: int
) -> Iterator[tuple[Memory, Frames]]:
    """Imagine chunks of actions, float32 (B, H, A), and then what the policy does next, greedily.

    Yields what is remembered before each of the `chunks`, and the frames that follow. `memory` is used no more after.
    """
    for number in range(chunks):
        done = world_model.actions(actions, np.full(len(actions), actions.shape[1]))
        frames = world_model.dynamics.imagine(memory.context, done, memory.noise)
        yield memory, frames
        if number < chunks - 1:
            memory = world_model.extend(memory, frames, done)
            images, states = world_model.decode(frames)[:, -1], world_model.states(frames)[:, -1]
            seen = {camera: images[:, view] for view, camera in enumerate(world_model.metadata.cameras)}
            actions = policy.act(Observation(seen, states, memory.instruction), None, 0.0).actions


def check_fits(world_model: WorldModel, policy: Policy, option: str) -> None:
    """A world model shows the policy's cameras and robot, and a frame for each of its chunks, by itself.

    Raises:
        ValueError: it does not; `option` is what named it.
    """
    metadata = world_model.metadata
    if metadata.body:
        raise ValueError(
            f"{option}: was fitted with kinematics=body, which asks a simulator where actions lead; choosing among "
            "chunks needs a world model with kinematics=delta_pose or none"
        )
    if lacking := sorted(set(policy.cameras) - set(metadata.cameras)):
        raise ValueError(
            f"{option}: shows {list(metadata.cameras)}, the policy also reads {lacking}; use one with its cameras"
        )
    if policy.action_dim != metadata.action_dim:
        raise ValueError(
            f"{option}: is of a robot with actions of {metadata.action_dim} numbers, the policy's have "
            f"{policy.action_dim}; use one of its robot"
        )
    if policy.chunk_size != world_model.frame_steps:
        raise ValueError(
            f"{option}: has frames of {world_model.frame_steps} control steps, the policy decides every "
            f"{policy.chunk_size}; needed is a world model with frame_steps = {policy.chunk_size}"
        )


def views(world_model: WorldModel, obs: Observation, option: str) -> np.ndarray:
    """What a world model sees of B observations: uint8 (B, V, height, width, 3).

    Raises:
        ValueError: a camera, the images' size or the state's is another; `option` is what named the world model.
    """
    metadata = world_model.metadata
    if lacking := [camera for camera in metadata.cameras if camera not in obs.images]:
        raise ValueError(
            f"{option}: sees {list(metadata.cameras)}, the environment does not show {lacking}; set env.cameras to all "
            "of them"
        )
    images = np.stack([obs.images[camera] for camera in metadata.cameras], 1)
    found = (images.shape[2:4], obs.state.shape[1])
    if found != (metadata.image_size, metadata.state_dim):
        raise ValueError(
            f"{option}: sees images (height, width) of {metadata.image_size} and states of {metadata.state_dim} "
            f"numbers, the environment shows {found[0]} and {found[1]}; use one that was fitted in this environment"
        )
    return images
