"""End-effector dynamics, for robots whose arm lags behind its command.

A controller such as robosuite's OSC aims, at each control step, at where the end effector is plus the action: a step
reaches a part of that, keeps half of the last step's movement, and stops at a table or at the end of the arm's reach. A
small recurrent network learns it from recorded states. It knows the first position and the actions alone, no object.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64  # Hidden units.
SIZE = 3 + WIDTH  # Of what is remembered: the last displacement, meters, and the hidden units.
GAINS = (0.1, 0.5)  # At first: the share of what is commanded, and of the last displacement, that a step moves by.
MOVE_SCALE = 0.01  # Meters that a control step moves by for an output of 1.
PLACE, SPEED, TURN = 5.0, 50.0, 0.2  # Inputs are meters, meters a control step, and rotations, times this.
PATH_LOSS, BETA = 50.0, 0.2  # Per meter; where smooth L1 turns from square to straight (4 mm).


class EndEffector(nn.Module):
    """One control step of the end effector.

    Args:
        num_turns: R, rotation dimensions of an action. meters_per_action: commanded at action 1.
    """

    def __init__(self, num_turns: int, meters_per_action: float) -> None:
        super().__init__()
        self.meters_per_action = meters_per_action
        num_inputs = 3 + 3 + 3 + num_turns + 1 + num_turns
        self.embed = nn.Sequential(nn.Linear(num_inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        last = nn.Linear(WIDTH, 3)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), last)
        self.gains = nn.Parameter(torch.tensor(GAINS))

    def forward(
        self,
        position: torch.Tensor,
        remembered: torch.Tensor,
        action: torch.Tensor,
        gripper: torch.Tensor,
        turn: torch.Tensor,
        reach: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where it is after a step, and what is remembered of it.

        Args:
            position: float32 (B, 3), meters. remembered: float32 (B, SIZE), zeros at an episode's start.
            action: float32 (B, A). gripper: float32 (B, 1), its last command's sign.
            turn: float32 (B, R), rotations commanded before this step.
            reach: float32 (2, 3), lowest and highest position, meters, that it stays within.

        Returns:
            Position float32 (B, 3); remembered float32 (B, SIZE).
        """
        moved, hidden = remembered[:, :3], remembered[:, 3:]
        # What fed back is not learned through: over a hundred steps gradients would grow out of bounds.
        moved, here = moved.detach(), position.detach()
        inputs = [here * PLACE, moved * SPEED, action[:, :-1], gripper, turn * TURN]
        seen = self.embed(torch.cat(inputs, 1))
        hidden = recur(self.cell, seen, hidden)
        expected = self.gains[0] * self.meters_per_action * action[:, :3] + self.gains[1] * moved
        moved = expected + MOVE_SCALE * self.head(torch.cat([seen, hidden], 1))
        there = torch.minimum(torch.maximum(position + moved, reach[0]), reach[1])
        return there, torch.cat([there - position, hidden], 1)


def path_loss(path: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """How far a path is from the recorded one, a scalar; nothing is asked where none was recorded.

    Args:
        path: float32 (B, L, 3), meters. true: the same, NaN where not recorded.
    """
    known = true.isfinite()
    off = torch.where(known, path - true, 0.0) * PATH_LOSS
    return F.smooth_l1_loss(off, torch.zeros_like(off), beta=BETA, reduction="sum") / known.sum().clamp(min=1)


def last_error(path: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Mean distance, meters, at each episode's last recorded position, a scalar; arguments as for `path_loss`."""
    known = true.isfinite().all(-1)
    last = known.shape[1] - 1 - known.flip(1).int().argmax(1)
    rows = torch.arange(len(last), device=last.device)
    distance = (path - true)[rows, last].norm(dim=-1)[known.any(1)]
    return distance.mean() if len(distance) else path.new_zeros(())


def recur(cell: nn.GRUCell, seen: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What `cell(seen, hidden)` is, in plain operations: its fused kernel is not there for every device."""
    new = F.linear(seen, cell.weight_ih, cell.bias_ih).chunk(3, 1)
    old = F.linear(hidden, cell.weight_hh, cell.bias_hh).chunk(3, 1)
    reset, keep = torch.sigmoid(new[0] + old[0]), torch.sigmoid(new[1] + old[1])
    candidate = torch.tanh(new[2] + reset * old[2])
    return candidate + keep * (hidden - candidate)
