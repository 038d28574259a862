"""A simulator of your own, named as `env: {kind: "my_env:SliderConfig"}`: one episode at a time."""

from typing import Literal

import numpy as np

from sim.base import SimConfig
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe


class SliderConfig(SimConfig):
    """A slider that is to be moved onto a mark."""

    kind: Literal["my_env:SliderConfig"] = "my_env:SliderConfig"

    def env_spec(self) -> EnvSpec:
        task, size, one = "slide", (self.image_size, self.image_size), np.ones(1, np.float32)
        return EnvSpec("slider", {task: "slide onto the mark"}, {task: 20}, self.cameras, size, 2, 1, -one, one, 10.0)

    def make(self, record_frames: bool = False) -> SingleEnv:
        return Slider(self, record_frames)  # A real simulator is imported here, not at the top.


class Slider(SingleEnv):
    """One episode: place and mark in [-1, 1]; an action of 1 moves the slider by 0.1."""

    def __init__(self, config: SliderConfig, record_frames: bool) -> None:
        self.spec, self.record_frames = config.env_spec(), record_frames

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        self.task, self.instruction = spec.task, spec.instruction or self.spec.tasks[spec.task]
        self.num_steps, self.horizon = 0, self.spec.horizon[spec.task]
        rng = np.random.default_rng((SPLITS.index(spec.split), spec.index))  # Splits share no initial state.
        self.place = rng.uniform(-0.5, 0.5)
        self.mark = self.place + rng.choice([-1, 1]) * rng.uniform(0.2, 0.4)
        if spec.keyframe is not None:
            self.place, self.mark = spec.keyframe.arrays["places"]
            self.num_steps = spec.keyframe.step
        return self.observe()

    def apply(self, action: np.ndarray) -> bool:
        self.place = float(np.clip(self.place + 0.1 * action[0], -1, 1))
        return abs(self.place - self.mark) < 0.05

    def observe(self) -> SingleObservation:
        across = np.linspace(-1, 1, self.spec.image_size[1])
        bars = np.stack([np.exp(-100 * (across - x) ** 2) for x in (self.place, self.mark, 2)], -1)
        image = np.broadcast_to((255 * bars).astype(np.uint8), (*self.spec.image_size, 3)).copy()
        state = np.array([self.place, self.mark], np.float32)
        return SingleObservation({name: image for name in self.spec.cameras}, state, self.instruction)

    def expert_action(self) -> np.ndarray:  # Optional: a scripted expert, for demonstrations.
        return np.clip([(self.mark - self.place) / 0.1], -1, 1).astype(np.float32)

    def save_state(self) -> Keyframe:
        return Keyframe("slider", self.task, self.num_steps, {"places": np.array([self.place, self.mark])})

    def close(self) -> None: ...
