"""A task in temporal logic as the reward: what shall be near, above or inside what; when, and in which order.

    env:
      reward:
        kind: temporal_logic
        formula:
          and:
            - then: [{near: {a: gripper, b: block, within: 0.04}}, {lifted: {a: block, by: 0.05}}]
            - always: {still: {a: block_b, within: 0.01}}

Its value is the robustness of signal temporal logic: the meters by which the formula holds, or fails where negative
(Donze and Maler, FORMATS 2010, section 3), over control steps. An episode succeeds at a chunk's end from which on it
stays positive whatever comes (bounds as in Deshmukh et al., Form. Methods Syst. Des. 2017), or at the episode's end.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard

import numpy as np
from pydantic import Field, field_validator

from vla_rl.config import ConfigError
from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel
from vla_rl.types import EnvSpec, Observation, StepResult

# predicate -> its margin in meters at each of T steps, (T,). a: (T, 3); b: the same, or a point (3,).
PREDICATES: dict[str, Callable[..., np.ndarray]] = {
    "near": lambda a, b, within: within - np.linalg.norm(a - b, axis=1),
    "above": lambda a, b, by: (a - b)[:, 2] - by,
    "inside": lambda a, b, radius, height: np.minimum(
        radius - np.linalg.norm((a - b)[:, :2], axis=1), height - np.abs((a - b)[:, 2])
    ),
    "lifted": lambda a, by: a[:, 2] - a[0, 2] - by,
    "still": lambda a, within: within - np.linalg.norm(a - a[0], axis=1),
}
FAR = 0.1  # Meters by which a formula fails at progress 0.
# operator -> how many formulas it takes, at least and at most. Those in time take `within` beside them.
OPERATORS = {"not": (1, 1), "and": (2, 99), "or": (2, 99)}
TIMED = {"eventually": (1, 1), "always": (1, 1), "until": (2, 2), "then": (2, 99)}


@dataclass(frozen=True)
class Formula:
    """A predicate with its values, or an operator with its parts; `within`: control steps, None: the whole episode."""

    operator: str
    parts: tuple[Formula, ...] = ()
    within: int | None = None
    values: Mapping[str, str | Sequence[float] | float] | None = None

    @property
    def objects(self) -> set[str]:
        """Names of the objects that it speaks of."""
        own = {value for value in (self.values or {}).values() if isinstance(value, str)}
        return own.union(*(part.objects for part in self.parts))

    def robustness(self, places: Mapping[str, np.ndarray], is_over: bool) -> np.ndarray:
        """From each step on, what its robustness is at least and at most, meters, (2, T).

        Args:
            places: object -> positions at T steps, meters (T, 3).
            is_over: nothing comes any more, so that both are the same; else one column more stands for what may come.
        """
        if self.values is not None:
            values = {name: places[v] if isinstance(v, str) else np.asarray(v) for name, v in self.values.items()}
            margin = PREDICATES[self.operator](**values)
            return np.stack([margin if is_over else [*margin, end] for end in (-np.inf, np.inf)])
        parts = [part.robustness(places, is_over) for part in self.parts]
        match self.operator:
            case "not":
                return _negated(parts[0])
            case "and":
                return np.minimum.reduce(parts)
            case "or":
                return np.maximum.reduce(parts)
            case "always":
                return _negated(_until(np.inf, _negated(parts[0]), self.within))
            case "until":
                return _until(parts[0], parts[1], self.within)
        found = _until(np.inf, parts[-1], self.within)  # eventually; then
        for part in reversed(parts[:-1]):
            found = _until(np.inf, np.minimum(part, found), self.within)
        return found


def _negated(bounds: np.ndarray) -> np.ndarray:
    return -bounds[::-1]


def _until(holds: np.ndarray | float, comes: np.ndarray, within: int | None) -> np.ndarray:
    """max over t' in [t, t + within] of min(comes(t'), min over [t, t'] of holds), for each t, (2, T)."""
    found = np.minimum(holds, comes)
    for _ in range(comes.shape[1] if within is None else within):
        later = np.pad(found[:, 1:], ((0, 0), (0, 1)), constant_values=-np.inf)
        longer = np.minimum(holds, np.maximum(comes, later))
        if np.array_equal(longer, found):
            break
        found = longer
    return found


def read_formula(value: object, at: str = "env.reward.formula") -> Formula:
    """Read a formula as YAML gives it.

    Raises:
        ConfigError: naming the place, what was found and what is allowed.
    """
    names = [name for name in value if name != "within"] if isinstance(value, Mapping) else []
    known = [*PREDICATES, *OPERATORS, *TIMED]
    if not isinstance(value, Mapping) or len(names) != 1:
        one = f"one of {', '.join(known)}, as in {{lifted: {{a: block, by: 0.05}}}}"
        raise ConfigError(f"{at}: got {value!r}; write {one}")
    name, inner = str(names[0]), value[names[0]]
    if name not in known:
        nearest = "".join(f" Did you mean {near!r}?" for near in difflib.get_close_matches(name, known, n=1))
        raise ConfigError(f"{at}: got {name!r}, allowed: {', '.join(known)}.{nearest}")
    within = value.get("within")
    if within is not None and name not in TIMED:
        raise ConfigError(f"{at}.within: steps are said beside {', '.join(TIMED)}; got them beside {name!r}")
    if within is not None and (not isinstance(within, int) or within < 1):
        raise ConfigError(f"{at}.within: got {within!r}; a number of control steps from 1, or leave it out")
    if name in PREDICATES:
        return Formula(name, values=_read_values(name, inner, f"{at}.{name}"))
    low, high = (OPERATORS | TIMED)[name]
    given = [inner] if high == 1 else inner
    if not isinstance(given, list) or not low <= len(given) <= high:
        raise ConfigError(f"{at}.{name}: got {inner!r}; write a list of {low}{' or more' * (high > low)} formulas")
    places = [f"{at}.{name}" if high == 1 else f"{at}.{name}[{i}]" for i in range(len(given))]
    return Formula(name, tuple(map(read_formula, given, places)), within)


def _read_values(name: str, given: object, at: str) -> dict[str, str | Sequence[float] | float]:
    """The values of a predicate: a and b are objects, b may be a point (x, y, z), the others are meters."""
    wanted = list(inspect.signature(PREDICATES[name]).parameters)
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        raise ConfigError(f"{at}: got {given!r}; it needs {', '.join(wanted)}, each once")
    for key, value in given.items():
        is_point = isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))
        if key in ("a", "b") and not (isinstance(value, str) or (key == "b" and is_point)):
            raise ConfigError(f"{at}.{key}: got {value!r}; an object's name{' or [x, y, z], meters' * (key == 'b')}")
        if key not in ("a", "b") and not (_is_number(value) and value >= 0):
            raise ConfigError(f"{at}.{key}: got {value!r}; a number of meters, 0 or more")
    return dict(given)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


class TemporalLogicConfig(RewardConfig):
    """Success is that a formula of temporal logic about the objects' poses holds."""

    of_poses: ClassVar[bool] = True
    kind: Literal["temporal_logic"] = "temporal_logic"
    formula: dict[str, object] = Field(
        description="What shall hold: near, above, inside, lifted or still (meters), combined by not, and, or, "
        "eventually, always, until, then; `within` beside the last four is a number of control steps (docs/rewards.md)."
    )

    @field_validator("formula")
    @classmethod
    def _check_formula(cls, value: dict[str, object]) -> dict[str, object]:
        read_formula(value)
        return value

    def build(self, spec: EnvSpec) -> RewardModel:
        """See `RewardConfig.build`."""
        formula = read_formula(self.formula)
        if not spec.objects:
            raise ValueError(
                f"env.reward.formula: {spec.title} does not tell where its objects are; tabletop, libero, "
                "robosuite and environments with object_names do (docs/own_environment.md)"
            )
        if unknown := sorted(formula.objects - set(spec.objects)):
            raise ValueError(f"env.reward.formula: got {unknown[0]!r}; {spec.title} has {', '.join(spec.objects)}")
        return TemporalLogicReward(formula, spec.objects)


class TemporalLogicReward(RewardModel):
    """The formula over each episode under way, of which it keeps the positions of the objects that are named."""

    def __init__(self, formula: Formula, objects: Sequence[str]) -> None:
        self.formula = formula
        self._columns = {name: objects.index(name) for name in sorted(formula.objects)}
        self._tracks: dict[int, np.ndarray] = {}  # By stream: meters (T, objects, 3).
        self._is_over: dict[int, bool] = {}

    def watch(self, result: StepResult, streams: Sequence[int]) -> None:
        """See `RewardModel.watch`.

        Raises:
            ValueError: an object is not in the scene.
        """
        for row, stream in enumerate(streams):
            known = self._tracks.pop(stream, None)
            if result.lost[row]:
                continue
            poses = np.asarray(result.info["objects"][row], np.float64)[:, list(self._columns.values()), :3]
            if np.isnan(poses).any():
                name = list(self._columns)[int(np.isnan(poses).any((0, 2)).argmax())]
                told = result.obs.instruction[row]
                raise ValueError(f"env.reward.formula: there is no {name!r} in the scene of {told!r}; choose env.tasks")
            self._tracks[stream] = poses if known is None else np.concatenate([known, poses[1:]])
            self._is_over[stream] = bool(result.done[row])

    def observe(
        self,
        obs: Observation,
        streams: Sequence[int],
        begins: Sequence[bool] | np.ndarray,
        told: np.ndarray | None = None,
    ) -> Judgement:
        """See `RewardModel.observe`; by what `watch` was told."""
        counts, progress = np.zeros(len(streams), bool), np.zeros(len(streams), np.float32)
        for row, (stream, begin) in enumerate(zip(streams, begins, strict=True)):
            if begin:
                self._tracks.pop(stream, None)
            if stream in self._tracks:
                places = dict(zip(self._columns, self._tracks[stream].transpose(1, 0, 2), strict=True))
                counts[row] = self.formula.robustness(places, self._is_over[stream])[0, 0] > 0
                progress[row] = np.clip(1 + self.formula.robustness(places, True)[0, 0] / FAR, 0, 1)
        return Judgement(counts.astype(np.float32), progress, counts)


METHOD = TemporalLogicConfig
