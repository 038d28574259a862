"""The action tokenizer: OpenVLA's bins and ids, for any number of bins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.policies.openvla.tokenizer import ActionTokenizer

ACTIONS = st.floats(-3.0, 3.0, allow_nan=False)
BINS = st.integers(3, 300)


@given(st.lists(ACTIONS, min_size=1, max_size=20), BINS)
def test_round_trip_is_within_half_a_bin(actions, num_bins):
    tokenizer = ActionTokenizer(num_bins)
    clipped = np.clip(np.array(actions), -1, 1)
    error = np.abs(tokenizer.decode(tokenizer.encode(np.array(actions))) - clipped)
    assert error.max() <= 1.0 / (num_bins - 1) + 1e-12


@given(ACTIONS, ACTIONS, BINS)
def test_a_larger_action_never_has_a_larger_token(a, b, num_bins):
    tokenizer = ActionTokenizer(num_bins)
    low, high = tokenizer.encode(np.sort(np.array([a, b])))
    assert high <= low
    assert 0 <= high <= low < num_bins


@given(st.integers(0, 255))
def test_encoding_a_decoded_token_gives_it_back(token):
    tokenizer = ActionTokenizer(256)
    again = int(tokenizer.encode(tokenizer.decode(np.array(token))))
    assert again == max(token, 1), "tokens 0 and 1 share the highest center"


def test_targets_are_the_tokens_that_do_the_same_and_0_stands_for_0_and_1():
    tokenizer = ActionTokenizer(256)
    tokens, alike = tokenizer.targets(np.array([[1.0, -1.0], [0.996, 0.5]]), lambda actions: actions)
    assert tokens.tolist() == [[0, 255], [0, tokenizer.encode(np.array(0.5))]]
    assert [[np.flatnonzero(a).tolist() for a in row] for row in alike] == [[[0, 1], [255]], [[0, 1], [tokens[1, 1]]]]
    tokens, alike = tokenizer.targets(np.array([[1.0], [-0.3]]), np.sign)
    np.testing.assert_array_equal(alike[:, 0], [np.arange(256) < 128, np.arange(256) > 128])
    assert tokenizer.targets(np.zeros((2, 1)), np.zeros_like)[1].all(), "a dimension that never moves"


def test_openvlas_ids():
    tokenizer = ActionTokenizer(256)
    first = 32000 - tokenizer.num_bins
    assert first == 31744
    assert first + tokenizer.encode(np.array([1.0, -1.0])).tolist()[0] == 31744
    assert first + tokenizer.encode(np.array([1.0, -1.0])).tolist()[1] == 31999
    assert tokenizer.centers.shape == (255,)
    np.testing.assert_allclose(tokenizer.decode(np.array([0, 1, 255])), [0.99607843, 0.99607843, -0.99607843])


def test_agrees_with_the_formula_of_openvla():
    actions = np.linspace(-1.1, 1.1, 1001)
    edges = np.linspace(-1, 1, 256)
    expected = 32000 - np.digitize(np.clip(actions, -1, 1), edges)
    tokenizer = ActionTokenizer(256)
    np.testing.assert_array_equal(32000 - tokenizer.num_bins + tokenizer.encode(actions), expected)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        ActionTokenizer(256).encode(np.array([0.0, np.nan]))


def test_too_few_bins_are_refused():
    with pytest.raises(ValueError, match="action_bins: got 2"):
        ActionTokenizer(2)
