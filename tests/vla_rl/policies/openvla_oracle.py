"""The OpenVLA fixtures: tiny checkpoints written by the reference implementation, with inputs and expected outputs.

They are found through the variable VLA_RL_OPENVLA_ORACLE, or in `../shared/openvla_oracle` beside the
repository; tests skip where they are not.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.types import Observation

VARIABLE = "VLA_RL_OPENVLA_ORACLE"
DEFAULT = Path(__file__).resolve().parents[4] / "shared" / "openvla_oracle"


def oracle(name: str) -> Path:
    """A fixture's folder; skips the test where there is none."""
    folder = Path(os.environ.get(VARIABLE, DEFAULT)) / name
    if not folder.is_dir():
        pytest.skip(f"no OpenVLA fixtures: {folder} is not there; set {VARIABLE} to their folder")
    return folder


def arrays(name: str, file: str) -> dict[str, np.ndarray]:
    """The arrays of a fixture's npz file, by name."""
    with np.load(oracle(name) / file) as values:
        return {key: values[key] for key in values.files}


class StoredIds:
    """A tokenizer that knows the ids of given prompts: the fixtures hold ids, and no tokenizer."""

    def __init__(self, ids: dict[str, list[int]]):
        self.ids = ids

    def encode_prompt(self, instruction: str) -> tuple[int, ...]:
        return tuple(self.ids[instruction])


def load(name: str, ids: dict[str, list[int]], **chosen) -> OpenVLAPolicy:
    """A fixture's policy, computing in float32, images taken as they are."""
    chosen = {"precision": "fp32", "images": {}, **chosen}
    policy = OpenVLAPolicy.load(oracle(name), chosen=chosen, for_training=True)
    policy.tokenizer = StoredIds(ids)
    return policy


def as_images(pixel_values: np.ndarray) -> np.ndarray:
    """uint8 (B, views, 224, 224, 3) of normalized pixels (B, 6 * views, 224, 224): SigLIP's half of them, undone."""
    b, channels, height, width = pixel_values.shape
    siglip = pixel_values.reshape(b, channels // 6, 6, height, width)[:, :, 3:]
    images = np.round((siglip * 0.5 + 0.5) * 255)
    return images.astype(np.uint8).transpose(0, 1, 3, 4, 2)


def observation(images: np.ndarray, instructions: list[str], state: np.ndarray | None = None) -> Observation:
    """One of uint8 (B, views, height, width, 3)."""
    cameras = ("agentview", "wrist")[: images.shape[1]]
    if state is None:
        state = np.zeros((len(images), 8), np.float32)
    return Observation({c: images[:, i] for i, c in enumerate(cameras)}, state.astype(np.float32), instructions)


def close(actual: torch.Tensor | np.ndarray, expected: np.ndarray, atol: float, rtol: float = 0.0) -> None:
    """Within a tolerance, compared in float64."""
    if isinstance(actual, torch.Tensor):
        actual = actual.detach().numpy()
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), atol=atol, rtol=rtol)
