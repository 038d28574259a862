"""Environments of Gymnasium's interface, in our own Python, with their outputs mapped by the recipe.

    GymnasiumConfig(id="Reacher-v5", instruction="touch the red ball", success="info.reward_dist >= -0.02").build()

One that needs packages which do not go together with ours is run by `kind: remote` (docs/remote.md).
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import cv2
import gymnasium
import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from sim.base import OwnRandomness, ReplayedEnv, SimConfig, check_known
from sim.remote.host import to_numpy
from sim.single_env import SingleObservation
from vla_rl.config import ConfigError
from vla_rl.types import EnvSpec

RENDER = "render()"
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SUCCESS = re.compile(rf"(terminated|reward|return|info\.[^\s<>=]+)(?:\s*(>=|<=|>|<)\s*({_NUMBER}))?")
SUCCESS_FORMS = 'terminated, info.KEY, or one of info.KEY, reward and return (their sum) compared: "reward >= 0.9"'


class GymnasiumConfig(SimConfig):
    """Any Gymnasium environment with a Box of actions; one task."""

    kind: Literal["gymnasium"] = "gymnasium"
    id: str = Field(
        description='Name by which it is registered: "Reacher-v5"; "module:Name-v0" imports the module first; '
        '"module:Class" is a class or function that makes one.'
    )
    kwargs: dict[str, Any] = Field(default={}, description="Arguments to it.")
    instruction: str = Field(min_length=1, description="What the robot is told.")
    cameras: dict[str, str] = Field(  # by name as elsewhere, and with its source
        default={"agentview": RENDER},
        min_length=1,
        description='Camera name -> path of its image in the observation, its keys joined by dots, or "render()".',
    )
    upside_down: tuple[str, ...] = Field(default=(), description="Cameras whose images are turned by 180 degrees.")
    image_size: PositiveInt = Field(
        default=64, description="Height and width that images are scaled to, pixels; of a wide image the middle square."
    )
    state: str | tuple[str, ...] = Field(
        default="",
        description="Path or paths of the state in the observation; empty: all of it, where it is one vector.",
    )
    success: str = Field(
        default="", description=f"When it is solved: {SUCCESS_FORMS}. Empty: info.success or info.is_success."
    )
    horizon: PositiveInt | None = Field(
        default=None, description="Control steps before truncation; null: as it is registered."
    )
    control_hz: float | None = Field(
        default=None, gt=0, description="Control steps per second of simulated time; null: its metadata's render_fps."
    )
    action_low: tuple[float, ...] | None = Field(
        default=None,
        description="Lower bounds of actions, one for each number or one for all; null: its action_space's.",
    )
    action_high: tuple[float, ...] | None = Field(default=None, description="Upper bounds of actions, likewise.")
    expert: str = Field(
        default="",
        description='A scripted expert, "module:function": of the environment and its observation, an action.',
    )

    @field_validator("cameras", mode="before")
    @classmethod
    def _say_where_from(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError('say where each image comes from: {agentview: "render()"} or {front: pixels.front}')
        return value

    @field_validator("success")
    @classmethod
    def _check_success(cls, value: str) -> str:
        found = _SUCCESS.fullmatch(value.strip())
        if value and (found is None or (found[1] in ("reward", "return") and not found[2])):
            raise ValueError(f"allowed: {SUCCESS_FORMS}")
        return value

    @model_validator(mode="after")
    def _check_names(self) -> GymnasiumConfig:
        for name in self.tasks:
            check_known("task of this Gymnasium environment", name, [self.task])
        if unknown := set(self.upside_down) - set(self.cameras):
            raise ConfigError(f"env.upside_down: got {sorted(unknown)}, env.cameras has {sorted(self.cameras)}")
        return self

    @property
    def task(self) -> str:
        """Its name alone: "PandaPickCube" of "gym_hil:gym_hil/PandaPickCube-v0"."""
        return re.sub(r"-v\d+$", "", self.id.rpartition(":")[2].rpartition("/")[2])

    def env_spec(self) -> EnvSpec:
        """Facts about the environment, which only it knows: makes one and takes a step, unless that was done before.

        Raises:
            ConfigError: it cannot be made, or does not give what the section names; with what it gives.
        """
        return _probe(self.model_dump_json(include=set(GymnasiumConfig.model_fields) - {"num_envs", "num_workers"}))

    def make(self, record_frames: bool = False) -> GymnasiumEnv:
        """One environment.

        Raises:
            ConfigError: see `env_spec`.
        """
        return GymnasiumEnv(self, self.env_spec(), record_frames)


@functools.lru_cache(maxsize=64)
def _probe(section: str) -> EnvSpec:
    """What one of these is, found by starting it once."""
    config = GymnasiumConfig.model_validate_json(section)
    env = _start(config)
    randomness = OwnRandomness()
    try:
        with randomness(0):
            obs, _ = env.reset(seed=0)
            low, high = _bounds(config, env)
            shape = env.action_space.shape
            rest = np.clip(np.zeros(low.shape, np.float32), low, high).reshape(shape)
            *_, info = env.step(rest.astype(env.action_space.dtype))
        for name, path in config.cameras.items():
            if path != RENDER:
                _image(config, name, _look_up(obs, path, f"env.cameras.{name}"))
        state_dim = len(_state(config, obs))
        _check_success_key(config, info)
        horizon = config.horizon or getattr(env.spec, "max_episode_steps", None)
        if not horizon:
            raise ConfigError(f"env.horizon: {config.id} is registered without max_episode_steps; give the steps here")
        rate = config.control_hz or (env.metadata or {}).get("render_fps")
        if not rate:
            raise ConfigError(f"env.control_hz: {config.id} has no render_fps in its metadata; give the rate here")
    finally:
        env.close()
    return EnvSpec(
        kind="gymnasium",
        tasks={config.task: config.instruction},
        horizon={config.task: int(horizon)},
        cameras=tuple(config.cameras),
        image_size=(config.image_size, config.image_size),
        state_dim=state_dim,
        action_dim=len(low),
        action_low=low,
        action_high=high,
        control_hz=float(rate),
    )


def _start(config: GymnasiumConfig) -> Any:
    """The Gymnasium environment itself."""
    kwargs = dict(config.kwargs)
    if RENDER in config.cameras.values():
        kwargs.setdefault("render_mode", "rgb_array")
    module, _, name = config.id.rpartition(":")
    try:
        target = getattr(importlib.import_module(module), name, None) if module else None
        if target is not None:
            return target(**kwargs)
        if config.horizon:
            kwargs["max_episode_steps"] = config.horizon
        return gymnasium.make(config.id, disable_env_checker=True, **kwargs)
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id: {config.id!r} needs a package that is not installed here: {error}") from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.id: got {config.id!r}. {error}") from error
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {config.id} does not take {kwargs}: {error}") from error


def _bounds(config: GymnasiumConfig, env: Any) -> tuple[np.ndarray, np.ndarray]:
    space = env.action_space
    if getattr(space, "low", None) is None:
        raise ConfigError(f"env.id: {config.id} takes {space} as actions; a policy here needs a Box of numbers")
    bounds = []
    for key, given, own in (("low", config.action_low, space.low), ("high", config.action_high, space.high)):
        values = np.asarray(own if given is None else given, np.float32).reshape(-1)
        if len(values) not in (1, own.size):
            raise ConfigError(f"env.action_{key}: got {len(values)} numbers, {config.id} has {own.size} of an action")
        if not np.isfinite(values).all():
            raise ConfigError(f"env.action_{key}: {config.id}'s own are {values.tolist()}; give finite ones here")
        bounds.append(np.broadcast_to(values, (own.size,)).astype(np.float32))
    low, high = bounds
    if not (low < high).all():
        raise ConfigError(f"env.action_low: got {low.tolist()}, must be below action_high {high.tolist()}")
    return low, high


def offers(values: Any, prefix: str = "") -> Iterator[str]:
    """What is in an observation or info, each with its path: "pixels.front uint8 (128, 128, 3)"."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from offers(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        array = to_numpy(values) if not isinstance(values, str) else np.zeros(0, str)
        shape = f" {array.shape}" if array.shape else ""
        yield f"{prefix or 'one array'} {array.dtype}{shape}"


def _look_up(values: Any, path: str, key: str) -> Any:
    found = values
    for part in path.split(".") if path else ():
        if not isinstance(found, Mapping) or part not in found:
            what = "info" if key == "env.success" else "observation"
            offered = "; ".join(offers(values)) or "nothing"
            raise ConfigError(f"{key}: there is no {path!r} in the environment's {what}, which has: {offered}")
        found = found[part]
    return found


def _state(config: GymnasiumConfig, obs: Any) -> np.ndarray:
    """The numbers that the section names, float32 (S,)."""
    paths = (config.state,) if isinstance(config.state, str) else config.state
    parts = [_look_up(obs, path, "env.state") for path in paths]
    if any(isinstance(part, Mapping) or to_numpy(part).ndim > 1 or to_numpy(part).dtype == object for part in parts):
        raise ConfigError(f"env.state: got {config.state!r}; name vectors of the observation: {'; '.join(offers(obs))}")
    return np.concatenate([to_numpy(part).reshape(-1) for part in parts]).astype(np.float32)


def _image(config: GymnasiumConfig, name: str, given: Any) -> np.ndarray:
    """An image as policies take it, uint8 (size, size, 3), upright."""
    image, size = np.asarray(None) if given is None else to_numpy(given), config.image_size
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        hint = " Is kwargs.render_mode rgb_array?" if config.cameras[name] == RENDER else ""
        found = f"{config.cameras[name]} gave {image.dtype} {image.shape}"
        raise ConfigError(f"env.cameras.{name}: {found}, not uint8 (height, width, 3).{hint}")
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[top : top + side, left : left + side]
    if name in config.upside_down:
        image = image[::-1, ::-1]
    if side != size:
        image = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA if side > size else cv2.INTER_LINEAR)
    return np.ascontiguousarray(image)


def _check_success_key(config: GymnasiumConfig, info: Mapping[str, Any]) -> None:
    named = _SUCCESS.fullmatch(config.success.strip())
    if named is None and not {"success", "is_success"} & set(info):
        offered = "; ".join(offers(info)) or "nothing"
        raise ConfigError(
            f"env.success: needed, as {config.id} gives neither success nor is_success in its info, which has: "
            f"{offered}. Allowed: {SUCCESS_FORMS}"
        )
    if named is not None and named[1].startswith("info."):
        _look_up(info, named[1].removeprefix("info."), "env.success")


class GymnasiumEnv(ReplayedEnv):
    """One Gymnasium environment; its seed is the split's and index's own, so that no two splits share a state.

    A simulator that draws from Python's or numpy's global generators finds them seeded likewise.
    """

    def __init__(self, config: GymnasiumConfig, spec: EnvSpec, record_frames: bool = False) -> None:
        from sim.rendering.gl import ForeignContext

        super().__init__()
        self.config, self.spec, self.record_frames = config, spec, record_frames
        self._randomness, self._gl = OwnRandomness(), ForeignContext()
        with self._randomness(0), self._gl():
            self._env = _start(config)
            self._env.reset(seed=0)
            if RENDER in config.cameras.values():
                self._env.render()  # Gymnasium's own free camera looks for ever at where things are the first time.
        self._named = _SUCCESS.fullmatch(config.success.strip())
        self._expert = None
        if config.expert:
            module, _, name = config.expert.partition(":")
            try:
                self._expert = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"env.expert: got {config.expert!r}, expected module:function: {error}") from error

    def _begin(self, task: str, seed: int) -> None:
        with self._randomness(seed), self._gl():
            self._obs, _ = self._env.reset(seed=seed)
        self._return = 0.0

    def _advance(self, action: np.ndarray) -> bool:
        space = self._env.action_space
        with self._randomness(), self._gl():
            self._obs, reward, terminated, truncated, info = self._env.step(
                action.reshape(space.shape).astype(space.dtype)
            )
        self._return += float(reward)
        self.is_over = bool(terminated)
        if truncated:
            self.horizon = min(self.horizon, self.num_steps + 1)
        return self._solved(float(reward), bool(terminated), info)

    def _solved(self, reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
        if self._named is None:
            return bool(np.all(to_numpy(info["success" if "success" in info else "is_success"])))
        name, comparison, bound = self._named.groups()
        if name.startswith("info."):
            value = to_numpy(_look_up(info, name.removeprefix("info."), "env.success"))
        else:
            value = {"terminated": terminated, "reward": reward, "return": self._return}[name]
        return bool(np.all(value)) if comparison is None else COMPARED[comparison](float(value), float(bound))

    def observe(self) -> SingleObservation:
        """The images and the state; renders where the section says so."""
        drawn = None
        if RENDER in self.config.cameras.values():
            with self._randomness(), self._gl():
                drawn = self._env.render()
        images = {
            name: _image(self.config, name, self._given(name, path, drawn))
            for name, path in self.config.cameras.items()
        }
        return SingleObservation(images, _state(self.config, self._obs), self._instruction)

    def _given(self, name: str, path: str, drawn: Any) -> Any:
        return drawn if path == RENDER else _look_up(self._obs, path, f"env.cameras.{name}")

    def expert_action(self) -> np.ndarray:
        """What the section's `expert` does here, float32 (A,).

        Raises:
            NotImplementedError: it names none.
        """
        if self._expert is None:
            raise NotImplementedError(f"{self.config.id} has no scripted expert; name one: env.expert=module:function")
        action = to_numpy(self._expert(self._env.unwrapped, self._obs)).reshape(-1).astype(np.float32)
        return np.clip(action, self.spec.action_low, self.spec.action_high)

    def close(self) -> None:
        """Close the environment."""
        with self._gl():
            self._env.close()
