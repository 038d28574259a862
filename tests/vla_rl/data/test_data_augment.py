"""Image augmentation: what each change does, within its limits, and that it follows the generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError, validate
from vla_rl.data.augment import augment
from vla_rl.data.config import AugmentConfig
from vla_rl.data.dataset import BCBatch
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.training.bc_trainer import BCTrainer
from vla_rl.training.config import SFTConfig


def run(images: np.ndarray, seed: int = 0, **options) -> np.ndarray:
    config = AugmentConfig.model_validate(options)
    return augment({"c": images}, config, torch.Generator().manual_seed(seed))["c"]


def gradient(size: int = 64, height: int = 16) -> np.ndarray:
    """Images whose red is 8 x the column and green 8 x the row."""
    image = np.zeros((size, height, height, 3), np.uint8)
    image[..., 0] = 8 * np.arange(height)
    image[..., 1] = 8 * np.arange(height)[:, None]
    return image


def test_off_returns_the_input():
    images = gradient()
    assert run(images) is images


def test_shift_moves_whole_pixels_and_repeats_edges():
    images = gradient()
    shifted = run(images, shift=3)
    assert shifted.dtype == np.uint8 and shifted.shape == images.shape
    offsets = set()
    for image in shifted:
        columns = image[8, :, 0].astype(int) // 8
        rows = image[:, 8, 1].astype(int) // 8
        dx, dy = columns[8] - 8, rows[8] - 8
        assert np.array_equal(columns, np.clip(np.arange(16) + dx, 0, 15))
        assert np.array_equal(rows, np.clip(np.arange(16) + dy, 0, 15))
        offsets.add((dx, dy))
    assert max(abs(v) for pair in offsets for v in pair) == 3 and len(offsets) > 20


def test_crop_keeps_the_area_and_stays_inside():
    images = gradient(height=32)
    cropped = run(images, crop_area=0.25).astype(float)
    span = cropped[:, 16, -1, 0] - cropped[:, 16, 0, 0]  # Half the side: half of the red gradient.
    assert np.allclose(span / 8, 31 * 0.5, atol=0.6)
    assert len(set(cropped[:, 16, 16, 0].tolist())) > 20
    assert np.array_equal(run(images, crop_area=0.999999), images)


def test_brightness_and_contrast():
    gray = np.full((64, 8, 8, 3), 100, np.uint8)
    gray[:, :4] = 140
    bright = run(gray, brightness=0.1).astype(int)
    change = bright - gray
    assert np.all(change == change[:, :1, :1, :1]) and 15 < np.abs(change).max() <= 26
    contrast = run(gray, contrast=0.5).astype(float)
    assert np.allclose(contrast.mean((1, 2)), 120, atol=0.6)
    spread = contrast[:, 0, 0, 0] - contrast[:, 7, 0, 0]
    assert spread.min() >= 19 and spread.max() <= 61 and spread.std() > 5


def test_saturation_and_hue_keep_gray_and_luma():
    gray = np.full((32, 4, 4, 3), 90, np.uint8)
    assert np.abs(run(gray, color=0.9).astype(int) - 90).max() <= 1
    red = np.zeros((32, 4, 4, 3), np.uint8)
    red[:] = (120, 100, 100)
    turned = run(red, color=0.9).astype(float)
    luma = turned @ np.array([0.299, 0.587, 0.114])
    assert np.allclose(luma, 0.299 * 120 + 0.701 * 100, atol=1.5)
    assert (turned[:, 0, 0].argmax(1) != 0).any()  # Some became green or blue.
    assert np.abs(run(red, color=0.1).astype(int) - red).max() <= 10


def test_values_are_clipped_not_wrapped():
    white = np.full((16, 4, 4, 3), 250, np.uint8)
    assert run(white, brightness=0.2).min() >= 250 - 52


def test_the_generator_decides():
    images = gradient()
    options = {"shift": 2, "crop_area": 0.9, "brightness": 0.2, "contrast": 0.2, "color": 0.2}
    assert np.array_equal(run(images, 1, **options), run(images, 1, **options))
    assert not np.array_equal(run(images, 1, **options), run(images, 2, **options))


def test_cameras_are_changed_independently():
    both = augment(
        {"a": gradient(), "b": gradient()}, AugmentConfig.model_validate({"shift": 3}), torch.Generator().manual_seed(0)
    )
    assert not np.array_equal(both["a"], both["b"])


def test_impossible_options():
    for values in ({"crop_area": 0}, {"shift": -1}, {"contrast": 1.5}, {"color": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            validate(AugmentConfig, values)


def test_random_crops_stand_in_for_the_center_crop_of_a_policy():
    """Half of the width is seen in training, as when it acts; a crop of a crop would leave a quarter."""
    spec = fake_env_spec(image_size=64)
    policy = OpenVLAConfig.model_validate({"images": {"crop_area": 0.25}, "precision": "fp32"}).build(spec)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    obs = fake_observation(spec, 4)
    obs.images["agentview"][:] = np.uint8(4) * np.arange(64, dtype=np.uint8)[:, None]
    widths, whole = [], policy.network.prefix

    def seen(images, *rest):
        widths.append(int(np.ptp(images.numpy().astype(int), axis=-2).max()))
        return whole(images, *rest)

    policy.network.prefix = seen
    batch = BCBatch(obs, np.zeros((4, 8, 7), np.float32), np.ones((4, 8), bool), None)
    for area in (0.25, 1.0):
        config = SFTConfig.model_validate({"datasets": "none", "augment": {"crop_area": area}, "batch_size": 4})
        trainer = BCTrainer(policy, config)
        trainer.step(batch)
        trainer.evaluate(batch)
    policy.act(obs)
    assert all(118 <= width <= 130 for width in widths) and len(widths) == 5, widths
