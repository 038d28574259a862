"""Objects part: poses read off an episode's first real frame, then rolled by the actions alone.

    objects = model.begin(first, position, instruction)  # The probe reads poses off the real frame's latents.
    objects, poses, logits = model.roll(objects, actions)

What decides an outcome, whether the block lies within the zone, is a few pixels, and imagined pictures lose it where
things touch. A pose is four numbers, in which contact can be learned from a thousand episodes. Nothing here looks at an
imagined picture or draws noise: a verdict is a function of the first real frame, the instruction and the actions. True
poses (`vla_rl.data.objects`) are needed for fitting and for measuring only.

An object fills a slot (`ObjectsConfig.slots`); slot 0 is what is to be handled. The end effector's path is integrated
from position deltas (`kinematics: delta_pose` of the dynamics), or learned where the arm lags behind them
(`ObjectsConfig.end_effector`), within the space that it was seen in.

Shape legend, beside `world_model.types`': M slots, H hidden units, R rotation dimensions of an action (A - 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vla_rl.common.instruction_embedding import FilmResidual, WordEmbedding
from world_model.config import ObjectsConfig
from world_model.model.end_effector import SIZE, EndEffector, last_error, path_loss, recur
from world_model.types import Actions, Frames

NEVER = -20.0  # Logit of a frame to which no action led.
WORDS = 16  # Width of the instruction's vector.
ATTENTION = 16  # Places that the probe finds in a picture.
READ_SCALE = (0.1, 0.1, 0.1, 0.2)  # Of what the probe reads: meters and radians.
STEP_SCALE = 0.02  # Meters and radians that a slot moves in a control step for an output of 1.
NEAR, FAR = 20.0, 10.0  # Meters times this: offsets from the end effector, and between objects.
TURN = 0.5  # Of the rotations commanded so far, an action of 1 each.
POSE_LOSS, YAW_LOSS, SUCCESS_LOSS = 50.0, 0.02, 0.4  # Per meter; share of a turn's; of the cross-entropy.


@dataclass(frozen=True)
class ObjectMemory:
    """Believed object poses of B episodes. Never changed in place.

    Attributes:
        poses: float32 (B, M, 4): x, y, z (meters), yaw (radians).
        position: float32 (B, 3), where the end effector has been sent, or with end_effector=learned is, meters.
        gripper: float32 (B, 1), its last command's sign, 0 before any.
        turn: float32 (B, R), rotations commanded so far.
        hidden: float32 (B, H), of the recurrent network.
        words: float32 (B, W), the instruction.
        arm: float32 (B, SIZE), of the end effector's network; None with end_effector=commanded.
    """

    poses: torch.Tensor
    position: torch.Tensor
    gripper: torch.Tensor
    turn: torch.Tensor
    hidden: torch.Tensor
    words: torch.Tensor
    arm: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the instruction, for a keyframe; the first dimension of each is B."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "words"}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> ObjectMemory:
        """The same episodes' instruction, with what `tensors` gave in place of the rest."""
        return ObjectMemory(words=self.words, **tensors)

    def where(self, chosen: torch.Tensor, other: ObjectMemory) -> ObjectMemory:
        """With the episodes that are `chosen`, bool (B,), as in `other`."""
        new = other.tensors()
        return self.with_tensors(
            {n: torch.where(chosen.view(-1, *[1] * (t.ndim - 1)), new[n], t) for n, t in self.tensors().items()}
        )

    def select(self, rows: torch.Tensor) -> ObjectMemory:
        """Of the episodes at `rows`, int64, in that order."""
        return ObjectMemory(words=self.words[rows], **{name: old[rows] for name, old in self.tensors().items()})

    def put(self, rows: torch.Tensor, other: ObjectMemory) -> ObjectMemory:
        """With the episodes at `rows`, int64, replaced by those of `other`."""
        new = other.tensors()
        kept = {name: old.index_copy(0, rows, new[name]) for name, old in self.tensors().items()}
        return ObjectMemory(words=self.words.index_copy(0, rows, other.words), **kept)


class ObjectProbe(nn.Module):
    """Poses read off one frame's latents, for the objects that the instruction is about.

    Args:
        latent_shape: (C, h, w) of one view. num_views: V.
    """

    center: torch.Tensor
    scale: torch.Tensor
    grid: torch.Tensor

    def __init__(self, config: ObjectsConfig, latent_shape: tuple[int, int, int], num_views: int) -> None:
        super().__init__()
        channels, height, columns = latent_shape
        width, self.num_slots = config.probe_width, len(config.slots)
        self.words = WordEmbedding(2 * WORDS)
        self.stem = nn.Conv2d(num_views * channels + 2, width, 3, padding=1)
        self.blocks = nn.ModuleList(FilmResidual(width, 2 * WORDS) for _ in range(2))
        self.attend = nn.Conv2d(width, ATTENTION, 1)
        self.look = nn.Conv2d(width, width // 4, 1)
        num_features = ATTENTION * (2 + width // 4) + width + 2 * WORDS
        self.head = nn.Sequential(nn.Linear(num_features, 256), nn.SiLU(), nn.Linear(256, 4 * self.num_slots))
        y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, columns), indexing="ij")
        self.register_buffer("grid", torch.stack([x, y]), persistent=False)
        self.register_buffer("scale", torch.tensor(READ_SCALE), persistent=False)
        self.register_buffer("center", torch.zeros(self.num_slots, 4))  # What is read where nothing is seen.

    def forward(self, latents: torch.Tensor, instruction: Sequence[str]) -> torch.Tensor:
        """Latents (B, V, C, h, w) -> poses float32 (B, M, 4)."""
        vectors, is_word = self.words(instruction)
        words = vectors.sum(1) / is_word.sum(1, keepdim=True)
        x = torch.cat([latents.flatten(1, 2).float(), self.grid.expand(len(latents), -1, -1, -1)], 1)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, words)
        x = F.silu(x)
        weights = self.attend(x).flatten(2).softmax(-1)  # (B, ATTENTION, h w)
        places = weights @ self.grid.flatten(1).T
        seen = weights @ self.look(x).flatten(2).transpose(1, 2)
        found = self.head(torch.cat([places.flatten(1), seen.flatten(1), x.amax((2, 3)), words], 1))
        return self.center + self.scale * found.unflatten(1, (self.num_slots, 4))


@dataclass(frozen=True)
class ObjectBatch:
    """What a fit learns from: B sequences of L control steps, and N single frames for the probe.

    Attributes:
        poses: float32 (B, L + 1, M, 4), true ones. start: float32 (B, M, 4), those to roll from, a little off.
        position: float32 (B, 3), the end effector's at the start.
        actions: B x 1 frame of L control steps. success: bool (B, L), it has succeeded by that step.
        instruction: B strings.
        latents: float32 (N, V, C, h, w). seen: float32 (N, M, 4), the poses there. is_first: bool (N,), of episodes'
            first frames, whose turn alone is learned: a block looks the same after a quarter turn.
        said: N strings.
        path: float32 (B, L, 3), where the end effector really was after each step, meters; NaN where not recorded.
            None: nothing is known of it.
    """

    poses: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor
    actions: Actions
    success: torch.Tensor
    instruction: list[str]
    latents: torch.Tensor
    seen: torch.Tensor
    is_first: torch.Tensor
    said: list[str]
    path: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> ObjectBatch:
        """The same on another device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), torch.Tensor)}
        actions = Actions(self.actions.values.to(device), self.actions.executed.to(device))
        return replace(self, actions=actions, **moved)


class ObjectModel(nn.Module):
    """The probe, and a recurrent dynamics of poses that also says whether the instruction has been carried out.

    Always float32, in which poses are exact to less than a micrometer.

    Args:
        latent_shape: (C, h, w) of one view. num_views: V. state_dim: S. action_dim: A.

    Raises:
        ValueError: states without a position, or actions without a translation and a gripper.
    """

    reach: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    turn_scale: torch.Tensor

    def __init__(
        self,
        config: ObjectsConfig,
        latent_shape: tuple[int, int, int],
        num_views: int,
        state_dim: int,
        action_dim: int,
    ) -> None:
        super().__init__()
        if state_dim < 3 or action_dim < 4:
            raise ValueError(
                "world_model.objects: needs states that begin with a position, and actions of a translation (3 numbers)"
                f" and a gripper; got {state_dim} and {action_dim} numbers. Leave world_model.objects.steps at 0"
            )
        self.config, self.num_slots, self.num_turns = config, len(config.slots), action_dim - 4
        width, slots = config.width, self.num_slots
        self.probe = ObjectProbe(config, latent_shape, num_views)
        self.words = WordEmbedding(WORDS)
        num_pairs = slots * (slots - 1) // 2
        num_inputs = 8 * slots + 3 * num_pairs + 3 + 1 + action_dim + self.num_turns + WORDS
        self.embed = nn.Sequential(nn.Linear(num_inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.memory = nn.GRUCell(width, width)
        last = nn.Linear(width, 4 * slots + 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), last)
        first, second = torch.triu_indices(slots, slots, 1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.register_buffer("turn_scale", torch.tensor([NEAR, 2.0]), persistent=False)
        self.register_buffer("reach", torch.tensor([[-1e3] * 3, [1e3] * 3]))  # Lowest and highest position seen.
        self.arm = EndEffector(self.num_turns, config.meters_per_action) if config.end_effector == "learned" else None

    @torch.no_grad()
    def learn_ranges(self, poses: torch.Tensor, positions: torch.Tensor) -> None:
        """Take the mean pose of each slot, float32 (N, M, 4), and the space of positions, float32 (N, 3), from data."""
        self.probe.center.copy_(poses.mean(0))
        self.reach.copy_(torch.stack([positions.amin(0), positions.amax(0)]))

    @torch.no_grad()
    def widen_reach(self, positions: torch.Tensor) -> None:
        """Add positions, float32 (N, 3), meters, to the space that the end effector was seen in."""
        lowest = torch.minimum(self.reach[0], positions.amin(0))
        self.reach.copy_(torch.stack([lowest, torch.maximum(self.reach[1], positions.amax(0))]))

    # --- use ---------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, first: Frames, position: torch.Tensor, instruction: Sequence[str]) -> ObjectMemory:
        """Read B episodes' poses off their first real frame (F = 1).

        Args:
            position: float32 (B, 3), the end effector's, meters.
        """
        return self._started(self.probe(first.latents[:, 0], instruction), position, instruction)

    @torch.no_grad()
    def read(self, frames: Frames, instruction: Sequence[str]) -> torch.Tensor:
        """The poses that the probe sees in each of B x F frames, float32 (B, F, M, 4)."""
        count = frames.latents.shape[1]
        said = [text for text in instruction for _ in range(count)]
        return self.probe(frames.latents.flatten(0, 1), said).unflatten(0, (-1, count))

    @torch.no_grad()
    def roll(self, memory: ObjectMemory, actions: Actions) -> tuple[ObjectMemory, torch.Tensor, torch.Tensor]:
        """What B x F frames of actions do.

        Returns:
            The memory after them; poses at each frame, float32 (B, F, M, 4); and each frame's logit of success, the
            highest of its control steps, float32 (B, F), `NEVER` where none is executed.
        """
        poses, logits = [], []
        for number in range(actions.executed.shape[1]):
            memory, at, logit, _ = self._control_steps(memory, actions.at(slice(number, number + 1)))
            poses.append(at[:, -1])
            logits.append(logit.masked_fill(~actions.executed[:, number], NEVER).amax(1))
        return memory, torch.stack(poses, 1), torch.stack(logits, 1)

    # --- learning ----------------------------------------------------------------------------

    def loss(self, batch: ObjectBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Poses at every control step and the cross-entropy of success; and poses read off single frames. With
        end_effector=learned also the end effector's path, at each state that was recorded.

        Metrics: `pose_error` of slot 0 and `read_error` of the probe's, meters, horizontal; `hand_error`, meters, the
        end effector's at the last state of an episode.

        Raises:
            ValueError: the end effector is to be learned, and the batch has no path.
        """
        memory = self._started(batch.start, batch.position, batch.instruction)
        _, poses, logits, path = self._control_steps(memory, batch.actions)
        valid = batch.actions.executed[:, 0].float()
        error = _pose_error(poses, batch.poses[:, 1:])
        rolled = (_smooth(error).sum(2).mean(2) * valid).sum() / valid.sum()  # Of all slots together.
        entropy = F.binary_cross_entropy_with_logits(logits, batch.success.float(), reduction="none")
        success = (entropy * valid).sum() / valid.sum()
        off = _pose_error(self.probe(batch.latents, batch.said), batch.seen) / self.probe.scale
        off = torch.cat([off[..., :3], off[..., 3:] * 0.3 * batch.is_first[:, None, None]], -1)
        read = F.smooth_l1_loss(off, torch.zeros_like(off), beta=0.05)
        metrics = {
            "pose_error": ((error[:, :, 0, :2].square().sum(-1) + 1e-12).sqrt() * valid).sum().detach() / valid.sum(),
            "read_error": (off[:, 0, :2].square().sum(-1).sqrt().mean() * READ_SCALE[0]).detach(),
            "success_loss": success.detach(),
        }
        if batch.path is not None:
            metrics["hand_error"] = last_error(path, batch.path).detach()
        loss = rolled + SUCCESS_LOSS * success + read
        if self.arm is None:
            return loss, metrics
        if batch.path is None:
            raise ValueError("world_model.objects: end_effector=learned needs the path that was recorded; got none")
        return loss + path_loss(path, batch.path), metrics

    # --- inside ------------------------------------------------------------------------------

    def _started(self, poses: torch.Tensor, position: torch.Tensor, instruction: Sequence[str]) -> ObjectMemory:
        vectors, is_word = self.words(instruction)
        sizes = {"gripper": 1, "turn": self.num_turns, "hidden": self.config.width}
        if self.arm is not None:
            sizes["arm"] = SIZE
        blank = {name: poses.new_zeros(len(poses), size) for name, size in sizes.items()}
        return ObjectMemory(poses, position.float(), words=vectors.sum(1) / is_word.sum(1, keepdim=True), **blank)

    def _control_steps(
        self, memory: ObjectMemory, actions: Actions
    ) -> tuple[ObjectMemory, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One frame of G control steps; those not executed change nothing.

        Returns:
            The memory; poses (B, G, M, 4), logits (B, G) and the end effector's positions (B, G, 3) after each step.
        """
        poses, logits, path = [], [], []
        executed = actions.executed[:, 0]
        for step in range(executed.shape[1]):
            after, logit = self._step(memory, actions.values[:, 0, step])
            memory = memory.where(executed[:, step], after)
            poses.append(memory.poses)
            logits.append(logit)
            path.append(memory.position)
        return memory, torch.stack(poses, 1), torch.stack(logits, 1), torch.stack(path, 1)

    def _step(self, memory: ObjectMemory, action: torch.Tensor) -> tuple[ObjectMemory, torch.Tensor]:
        """One control step; `action`: float32 (B, A)."""
        poses, here = memory.poses, memory.position
        gripper = torch.where(action[:, -1:] != 0, action[:, -1:].sign(), memory.gripper)
        there, arm = self._reached(memory, action, gripper)
        after = replace(memory, position=there, gripper=gripper, arm=arm)
        if arm is not None:  # The end effector is learned from its own states alone.
            here, there = here.detach(), there.detach()
        at, turns = poses[..., :3], poses[..., 2:] * self.turn_scale
        inputs = [
            ((here[:, None] - at) * NEAR).flatten(1),
            ((there[:, None] - at) * NEAR).flatten(1),
            turns.flatten(1),
            ((at[:, self.first] - at[:, self.second]) * FAR).flatten(1),
            (there - here) * NEAR,
            gripper,
            action,
            memory.turn * TURN,
            memory.words,
        ]
        seen = self.embed(torch.cat(inputs, 1))
        hidden = recur(self.memory, seen, memory.hidden)
        out = self.head(torch.cat([seen, hidden], 1))
        moved = poses + STEP_SCALE * out[:, :-1].unflatten(1, (self.num_slots, 4))
        turn = memory.turn + action[:, 3:-1]
        return replace(after, poses=moved, turn=turn, hidden=hidden), out[:, -1]

    def _reached(
        self, memory: ObjectMemory, action: torch.Tensor, gripper: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where the end effector is after a control step, float32 (B, 3), and what its network remembers."""
        if self.arm is not None and memory.arm is not None:
            return self.arm(memory.position, memory.arm, action, gripper, memory.turn, self.reach)
        there = memory.position + self.config.meters_per_action * action[:, :3]
        return torch.minimum(torch.maximum(there, self.reach[0]), self.reach[1]), None


def _pose_error(poses: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """`poses` less `true`, (..., 4), turns by the shorter way."""
    off = poses - true
    turn = torch.remainder(off[..., 3:] + torch.pi, 2 * torch.pi) - torch.pi
    return torch.cat([off[..., :3], turn], -1)


def _smooth(error: torch.Tensor) -> torch.Tensor:
    scaled = error * POSE_LOSS * error.new_tensor([1.0, 1.0, 1.0, YAW_LOSS])
    return F.smooth_l1_loss(scaled, torch.zeros_like(scaled), beta=0.2, reduction="none")


def off_by(start: torch.Tensor, meters: float, radians: float) -> torch.Tensor:
    """Poses (B, M, 4) as a probe would read them: with Gaussian errors, from torch's global generator."""
    return start + torch.randn_like(start) * start.new_tensor([meters, meters, meters, radians])


def mirrored(batch: ObjectBatch, chosen: torch.Tensor) -> ObjectBatch:
    """The sequences where `chosen`, bool (B,), seen in a mirror at the plane y = 0: physics does not mind.

    In an action [x, y, z, gripper] or [x, y, z, rotation vector, gripper] y turns its sign, and of the rotation vector
    x and z.

    Raises:
        ValueError: other actions.
    """
    if (size := batch.actions.values.shape[-1]) not in (4, 7):
        raise ValueError(
            f"world_model.objects.mirror: got true with actions of {size} numbers; what a mirror makes of an action is "
            "known for 4 (x, y, z, gripper) and 7 (x, y, z, rotation vector, gripper); set it to false"
        )
    sign = 1 - 2 * chosen.float()[:, None]
    flip = batch.poses.new_tensor([0.0, 1.0, 0.0, 1.0])
    pose_sign = 1 + flip * (sign - 1)  # (B, 4)
    action_flip = batch.actions.values.new_zeros(batch.actions.values.shape[-1])
    action_flip[1] = 1
    if len(action_flip) == 7:
        action_flip[[3, 5]] = 1
    values = batch.actions.values * (1 + action_flip * (sign - 1))[:, None, None]
    return replace(
        batch,
        poses=batch.poses * pose_sign[:, None, None],
        start=batch.start * pose_sign[:, None],
        position=batch.position * pose_sign[:, :3],
        path=None if batch.path is None else batch.path * pose_sign[:, None, :3],
        actions=Actions(values, batch.actions.executed),
    )
