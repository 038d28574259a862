"""OpenVLA's action tokenizer: each action dimension is one of 256 uniform bins, each bin a token.

The bins are the last `num_bins` ids of the (un-padded) vocabulary of size V. With edges
`linspace(-1, 1, 256)`, an action a becomes token id `V - digitize(a)`: +1 the lowest id of the
range, -1 the highest. There are 255 centers for 256 ids, so the two lowest ids decode alike.

What is logged is the action, of which there is no telling which token drew it: +1 is written as token 0, 0 and 1 decode
to .996, and .996 is written as 1; all tokens of one sign open or close a gripper; float32 may round neighbors to one
number. So the likelihood of a logged action is that of all its tokens together (`targets`). That holds for whoever
acted (this policy, another one, a person), where tokens kept in datasets would serve only the policy that drew them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class ActionTokenizer:
    """Between normalized actions in [-1, 1] and action tokens.

    An action token is the index of its id among the action ids, in vocabulary order: 0 is id
    V - num_bins (action +1) and num_bins - 1 is id V - 1 (action -1). It is the index into
    logits that were computed for the action ids alone.
    """

    def __init__(self, num_bins: int = 256):
        if num_bins < 3:
            raise ValueError(f"action_bins: got {num_bins}, needs at least 3")
        self.num_bins = num_bins
        self.edges = np.linspace(-1.0, 1.0, num_bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2.0

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Tokens int64 of normalized actions, any shape; values outside [-1, 1] are clipped.

        Raises:
            ValueError: an action is NaN.
        """
        if np.isnan(actions).any():
            raise ValueError("actions contain NaN; check the dataset and its statistics")
        digits = np.digitize(np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0), self.edges)
        return self.num_bins - digits.astype(np.int64)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Normalized actions float64 (bin centers) of tokens, any shape."""
        digits = self.num_bins - np.asarray(tokens, dtype=np.int64)
        return self.centers[np.clip(digits - 1, 0, self.num_bins - 2)]

    def targets(self, actions: np.ndarray, to_env: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Logged actions as tokens, int64 (..., A), and which tokens are the same action, bool (..., A, num_bins).

        A policy that reads its tokens so far is given these, 0 where 0 or 1 was drawn, as of actions at the upper
        quantile: its likelihood is exact but for what it would make of the other one.

        Args:
            actions: normalized, (..., A). to_env: such actions in the environment's units.
        """
        tokens = self.encode(actions)
        tokens[tokens == 1] = 0
        dims = np.arange(tokens.shape[-1])
        every = to_env(self.decode(np.arange(self.num_bins)[:, None].repeat(len(dims), 1))).T
        return tokens, every[dims] == every[dims, tokens][..., None]

    def first_id(self, vocab_size: int) -> int:
        """The vocabulary id of token 0, for an un-padded vocabulary of this size."""
        return vocab_size - self.num_bins
