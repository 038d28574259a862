"""A learned reward: the network, what its logits mean, and its folder of safetensors and JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.special import expit
from torch import nn
from torch.nn import functional as F

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.instruction_embedding import FilmResidual, WordEmbedding
from vla_rl.config import Config
from vla_rl.data.source import resize
from vla_rl.evaluation.probability import SuccessProbability
from vla_rl.evaluation.statistics import Figure
from vla_rl.rewards.base import Judgement, RewardModel
from vla_rl.rewards.config import RewardNetworkConfig
from vla_rl.types import EnvSpec, Observation

WEIGHTS_FILE, FACTS_FILE, STATES_FILE = "weights.safetensors", "reward.json", "initial_states.json"
FORMAT = 1


class RewardError(ValueError):
    """A learned reward that is missing, damaged, or reads what is not shown; the message says what to do."""


class RewardFacts(Config):
    """What a learned reward's weights mean, saved beside them.

    Attributes:
        cameras: that it reads, in order. image_size: side that their images are resized to. state_dim: S, 0: none read.
        every: control steps from one judgement to the next, as it was fitted.
        threshold: logit of success above which an episode counts as one. max_false_success: the bound it was chosen by.
        probability: what the highest logit of an episode means.
        progress_slope, progress_intercept: progress = sigmoid(slope * logit + intercept).
        longest_steps: instruction -> control steps of the slowest success that it was fitted on, where progress is 0.
        policies: that acted in what it was fitted on. datasets: folder -> fingerprint.
        figures: on the initial states held out, some of which are as good as they are because they chose the threshold.
        num_episodes, num_failures: of those.
        weights: SHA-256 of their file: the reward's fingerprint.
    """

    format: int = FORMAT
    network: RewardNetworkConfig
    cameras: tuple[str, ...]
    image_size: PositiveInt
    state_dim: NonNegativeInt
    every: PositiveInt
    threshold: FiniteFloat
    max_false_success: float
    probability: SuccessProbability
    progress_slope: FiniteFloat
    progress_intercept: FiniteFloat
    longest_steps: dict[str, PositiveInt]
    policies: tuple[str, ...]
    datasets: dict[str, str]
    figures: dict[str, Figure]
    num_episodes: int
    num_failures: int
    weights: str = ""


class LearnedReward(RewardModel):
    """See `RewardModel`. Of each stream it keeps the first and the last image and state."""

    def __init__(self, network: RewardNetwork, facts: RewardFacts) -> None:
        self.network, self.facts, self.every = network.eval(), facts, facts.every
        self._first: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._last: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def observe(
        self,
        obs: Observation,
        streams: Sequence[int],
        begins: Sequence[bool] | np.ndarray,
        told: np.ndarray | None = None,
    ) -> Judgement:
        """See `RewardModel.observe`."""
        images, states = seen(obs, self.facts.cameras, self.facts.image_size, self.facts.state_dim)
        for row, (stream, new) in enumerate(zip(streams, begins, strict=True)):
            if new:
                self._first[stream] = self._last[stream] = images[row], states[row]
            elif stream not in self._first:
                raise ValueError(f"stream {stream} never began: its first observation has begins=True")
        first, last = ([kept[stream] for stream in streams] for kept in (self._first, self._last))
        clips = np.stack([np.stack([i for i, _ in first]), np.stack([i for i, _ in last]), images], 1)
        past = np.stack([np.stack([s for _, s in first]), np.stack([s for _, s in last]), states], 1)
        success, progress = logits(self.network, clips, past, obs.instruction)
        for row, stream in enumerate(streams):
            self._last[stream] = images[row], states[row]
        return self.judge(success, progress)

    def judge(self, success: np.ndarray, progress: np.ndarray) -> Judgement:
        """What logits, float32 (n,) each, mean."""
        facts, probability = self.facts, self.facts.probability
        return Judgement(
            expit(probability.slope * success + probability.intercept).astype(np.float32),
            expit(facts.progress_slope * progress + facts.progress_intercept).astype(np.float32),
            success > facts.threshold,
        )

    def check_spec(self, spec: EnvSpec) -> None:
        """Check that an environment shows what the reward reads, of its tasks.

        Raises:
            RewardError: a camera is missing, the state is of another size, or an instruction is new to it.
        """
        facts = self.facts
        if missing := sorted(set(facts.cameras) - set(spec.cameras)):
            raise RewardError(
                f"env.reward: reads the cameras {', '.join(facts.cameras)}; {spec.title} shows "
                f"{', '.join(spec.cameras)}, not {', '.join(missing)}: set env.cameras, or fit it again with "
                "reward.cameras"
            )
        if facts.state_dim not in (0, spec.state_dim):
            raise RewardError(
                f"env.reward: reads a state of {facts.state_dim} numbers, that of {spec.title} has {spec.state_dim}; "
                "fit it on this robot's episodes, or with reward.use_state=false"
            )
        if new := sorted(text for text in spec.tasks.values() if not _is_known(text, facts.longest_steps)):
            raise RewardError(
                f"env.reward: has seen no success of {new[0]!r}; it knows {len(facts.longest_steps)} instructions. "
                "Choose its tasks (env.tasks), or fit it on episodes of this one"
            )

    def save(self, folder: Path, initial_states: Sequence[str]) -> RewardFacts:
        """Write weights, facts, and the states that nothing may be measured on; whole or not at all.

        Returns:
            The facts, with the weights' fingerprint.
        """
        with atomic_folder(Path(folder), what="learned reward", replace=True) as partial:
            save_file({n: t.contiguous() for n, t in self.network.state_dict().items()}, partial / WEIGHTS_FILE)
            self.facts = self.facts.model_copy(update={"weights": fingerprint(partial / WEIGHTS_FILE)})
            (partial / FACTS_FILE).write_text(self.facts.model_dump_json(indent=1) + "\n")
            (partial / STATES_FILE).write_text(json.dumps(sorted(set(initial_states)), indent=0) + "\n")
        return self.facts

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """The reward in a folder.

        Raises:
            RewardError: missing or damaged.
        """
        folder = Path(folder)
        if (folder / "reward" / FACTS_FILE).is_file():
            raise RewardError(f"{folder} is the run's folder; name {folder / 'reward'}")
        try:
            facts = RewardFacts.model_validate_json((folder / FACTS_FILE).read_text(encoding="utf-8"))
            if facts.format != FORMAT:
                raise RewardError(f"{folder}: a learned reward of format {facts.format}, this version reads {FORMAT}")
            if (found := fingerprint(folder / WEIGHTS_FILE)) != facts.weights:
                raise RewardError(f"{folder}: the weights ({found[:12]}) are not those of its facts; copy it again")
            network = RewardNetwork(facts.network, len(facts.cameras), facts.state_dim)
            network.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except (OSError, SafetensorError, ValidationError, RuntimeError) as error:
            text = str(error).splitlines()[0]
            raise RewardError(
                f"{folder}: no readable learned reward ({type(error).__name__}: {text}). `vla-rl reward fit` makes "
                "one; if this is such a folder, copy it again"
            ) from error
        return cls(network, facts)


def _is_known(instruction: str, known: Iterable[str]) -> bool:
    """Whether an instruction is among those known; its {places}, if it has some, may be filled in any way."""
    pattern = re.compile(".+".join(map(re.escape, re.split(r"{\w+}", instruction))))
    return any(pattern.fullmatch(text) for text in known)


def fingerprint(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seen(obs: Observation, cameras: Sequence[str], size: int, state_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """What the network reads of B observations: images uint8 (B, V, size, size, 3), states float32 (B, S).

    Raises:
        RewardError: a camera is missing, or a state of another size.
    """
    if missing := sorted(set(cameras) - set(obs.images)):
        raise RewardError(f"the reward reads the camera {missing[0]}; got {', '.join(obs.images) or 'none'}")
    if state_dim and obs.state.shape[1] != state_dim:
        raise RewardError(f"the reward reads a state of {state_dim} numbers, got {obs.state.shape[1]}")
    views = [np.stack([resize(image, size) for image in obs.images[camera]]) for camera in cameras]
    return np.stack(views, 1), np.ascontiguousarray(obs.state[:, :state_dim])


@torch.no_grad()
def logits(
    network: RewardNetwork, clips: np.ndarray, states: np.ndarray, instruction: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of success and progress, float32 (n,) each.

    Args:
        clips: uint8 (n, 3, V, size, size, 3): first, previous and present images. states: float32 (n, 3, S), likewise.
    """
    assert clips.shape[1] == states.shape[1] == NUM_IMAGES, "first, previous, present"
    success, progress = network(torch.from_numpy(clips), torch.from_numpy(states), instruction)
    return success.numpy(), progress.numpy()


NUM_IMAGES = 3  # First, previous, present.
SHIFT = 2  # Pixels that training images are moved by, at most.
BRIGHTNESS, STATE_NOISE = 0.1, 0.1  # Standard deviations, of full scale and of a normalized state.


class RewardNetwork(nn.Module):
    """Logits of success and of progress.

    Args:
        num_views: V, cameras. state_dim: S, 0 without a state.
    """

    state_mean: torch.Tensor
    state_spread: torch.Tensor

    def __init__(self, config: RewardNetworkConfig, num_views: int, state_dim: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        width = config.width
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_spread", torch.ones(state_dim))
        self.words = WordEmbedding(width, pairs=True)
        self.stem = nn.Conv2d(num_views * NUM_IMAGES * 3, width // 2, 6, stride=4, padding=1)
        self.fine = nn.Conv2d(width // 2, width, 3, padding=1)
        self.blocks = nn.ModuleList([FilmResidual(width, width), FilmResidual(width, width)])
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.embed_state = nn.Linear(NUM_IMAGES * state_dim, width) if state_dim else None
        self.hidden = nn.Linear((3 if state_dim else 2) * width + width, 2 * width)
        self.head = nn.Linear(2 * width, 2)

    def forward(
        self, images: torch.Tensor, states: torch.Tensor, instruction: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of success and of progress, float32 (B,) each.

        Args:
            images: uint8 (B, 3, V, height, width, 3): first, previous and present. states: float32 (B, 3, S), likewise.
        """
        pixels, states = images.float() / 255 - 0.5, (states - self.state_mean) / self.state_spread
        if self.training:
            pixels, states = _augmented(pixels, states)
        first, previous, now = pixels.unbind(1)
        changes = torch.stack([now, now - first, now - previous], 1)  # (B, 3, V, height, width, 3)
        vectors, is_word = self.words(instruction)
        words = vectors.sum(1) / is_word.sum(1, keepdim=True)
        x = F.silu(self.fine(F.silu(self.stem(changes.permute(0, 1, 2, 5, 3, 4).flatten(1, 3)))))
        x = self.blocks[1](self.down(self.blocks[0](x, words)), words)
        parts = [x.amax((2, 3)), x.mean((2, 3)), words]
        if self.embed_state is not None:
            parts.append(self.embed_state(states.flatten(1)))
        hidden = F.silu(self.hidden(F.dropout(torch.cat(parts, 1), self.dropout, self.training)))
        success, progress = self.head(F.dropout(hidden, self.dropout, self.training)).float().unbind(1)
        return success, progress


def _augmented(pixels: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each example's images moved alike by a few pixels, and made brighter or darker alike; states with noise."""
    batch, (height, width) = len(pixels), pixels.shape[3:5]
    moves = torch.randint(-SHIFT, SHIFT + 1, (2, batch, 1))
    rows = (torch.arange(height) + moves[0]).clamp(0, height - 1).to(pixels.device)
    columns = (torch.arange(width) + moves[1]).clamp(0, width - 1).to(pixels.device)
    example = torch.arange(batch, device=pixels.device)[:, None, None]
    moved = pixels.permute(0, 3, 4, 1, 2, 5)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 4, 1, 2, 5)
    light = BRIGHTNESS * torch.randn(batch, 1, 1, 1, 1, 1, device=pixels.device)
    return moved + light, states + STATE_NOISE * torch.randn_like(states)
