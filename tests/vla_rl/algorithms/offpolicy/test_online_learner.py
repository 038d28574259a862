"""The online learner finds values that are known, and edits that raise them; it resumes to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.algorithms.offpolicy.config import OnlineConfig
from vla_rl.algorithms.offpolicy.critic import new_networks
from vla_rl.algorithms.offpolicy.learner import OffPolicyLearner
from vla_rl.algorithms.offpolicy.networks import EditPolicy
from vla_rl.algorithms.offpolicy.replay import Replay
from vla_rl.algorithms.offpolicy.transitions import Transitions

CRITIC = {"hidden": 16, "batch_size": 128, "optim": {"lr": 1e-2}, "discount": 0.9, "members": 2}
RIGHT, WRONG = 0.9, 0.1  # Success after a second chunk above zero, and below.


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets follow within the few updates of a test."""
    monkeypatch.setattr("vla_rl.algorithms.offpolicy.learner.TARGET_DECAY", 0.9)


def second_counts(num_episodes: int = 500) -> Transitions:
    """Episodes of two decisions of 2 steps; the first chunk means nothing, the second one's sign decides."""
    rng = np.random.default_rng(0)
    chunk = rng.choice([-1.0, 1.0], (num_episodes, 2))
    rows = np.arange(2 * num_episodes)
    second = rows % 2 == 1
    return Transitions(
        embedding=np.stack([second, ~second], 1).astype(np.float32),
        chunk=chunk.reshape(-1, 1, 1).repeat(2, 1).astype(np.float32),
        num_steps=np.full(len(rows), 2),
        following=np.where(second, -1, rows + 1),
        elapsed=np.where(second, 2, 0),
        remaining=np.where(second, 2, 4),
        episode=rows // 2,
        success=rng.random(num_episodes) < np.where(chunk[:, 1] > 0, RIGHT, WRONG),
        task=np.zeros(num_episodes, np.int64),
        initial_state=np.arange(num_episodes),
        candidates=np.broadcast_to(np.array([1.0, -1.0], np.float32)[:, None, None], (len(rows), 2, 2, 1)).copy(),
    )


def learner_of(data: Transitions, critic: dict | None = None, **changes: object) -> OffPolicyLearner:
    config = OnlineConfig.model_validate({"critic": CRITIC | (critic or {})} | changes)
    networks = new_networks(config.critic, data.embedding, data.chunk.reshape(len(data), -1), 1)
    return OffPolicyLearner(config, networks, 1)


def learn(learner: OffPolicyLearner, data: Transitions, folder: Path, updates: int) -> dict[str, float]:
    replay, found = Replay(folder, data, 0.5, 10, "p"), {}
    for _ in range(updates):
        rng = np.random.default_rng(learner.num_updates)
        found = learner.update(replay.draw(learner.config.critic.batch_size, 0.9, rng))
    return found


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("td", (RIGHT + WRONG) / 2 * 0.9**4),
        ("monte_carlo", (RIGHT + WRONG) / 2 * 0.9**4),
        ("best_of_n", RIGHT * 0.9**4),
    ],
)
def test_the_first_decision_is_worth_what_the_second_will_be(targets: str, expected: float, tmp_path: Path) -> None:
    data = second_counts()
    learner = learner_of(data, critic={"targets": targets})
    learn(learner, data, tmp_path, 120)
    value, first = learner.values(data), data.elapsed == 0
    assert value[first].mean() == pytest.approx(expected, abs=0.06)
    for sign, rate in ((1, RIGHT), (-1, WRONG)):
        own = ~first & (data.chunk[:, 0, 0] == sign)
        assert value[own].mean() == pytest.approx(rate * 0.9**2, abs=0.06)


def rising(num_decisions: int = 600) -> Transitions:
    """Single decisions; the larger the chunk's number, in -2 .. 2, the likelier success."""
    rng = np.random.default_rng(0)
    chunk = rng.uniform(-2, 2, (num_decisions, 1, 1)).astype(np.float32)
    count = np.arange(num_decisions)
    return Transitions(
        embedding=np.ones((num_decisions, 1), np.float32),
        chunk=chunk,
        num_steps=np.ones(num_decisions, np.int64),
        following=np.full(num_decisions, -1),
        elapsed=np.zeros(num_decisions, np.int64),
        remaining=np.ones(num_decisions, np.int64),
        episode=count,
        success=rng.random(num_decisions) < (chunk[:, 0, 0] + 2) / 4,
        task=np.zeros(num_decisions, np.int64),
        initial_state=count,
        candidates=chunk[:, None] * 0.5,
    )


def test_edits_go_where_q_rises_and_no_farther_than_allowed(tmp_path: Path) -> None:
    data = rising()
    learner = learner_of(data, method="edits", edits={"scale": 0.5, "optim": {"lr": 6e-3}})
    assert learner.editor is not None
    found = learn(learner, data, tmp_path, 100)
    own = torch.linspace(-1, 1, 50)[:, None]
    with torch.no_grad():
        place = learner.networks.normal_place(torch.ones(50, 1))
        edited, _ = learner.editor(learner.networks, place, own)
    change = (edited - own)[:, 0]
    assert (change > 0.2).all() and change.max() <= 0.5
    assert found["edits/gain"] > 0.02


def test_edits_leave_alone_what_never_varied_and_stay_within_the_action_bounds() -> None:
    data = rising(200)
    constant = np.full_like(data.chunk, 0.25)
    data = replace(data, chunk=np.concatenate([data.chunk, constant], 2), candidates=None)
    config = OnlineConfig.model_validate({"critic": CRITIC, "method": "edits", "edits": {"scale": 3.0}})
    networks = new_networks(config.critic, data.embedding, data.chunk.reshape(200, -1), 1)
    one = np.ones(2, np.float32)
    learner = OffPolicyLearner(config, networks, 1, action_bounds=(-one, one))
    assert learner.editor is not None
    own = networks.normal_chunk(torch.from_numpy(data.chunk.reshape(200, -1)).clamp(-1, 1))
    assert own.isfinite().all() and not own[:, 1].any(), "the constant number is normalized by 1"
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    editor = EditPolicy(**learner.editor.facts)  # As it is saved and loaded.
    editor.load_state_dict(learner.editor.state_dict())
    with torch.no_grad():
        edited = networks.chunk_of(editor(networks, torch.zeros(200, 1), own, 5 * noise)[0])
    np.testing.assert_allclose(edited[:, 1], 0.25)
    assert edited[:, 0].min() == pytest.approx(-1) and edited[:, 0].max() == pytest.approx(1)
    assert np.abs(edited[:, 0].numpy() - data.chunk[:, 0, 0].clip(-1, 1)).mean() > 0.1


def test_an_edits_log_density_is_that_of_the_change_of_variables(tmp_path: Path) -> None:
    learner = learner_of(rising(20), method="edits")
    editor = learner.editor
    assert editor is not None
    noise = torch.linspace(-2, 2, 20)[:, None]
    place, chunk = torch.zeros(20, 1), torch.linspace(-1, 1, 20)[:, None]
    edited, log_density = editor(learner.networks, place, chunk, noise)
    mean, raw = editor.network(torch.cat([place, chunk], -1)).chunk(2, -1)
    spread = (-5 + 6 * raw.sigmoid()).exp()
    base = torch.distributions.Normal(mean, spread)
    squashed = torch.distributions.TransformedDistribution(base, [torch.distributions.TanhTransform()])
    expected = squashed.log_prob((edited - chunk) / editor.scale)[:, 0]
    torch.testing.assert_close(log_density, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "noise", "candidates": 1}, r"candidates: got 1, and method noise .*give at least 2"),
        ({"method": "noise", "choose_by": "value"}, r"choose_by: got 'value', and method noise .*one chunk"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnlineConfig.model_validate(options)


def test_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    data, options = rising(), {"method": "edits", "critic": {"hidden": 8}}
    whole = learner_of(data, **options)
    learn(whole, data, tmp_path, 6)
    first, second = learner_of(data, **options), learner_of(data, **options)
    learn(first, data, tmp_path, 3)
    tensors, state = first.state()
    second.load_state({name: tensor.clone() for name, tensor in tensors.items()}, state)
    learn(second, data, tmp_path, 3)
    one, other = whole.state()[0], second.state()[0]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
