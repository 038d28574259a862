"""The replay buffer gives back what was put in, mixed as asked, after any kill; what is damaged is refused."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.offpolicy.replay import DECISIONS_FILE, Replay, ReplayError
from vla_rl.algorithms.offpolicy.transitions import Transitions


def episodes(lengths: list[int], first: int, candidates: int = 0) -> Transitions:
    """Episodes of so many decisions of 4 steps; each decision's embedding holds a number of its own, from `first`."""
    rows = np.arange(sum(lengths))
    ends = np.cumsum(lengths)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    left = ends[episode] - rows
    number = (first + rows).astype(np.float32)
    return Transitions(
        embedding=np.stack([number, -number], 1),
        chunk=np.broadcast_to(number[:, None, None], (len(rows), 4, 3)).copy(),
        num_steps=np.full(len(rows), 4),
        following=np.where(left > 1, rows + 1, -1),
        elapsed=4 * (rows - (ends - lengths)[episode]),
        remaining=4 * left,
        episode=episode,
        success=np.arange(len(lengths)) % 2 == 0,
        task=np.zeros(len(lengths), np.int64),
        initial_state=np.arange(len(lengths)),
        candidates=np.full((len(rows), candidates, 4, 3), number[:, None, None, None]) if candidates else None,
    )


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    prior=st.none() | LENGTHS,
    segments=st.lists(LENGTHS, min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.25, 0.5]),
    capacity=st.integers(1, 30),
    candidates=st.integers(0, 2),
)
def test_whatever_is_added_comes_back_mixed_and_bounded(
    prior: list[int] | None, segments: list[list[int]], share: float, capacity: int, candidates: int
) -> None:
    logged = None if prior is None else episodes(prior, 0, candidates)
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(Path(folder), logged, share, capacity, "p")
        for number, lengths in enumerate(segments):
            replay.add(number, episodes(lengths, 1000 * (number + 1), candidates))
            assert len(replay) <= capacity or replay.num_episodes == len(lengths), "only the newest may be too large"
        batch = replay.draw(32, 0.9, np.random.default_rng(0))
        assert (~batch.fresh).sum() == (0 if prior is None else round(share * 32))
        assert (batch.place[:, 0] == batch.chunk[:, 0]).all() and batch.chunk.shape == (32, 12)
        assert ((batch.place[:, 0] >= 1000) == batch.fresh).all()
        follows = batch.goes_on
        assert (batch.next_place[follows, 0] == batch.place[follows, 0] + 1).all(), "the same episode's next decision"
        assert not batch.next_place[~follows].any()
        assert batch.candidates.shape == batch.next_candidates.shape == (32, candidates, 12)
        if candidates:
            assert (batch.next_candidates[follows, 0, 0] == batch.next_place[follows, 0]).all()
        np.testing.assert_allclose(batch.discount, 0.9**4, rtol=1e-6)

        again = Replay(Path(folder), logged, share, capacity, "p")
        again.restore(len(segments))
        other = again.draw(32, 0.9, np.random.default_rng(0))
        assert all(np.array_equal(vars(batch)[name], vars(other)[name]) for name in vars(batch))


def test_logged_decisions_are_drawn_by_their_weights(tmp_path: Path) -> None:
    logged = replace(episodes([2, 2], 0), weight=np.array([0.0, 1.0, 0.0, 3.0]))
    replay = Replay(tmp_path, logged, 0.5, 10, "p")
    drawn = replay.draw(4000, 0.9, np.random.default_rng(0)).place[:, 0]
    assert set(drawn.tolist()) == {1.0, 3.0}
    assert (drawn == 3).mean() == pytest.approx(0.75, abs=0.03)
    replay.add(0, episodes([2], 10))
    fresh = replay.draw(4000, 0.9, np.random.default_rng(0))
    assert (fresh.place[fresh.fresh, 0] == 10).mean() == pytest.approx(0.5, abs=0.04), "fresh ones are all alike"


@pytest.mark.parametrize("is_prior", [True, False])
def test_what_a_person_decided_is_drawn_as_prior_where_asked(tmp_path: Path, is_prior: bool) -> None:
    replay = Replay(tmp_path, None, 0.5, 10, "p", person_is_prior=is_prior)
    replay.add(0, replace(episodes([4], 10), person=np.array([False, True, True, False])))
    batch = replay.draw(64, 0.9, np.random.default_rng(0))
    assert (~batch.fresh).sum() == (32 if is_prior else 0)
    assert set(batch.place[~batch.fresh, 0].tolist()) == ({11.0, 12.0} if is_prior else set())
    assert set(batch.place[batch.fresh, 0].tolist()) == {10.0, 11.0, 12.0, 13.0}


def test_outcomes_are_discounted_to_the_end(tmp_path: Path) -> None:
    replay = Replay(tmp_path, episodes([2, 1], 0), 0.5, 10, "p")
    batch = replay.draw(64, 0.5, np.random.default_rng(0))
    expected = {0.0: 0.5**8, 1.0: 0.5**4, 2.0: 0.0}
    np.testing.assert_allclose(batch.outcome, [expected[number] for number in batch.place[:, 0].tolist()])
    assert set(batch.place[:, 0].tolist()) == set(expected)


def test_only_what_was_there_then_is_restored(tmp_path: Path) -> None:
    replay = Replay(tmp_path, None, 0.5, 100, "p")
    for number in range(3):
        replay.add(number, episodes([2], 10 * number))
    earlier = Replay(tmp_path, None, 0.5, 100, "p")
    earlier.restore(2)
    assert len(earlier) == 4 and earlier.has(2) and not earlier.has(3)
    earlier.load(2)
    assert len(earlier) == 6


def test_what_is_damaged_or_anothers_is_refused(tmp_path: Path) -> None:
    replay = Replay(tmp_path, None, 0.5, 100, "one policy")
    replay.add(0, episodes([3], 0))
    with pytest.raises(ReplayError, match=r"segment-00000000: holds what another policy.*another poli"):
        Replay(tmp_path, None, 0.5, 100, "another policy").restore(1)
    file = tmp_path / "segment-00000000" / DECISIONS_FILE
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ReplayError, match=r"segment-00000000: not a readable segment"):
        Replay(tmp_path, None, 0.5, 100, "one policy").restore(1)
    with pytest.raises(ValueError, match="empty replay buffer"):
        Replay(tmp_path / "new", None, 0.5, 100, "p").draw(4, 0.9, np.random.default_rng(0))
