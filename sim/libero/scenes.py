"""Loaded task scenes of this process: borrowed by an environment for an episode, kept for the next one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from sim.libero.distractors import CrowdedScene
from sim.libero.experts import PickAndPlace
from sim.libero.layout import rearranged
from sim.libero.library import bddl_path, init_states_path, load_init_states
from sim.libero.published import PublishedTask
from sim.libero.published_scene import PublishedScene
from sim.libero.render import Renderer
from sim.libero.scene import InitialState, Scene

MAX_SCENES = 10  # Idle task scenes kept loaded in a process: a suite's.
MAX_STARTS = 256  # settled initial states remembered per scene


@dataclass
class TaskScene:
    """A scene with its renderer and the settled initial states it has already simulated.

    crowded: with distractors, a `CrowdedScene`. published: the task of a user's copy that it is; None: LIBERO's own.
    """

    suite: str
    task: str
    crowded: bool
    scene: Scene
    renderer: Renderer
    published: PublishedTask | None = None
    starts: OrderedDict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=OrderedDict)

    _expert: PickAndPlace | None = None

    @property
    def expert(self) -> PickAndPlace:
        """The task's scripted expert, made when first asked for."""
        if self._expert is None:
            self._expert = PickAndPlace(self.scene)
        return self._expert

    def begin_episode(self) -> None:
        """Tell the expert, if there is one."""
        if self._expert is not None:
            self._expert.begin()

    def remember(self, split: str, index: int, arrays: dict[str, np.ndarray]) -> None:
        self.starts[split, index] = arrays
        while len(self.starts) > MAX_STARTS:
            self.starts.popitem(last=False)

    def rearranged(self, state: InitialState, level: int, rng: np.random.Generator) -> InitialState:
        """See `sim.libero.layout.rearranged`."""
        return rearranged(self.scene, state, level, rng)

    def scatter(self, level: int, rng: np.random.Generator) -> None:
        """Put an episode's distractors, if it has any, around what is in the scene."""
        if isinstance(self.scene, CrowdedScene):
            self.scene.scatter(level, rng)

    def give_back(self) -> None:
        """The scene is idle; the longest idle ones go when there are more than MAX_SCENES."""
        _idle.append(self)
        del _idle[:-MAX_SCENES]


_idle: list[TaskScene] = []


def borrow(suite: str, task: str, crowded: bool, published: PublishedTask | None = None) -> TaskScene:
    """An idle scene of the task, or a new one (takes seconds). published: one of those."""
    for position, loaded in enumerate(_idle):
        if (loaded.suite, loaded.task, loaded.crowded, loaded.published) == (suite, task, crowded, published):
            return _idle.pop(position)
    if published is not None:
        scene: Scene = PublishedScene(published)
    else:
        make = CrowdedScene if crowded else Scene
        scene = make(bddl_path(suite, task), load_init_states(init_states_path(suite, task)))
    name = f"{suite}/{task}/crowded" if crowded else f"{suite}/{task}"
    return TaskScene(suite, task, crowded, scene, Renderer(name, scene.model, MAX_SCENES), published)
