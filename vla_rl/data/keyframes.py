"""Keyframes on disk: simulator states kept beside a dataset's episodes, and moments of episodes from which to start.

A moment of a recorded episode is named by its dataset, episode and control step. A world model starts there with the
real frames and actions that led to it; a simulator restores the state that it saved there, where
`collect.keyframes=true` has kept it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vla_rl.common.saved import Saved
from vla_rl.config import Config
from vla_rl.types import SPLITS, EpisodeSpec, Keyframe

STATES_FOLDER = "keyframes"  # In a dataset's folder: the simulator's states.
RECORDINGS = (
    "recording",
    "bags",
    "folder",
    "RLDS",
    "ALOHA",
    "robomimic",
)  # The `source` in the notes of datasets that number their own.
RECORDED = "recorded"  # `Keyframe.env` of a moment of a recorded episode.


class KeyframeError(ValueError):
    """Keyframes that are missing, damaged, or cannot be restored; the message says which and what to do."""


# --- simulator states ---------------------------------------------------------------------------


def write_states(file: Path, episodes: Mapping[str, Sequence[Keyframe]]) -> None:
    """Write the simulator states of episodes as safetensors.

    Args:
        episodes: name of the initial state ("task/split/index") -> states along the episode, in order.
    """
    tensors: dict[str, np.ndarray] = {}
    index: dict[str, object] = {}
    for start, states in episodes.items():
        if not states:
            continue
        index[start] = {"env": states[0].env, "task": states[0].task, "steps": [state.step for state in states]}
        for name in states[0].arrays:
            tensors[f"{start}/{name}"] = np.ascontiguousarray(np.stack([state.arrays[name] for state in states]))
    save_file(tensors, str(file), metadata={"episodes": json.dumps(index)})


class SimulatorStates:
    """The states that a simulator saved while a dataset was collected.

    Raises:
        KeyframeError: the dataset has none, or a file is damaged.
    """

    def __init__(self, dataset: Path) -> None:
        self.dataset = Path(dataset)
        self._index: dict[str, tuple[Path, str, str, list[int]]] = {}
        files = sorted((self.dataset / STATES_FOLDER).glob("*.safetensors"))
        if not files:
            raise KeyframeError(
                f"{self.dataset}: holds no simulator states, so no real episode can start in the middle of one of its "
                "episodes. Collect it with collect.keyframes=true."
            )
        for file in files:
            for start, item in self._read_index(file).items():
                self._index[start] = (file, item["env"], item["task"], item["steps"])

    def steps(self, start: str) -> list[int]:
        """Control steps at which the states of an episode were saved; empty for an unknown episode."""
        return list(self._index[start][3]) if start in self._index else []

    def at(self, start: str, step: int) -> Keyframe:
        """The simulator's state at a control step of the episode that began at `start`, "task/split/index".

        Raises:
            KeyframeError: no state was saved there.
        """
        steps = self.steps(start)
        if step not in steps:
            found = f"its states are of steps {steps}" if steps else "the episode has none"
            raise KeyframeError(
                f"{self.dataset}: no simulator state at step {step} of the episode from {start}; {found}. Mine "
                "keyframes from a dataset that was collected with collect.keyframes=true."
            )
        file, env, task, _ = self._index[start]
        return Keyframe(env, task, step, self._arrays(file, start, steps.index(step)))

    def arrays(self, start: str, name: str) -> np.ndarray | None:
        """One array of all states of an episode, (K, ...); None where the simulator saves none of that name."""
        if start not in self._index:
            return None
        with self._opened(self._index[start][0]) as stored:
            key = f"{start}/{name}"
            return stored.get_tensor(key) if key in stored.keys() else None  # noqa: SIM118 (no mapping)

    def _arrays(self, file: Path, start: str, row: int) -> dict[str, np.ndarray]:
        prefix = f"{start}/"
        with self._opened(file) as stored:
            names = [key for key in stored.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key.removeprefix(prefix): stored.get_tensor(key)[row] for key in names}

    def _opened(self, file: Path) -> Any:
        return safe_open(str(file), framework="numpy")

    def _read_index(self, file: Path) -> dict[str, dict[str, Any]]:
        try:
            with self._opened(file) as stored:
                return json.loads((stored.metadata() or {})["episodes"])
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise KeyframeError(
                f"{file}: no simulator states, or truncated ({error}). Copy or collect the dataset again."
            ) from error


# --- moments of recorded episodes ---------------------------------------------------------------


class KeyframeSource(Config):
    """A dataset that keyframes were mined from.

    Attributes:
        content: key of its content, cameras and image size, so that a changed dataset is noticed.
    """

    path: str
    content: str


class MinedKeyframe(Config):
    """A moment of a recorded episode that is worth starting from.

    Attributes:
        source: index of its dataset. episode: number in it. step: control steps taken before.
        task: of the environment. start: name of the episode's initial state.
        kinds: why it was chosen: "divergence", "failure", "gripper", "contact".
        value: share of successes among this and the most similar moments. score: the higher, the more it tells.
    """

    source: NonNegativeInt
    episode: NonNegativeInt
    step: PositiveInt
    task: str
    start: str
    kinds: tuple[str, ...] = Field(min_length=1)
    value: FiniteFloat
    score: FiniteFloat


class KeyframeSet(Saved):
    """Mined keyframes, as `vla-rl world-model keyframes` writes them."""

    WHAT = "keyframes"
    ERROR = KeyframeError
    AGAIN = "Mine them with `vla-rl world-model keyframes`."
    sources: tuple[KeyframeSource, ...]
    keyframes: tuple[MinedKeyframe, ...] = Field(min_length=1)

    def counts(self) -> dict[str, int]:
        """How many there are of each kind; one may be of several."""
        kinds = [kind for keyframe in self.keyframes for kind in keyframe.kinds]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def of_tasks(self, tasks: Sequence[str]) -> KeyframeSet:
        """Those of some tasks.

        Raises:
            KeyframeError: none is left.
        """
        kept = tuple(keyframe for keyframe in self.keyframes if keyframe.task in tasks)
        if not kept:
            found = ", ".join(sorted({keyframe.task for keyframe in self.keyframes}))
            raise KeyframeError(f"no keyframe of the tasks {', '.join(tasks)}; they are of {found}. Mine them again.")
        return self.model_copy(update={"keyframes": kept})

    def recorded(self, number: int) -> EpisodeSpec:
        """An episode that a world model starts at keyframe `number`, with the real frames that led there."""
        keyframe = self.keyframes[number]
        source = self.sources[keyframe.source]
        arrays = {
            "dataset": np.frombuffer(source.path.encode(), np.uint8),
            "content": np.frombuffer(source.content.encode(), np.uint8),
            "episode": np.array(keyframe.episode),
            "start": np.frombuffer(keyframe.start.encode(), np.uint8),
        }
        return self._spec(keyframe, Keyframe(RECORDED, keyframe.task, keyframe.step, arrays))

    def simulated(self, number: int) -> EpisodeSpec:
        """An episode that the simulator starts at keyframe `number`, restored exactly.

        Raises:
            KeyframeError: the dataset is gone, or no state was saved there.
        """
        keyframe = self.keyframes[number]
        states = SimulatorStates(Path(self.sources[keyframe.source].path))
        return self._spec(keyframe, states.at(keyframe.start, keyframe.step))

    def _spec(self, mined: MinedKeyframe, keyframe: Keyframe) -> EpisodeSpec:
        _, split, index = split_start(mined.start)
        return EpisodeSpec(mined.task, "train", index if split == "train" else 0, keyframe=keyframe)


def split_start(start: str) -> tuple[str, str, int]:
    """(task, split, index) of an initial state's name "task/split/index"; ("", "", 0) of any other name."""
    parts = start.rsplit("/", 2)
    if len(parts) == 3 and parts[1] in SPLITS and parts[2].isdigit():
        return parts[0], parts[1], int(parts[2])
    return "", "", 0


def state_names(states: Sequence[str], texts: Sequence[str], is_recording: bool, own: str) -> list[str]:
    """Names of E episodes' initial states that are equal, of several datasets too, where they began alike alone.

    An environment's is one for all datasets. A recording's own number is not, which a robot's recorder or an import
    writes behind the instruction in place of a task: it gets `own` before it, as has a name that is no environment's.

    Args:
        states: as `LeRobotSource.initial_states` gives them. texts: the episodes' instructions.
        is_recording: a recorder wrote them, of a robot or beside a simulator, or an import. own: the dataset's.
    """

    def is_own(name: str, text: str) -> bool:
        return name.count("/") != 2 or (is_recording and split_start(name)[0] in (text, task_of(text)))

    return [f"{own}/{name}" if is_own(name, text) else name for name, text in zip(states, texts, strict=True)]


def task_of(instruction: str) -> str:
    """What imports write as the task of an instruction."""
    return re.sub(r"\W+", "_", instruction.lower()).strip("_") or "task"
