"""Action conditioning of the dynamics: an embedding for the frame, and maps for its image tokens.

With `kinematics: delta_pose` the path of the end effector that the actions command is integrated from the state
before them; with `kinematics: body` it is the one that a simulator of the robot alone takes. Either is an input, and,
where a camera's projection is known, drawn into that camera's tokens (the action maps of World-Env, arXiv 2509.24948,
in token space): each token learns how far it is from each point of the path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from world_model.types import Actions, DynamicsInputs, Frames

# Widths of the bumps around a path's point, in token widths.
_BUMPS = (0.7, 2.0)
# Waves under the wider bump, per token width: where in a token a point lies, to a fraction of its pixels.
_WAVES = (0.25, 0.5, 1.0)
BODY_SCALE = 20.0  # A control step moves the body some twentieth of a state's spread.


@dataclass(frozen=True)
class Condition:
    """Of B x T frames: `frame` (B, T, width) for modulation, `patches` (B, T, N - 1, width) added to image tokens."""

    frame: torch.Tensor
    patches: torch.Tensor

    def at(self, frames: slice) -> Condition:
        """The frames in a slice of time."""
        return Condition(self.frame[:, frames], self.patches[:, frames])


class ActionConditioning(nn.Module):
    """Actions (B, T, G, A or A + S) and the normalized state before them (B, T, S) -> `Condition`.

    Args:
        inputs: of the dynamics. grid: rows and columns of image tokens. width: of a token.
        meters_per_action: moves of the end effector at action 1; None: actions do not say where they lead, unless
            `inputs.body_dim` numbers that tell it follow them.
        projections: see `TransformerConfig.projections`.

    Raises:
        ValueError: a projection for a camera that is not there, or without kinematics.
    """

    state_mean: torch.Tensor
    state_std: torch.Tensor
    body_std: torch.Tensor
    waves: torch.Tensor
    centres: torch.Tensor  # British, as it is in the weights of world models that are already saved.

    def __init__(
        self,
        inputs: DynamicsInputs,
        grid: tuple[int, int],
        width: int,
        meters_per_action: float | None,
        projections: Mapping[str, Sequence[Sequence[float]]],
    ) -> None:
        super().__init__()
        cameras, frame_steps, self.body_dim = inputs.cameras, inputs.frame_steps, inputs.body_dim
        if unknown := sorted(set(projections) - set(cameras)):
            raise ValueError(f"dynamics.projections: names {unknown}; the world model's cameras are {list(cameras)}")
        self.has_path = meters_per_action is not None or self.body_dim > 0
        if projections and not self.has_path:
            raise ValueError("dynamics.projections: needs dynamics.kinematics=delta_pose or body")
        self.num_values, self.scale = inputs.action_dim + self.body_dim, meters_per_action or 0.0
        self.gripper = inputs.action_dim - 1
        self.num_patches = grid[0] * grid[1]
        self.cameras, self.width = cameras, width
        self.register_buffer("state_mean", torch.as_tensor(inputs.state_mean[:3].copy(), dtype=torch.float32))
        self.register_buffer("state_std", torch.as_tensor(inputs.state_std[:3].copy(), dtype=torch.float32))
        if self.body_dim:
            self.register_buffer("body_std", torch.as_tensor(inputs.state_std.copy(), dtype=torch.float32))
        num_inputs = frame_steps * (self.num_values + 1) + (3 * (frame_steps + 1) if self.has_path else 0)
        self.embed = nn.Sequential(nn.Linear(num_inputs, width), nn.SiLU(), nn.Linear(width, width))
        self.projections = [name for name in cameras if name in projections]
        for name in self.projections:
            self.register_buffer(f"projection_{name}", torch.tensor(projections[name], dtype=torch.float32))
        if self.projections:
            rows, columns = grid
            y, x = torch.meshgrid(
                (torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns, indexing="ij"
            )
            self.register_buffer("centres", torch.stack([x, y], -1).reshape(-1, 2))
            self.register_buffer("waves", torch.tensor(_WAVES), persistent=False)
            self.token_width = 1 / columns
            num_features = (frame_steps + 1) * (2 + len(_BUMPS) + 4 * len(_WAVES) + 1)
            self.draw = nn.Linear(num_features, width)

    def forward(self, actions: Actions, start: torch.Tensor) -> Condition:
        """`start`: the normalized state that the actions set out from, (B, T, S)."""
        executed = actions.executed[..., None].to(actions.values.dtype)
        given = actions.values
        if self.body_dim:  # Brought to the size of actions.
            moves = BODY_SCALE * given[..., -self.body_dim :] / self.body_std
            given = torch.cat([given[..., : -self.body_dim], moves], -1)
        values = torch.cat([given * executed, executed], -1).flatten(2)
        batch, length = values.shape[:2]
        dtype = next(self.parameters()).dtype
        blank = torch.zeros(batch, length, self.num_patches, self.width, dtype=dtype, device=values.device)
        drawn: dict[str, torch.Tensor] = {}
        if self.has_path:
            path = self.path(actions, start)
            mean, std = self.state_mean, self.state_std
            values = torch.cat([values, ((path - mean) / std).flatten(2)], -1)
            if self.projections:
                command = actions.values[..., self.gripper]
                gripper = torch.cat([command[:, :, :1], command], -1)
                drawn = {n: self.draw(self._features(path, gripper, n).to(dtype)) for n in self.projections}
        return Condition(self.embed(values.to(dtype)), torch.cat([drawn.get(n, blank) for n in self.cameras], 2))

    def set_scene(
        self,
        state_mean: Sequence[float],
        state_std: Sequence[float],
        projections: Mapping[str, Sequence[Sequence[float]]],
    ) -> None:
        """Move to another scene: states are normalized by (S,) each, and paths drawn by these 3 x 4 matrices."""
        self.state_mean.copy_(torch.tensor(state_mean[:3]))
        self.state_std.copy_(torch.tensor(state_std[:3]))
        if self.body_dim:
            self.body_std.copy_(torch.tensor(state_std))
        for name in self.projections:
            self.get_buffer(f"projection_{name}").copy_(torch.tensor(projections[name]))

    def path(self, actions: Actions, start: torch.Tensor) -> torch.Tensor:
        """Where the end effector is sent, meters (B, T, G + 1, 3): the start, then after each action."""
        position = start[..., :3] * self.state_std + self.state_mean
        moves = self._moves(actions)[..., :3]
        return position[:, :, None] + torch.cat([torch.zeros_like(moves[:, :, :1]), moves.cumsum(2)], 2)

    def moved(self, actions: Actions, like: torch.Tensor) -> torch.Tensor:
        """How far the actions send the robot: a difference of normalized states, (B, T, S) as `like` is."""
        if not self.has_path:
            return torch.zeros_like(like)
        moves = self._moves(actions).sum(2)
        if self.body_dim:
            return moves / self.body_std
        return torch.cat([moves / self.state_std, torch.zeros_like(like[..., 3:])], -1)

    def _moves(self, actions: Actions) -> torch.Tensor:
        """What each control step moves: the body's state (B, T, G, S), or meters of the end effector (B, T, G, 3)."""
        told = actions.values[..., -self.body_dim :] if self.body_dim else self.scale * actions.values[..., :3]
        return told * actions.executed[..., None]

    def starts(self, frames: Frames, actions: Actions, number: torch.Tensor) -> torch.Tensor:
        """The state from which each frame's actions set out (B, T, S): the frame before's, where the clip has it.

        For a clip from an episode's middle, frame 1's is reckoned back from its own state.

        Args:
            number: int64 (B, T), of each frame in its episode.
        """
        states = frames.states
        before = torch.cat([states[:, :1], states[:, :-1]], 1)
        back = states - self.moved(actions, states)
        follows = torch.cat([torch.ones_like(number[:, :1], dtype=torch.bool), number[:, 1:] == number[:, :-1] + 1], 1)
        return torch.where(follows[..., None], before, back)

    def _features(self, path: torch.Tensor, gripper: torch.Tensor, camera: str) -> torch.Tensor:
        """(B, T, patches, features): offset to each point of the path, bumps and waves there, the gripper's command."""
        projection: torch.Tensor = getattr(self, f"projection_{camera}")
        points = path @ projection[:, :3].T + projection[:, 3]
        image = points[..., :2] / points[..., 2:].clamp_min(1e-3)  # (B, T, G + 1, 2)
        offset = (image[:, :, None] - self.centres[:, None]) / self.token_width
        squared = offset.square().sum(-1, keepdim=True)
        bumps = [torch.exp(-squared / (2 * width**2)) for width in _BUMPS]
        angle = (2 * math.pi * offset[..., None] * self.waves).flatten(4)
        waves = torch.cat([angle.sin(), angle.cos()], -1) * bumps[-1]
        command = gripper[:, :, None, :, None] * bumps[0]
        return torch.cat([(offset / 4).tanh(), *bumps, waves, command], -1).flatten(3)
