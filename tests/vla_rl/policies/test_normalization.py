"""Quantile normalization: inverse, mask, clipping, OpenVLA's formula, errors."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.data.statistics import compute_statistics
from vla_rl.policies.normalization import NormStats, QuantileStats
from vla_rl.policies.openvla.tokenizer import ActionTokenizer

# Published for libero_spatial_no_noops.
LIBERO_Q01 = [-0.74547, -0.66161, -0.9375, -0.10714, -0.20679, -0.18429, 0.0]
LIBERO_Q99 = [0.9375, 0.87589, 0.93214, 0.10393, 0.17679, 0.14571, 1.0]
LIBERO = QuantileStats.of("action", {"q01": LIBERO_Q01, "q99": LIBERO_Q99, "mask": [True] * 6 + [False]}, 7)


@given(st.floats(-100, 100), st.floats(1e-3, 100), st.floats(0, 1))
def test_round_trip_inside_the_quantiles(low, width, part):
    stats = QuantileStats.of("action", {"q01": [low], "q99": [low + width]}, 1)
    value = np.array([low + part * width], dtype=np.float32)
    np.testing.assert_allclose(stats.unnormalize(stats.normalize(value)), value, atol=1e-4 * (abs(low) + width))


def test_quantiles_map_to_plus_and_minus_one_and_outside_is_clipped():
    masked = slice(0, 6)
    np.testing.assert_allclose(LIBERO.normalize(np.array(LIBERO_Q01))[masked], -1, atol=1e-6)
    np.testing.assert_allclose(LIBERO.normalize(np.array(LIBERO_Q99))[masked], 1, atol=1e-5)
    assert np.all(LIBERO.normalize(np.full(7, 50.0))[masked] == 1)


def test_gripper_passes_through_unchanged():
    assert LIBERO.normalize(np.full(7, -3.0))[6] == -3.0
    assert LIBERO.unnormalize(np.full(7, 0.996))[6] == np.float32(0.996)


@pytest.mark.parametrize(
    ("last", "as_it_is"),
    [
        ((-1.0, 1.0), True),
        ((0.0, 1.0), True),
        ((-1.0, -1.0), True),
        ((0.0, 100.0), False),  # LeRobot's SO-101.
        ((-0.02, 0.02), False),  # No gripper: a motion in meters.
    ],
)
def test_the_last_number_of_actions_comes_back_from_its_token(last, as_it_is):
    actions = np.random.default_rng(0).uniform(-0.3, 0.3, (200, 4)).astype(np.float32)
    actions[:, -1] = np.repeat(last, 100)
    part: Any = SimpleNamespace(
        actions=actions, rows=np.arange(200), state=np.zeros((200, 0)), num_episodes=1, grippers=(3,)
    )
    found = compute_statistics([part])["action"]
    assert found["mask"] == [True, True, True, not as_it_is]
    stats, tokens = QuantileStats.of("action", found, 4), ActionTokenizer(256)
    again = stats.unnormalize(tokens.decode(tokens.encode(stats.normalize(actions))))
    np.testing.assert_allclose(again[:, -1], actions[:, -1], atol=0.01 * max(np.abs(last)))


def test_unnormalize_by_hand():
    # 0.5 * (0.5 + 1) * (0.9375 + 0.74547) - 0.74547
    np.testing.assert_allclose(LIBERO.unnormalize(np.full(7, 0.5))[0], 0.5167575, atol=1e-6)


def test_a_range_is_mapped_back_with_ofts_epsilon_and_without_it_for_the_base_model():
    stats = NormStats.of("x", {"action": {"q01": [0.0], "q99": [0.0]}}, 1, None)
    assert stats.action.unnormalize_exact(np.array([1.0])) == pytest.approx(1e-8, rel=1e-6)
    assert stats.without_epsilon().action.unnormalize_exact(np.array([1.0])) == 0


def test_the_states_statistics_are_read_where_they_are_wanted_and_there():
    range_of = {"q01": [0.0], "q99": [1.0]}
    both = {"action": range_of, "proprio": range_of}
    assert NormStats.of("x", both, 1, 1).state is not None and NormStats.of("x", both, 1, None).state is None
    assert NormStats.of("x", {"action": range_of}, 1, 1).state is None


def test_a_constant_dimension_comes_back():
    stats = QuantileStats.of("action", {"q01": [0.25], "q99": [0.25]}, 1)
    np.testing.assert_allclose(stats.unnormalize(stats.normalize(np.array([0.25]))), [0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"q01": [0.0]}, "'q99' is missing"),
        ({"q01": [0.0, 1.0], "q99": [1.0, 2.0]}, r"shape \(2,\), expected \(1,\)"),
        ({"q01": [float("nan")], "q99": [1.0]}, "must be finite"),
        ({"q01": [2.0], "q99": [1.0]}, "q01 > q99"),
    ],
)
def test_wrong_statistics_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        QuantileStats.of("action", values, 1)


def test_written_in_openvlas_format_and_read_back(tmp_path):
    state = QuantileStats.of("state", {"q01": [0.0, 1.0], "q99": [1.0, 2.0]}, 2)
    NormStats("libero", LIBERO, state).write(tmp_path)
    assert set(json.loads((tmp_path / "dataset_statistics.json").read_text())["libero"]) == {"action", "proprio"}
    again = NormStats.read(tmp_path, 7, 2)
    assert again is not None and again.state is not None and again.name == "libero"
    np.testing.assert_array_equal(again.action.q01, LIBERO.q01)
    np.testing.assert_array_equal(again.action.mask, LIBERO.mask)
    np.testing.assert_array_equal(again.state.q99, state.q99)


def test_damaged_statistics_name_the_file(tmp_path):
    (tmp_path / "dataset_statistics.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset_statistics.json: not valid JSON"):
        NormStats.read(tmp_path, 7, 8)
    (tmp_path / "dataset_statistics.json").write_text('{"a": {"action": {"q01": [0]}}}')
    with pytest.raises(ValueError, match=r"dataset_statistics.json: action statistics: 'q99' is missing"):
        NormStats.read(tmp_path, 1, None)
    (tmp_path / "dataset_statistics.json").write_text('{"a": {}, "b": {}}')
    with pytest.raises(ValueError, match=r"one dataset, found \['a', 'b'\]"):
        NormStats.read(tmp_path, 7, 8)
