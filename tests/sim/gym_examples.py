"""What users may hand to `env.kind: gymnasium`: a function that wraps an environment, their own class, an expert."""

from typing import Any

import gymnasium
import numpy as np


def pusher_with_pixels(size: int = 48) -> gymnasium.Env:
    """Gymnasium's Pusher, whose observation is made a mapping of state and pixels."""
    env = gymnasium.make("Pusher-v5", render_mode="rgb_array", width=2 * size, height=size)
    return gymnasium.wrappers.AddRenderObservation(env, render_only=False, obs_key="state")


class Slider(gymnasium.Env):
    """A dot on a line, placed by numpy's global generator, not by the seed; the picture is upside down, and wide."""

    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1, 1))
    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 1, (1,))})
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, ends_at: int = 6) -> None:
        self.render_mode, self.ends_at = render_mode, ends_at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.x, self.steps = np.random.uniform(0.0, 0.5), 0
        return {"x": np.array([self.x])}, {}

    def step(self, action: np.ndarray) -> Any:
        assert action.shape == (1, 1), "actions come in the shape of the action space"
        assert self.steps < self.ends_at, "stepped after its end"
        self.x = float(np.clip(self.x + 0.1 * action[0, 0] + 0.001 * np.random.normal(), 0, 1))
        self.steps += 1
        return {"x": np.array([self.x])}, self.x, self.steps == self.ends_at, False, {"is_success": self.x > 0.9}

    def render(self) -> Any:
        picture = np.zeros((40, 80, 3), np.uint8)
        picture[20:, :, 0] = 200  # "up" is red
        picture[:, 20 + int(39 * self.x)] = 255
        return picture if self.render_mode else None


def to_the_right(env: Slider, obs: dict[str, np.ndarray]) -> np.ndarray:
    """An expert."""
    assert obs["x"][0] == env.x
    return np.array([[3.0]])
