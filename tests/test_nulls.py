"""Where there is nothing to find, what says how sure a result is finds something in at most 6 of 100 simulated cases.

Each case is drawn many times: 2, 3, 5, 10 and 50 initial states a task, states met once or several times, easy and
even tasks, seeds that are alike and seeds of which one in five collapses. A figure that is known not to hold has the
bound that it was measured to keep, with the reason. Draws are the same every time, so no test fails by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from representatives import slow_but_for
from tabular_problem import TablePolicy, roll_out

from real_robot.failure.conformal import MIN_SHAPE, Band, BandKind, CalibrationError, successes_needed
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import build_component
from vla_rl.evaluation import statistics
from vla_rl.evaluation.pooled import simulate
from vla_rl.evaluation.sequential_compare import difference_e_value, discordant_e_value
from vla_rl.evaluation.statistics import clustered_sign_test, paired_bootstrap_interval, summarize_seeds
from vla_rl.methods.algo.dr_grpo import DRGRPOConfig

ALPHA, MOST, TASKS = 0.05, 0.06, 10
STATES = (2, 3, 5, 10, 50)  # Of each task.
FEWEST_AND_MOST = slow_but_for((2, 50), STATES)


def check(found: int | np.integer, of: int, most: float = MOST) -> None:
    """At most this share, but for two standard errors of the simulation."""
    error = np.sqrt(most * (1 - most) / of)
    assert found / of <= most + 2 * error, f"{100 * found / of:.1f} % of {of}"


# --- paired intervals and the sign test -------------------------------------------------------------

EVEN, EASY = 0.0, 2.6  # Log-odds of success: half of the episodes, 88 of 100.


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap's resamples are those of one seed, drawn once for all comparisons."""
    draw, known = statistics._resample_counts, {}

    def again(rng: np.random.Generator, size: int, num: int) -> list:
        key = int(rng.integers(2**62)), size, num
        if key not in known:
            known[key] = list(draw(np.random.default_rng(key[0]), size, num))
        return known[key]

    monkeypatch.setattr(statistics, "_resample_counts", again)


@pytest.mark.parametrize(
    ("states", "samples", "ease"),
    slow_but_for(
        ((2, 1, EVEN), (50, 1, EASY), (2, 5, EVEN)),
        [*((n, 1, e) for e in (EVEN, EASY) for n in STATES), (2, 5, EVEN), (2, 5, EASY)],
    ),
)
def test_paired_intervals_and_the_sign_test(states: int, samples: int, ease: float, drawn_once: None) -> None:
    """Policies that differ on each state, and not on average."""
    trials, of, rng = 400 if states == 50 else 1500, TASKS * states, np.random.default_rng(8)
    clusters, tasks = np.repeat(np.arange(of), samples), np.repeat(np.arange(TASKS), states * samples)
    odds = ease + np.repeat(np.linspace(-1, 1, TASKS), states) + rng.normal(0, 1, (trials, of))
    own = rng.normal(0, 0.8, (trials, of))
    a, b = (rng.random((trials, of, samples)) < 1 / (1 + np.exp(-(odds + s * own)))[..., None] for s in (1, -1))
    signs = sum(clustered_sign_test((y.astype(int) - x).sum(1)) < ALPHA for x, y in zip(a, b, strict=True))
    check(signs, trials)
    options = {"clusters": clusters, "strata": tasks, "num_resamples": 2000}
    pairs = zip(a.reshape(trials, -1), b.reshape(trials, -1), strict=True)
    found = sum(paired_bootstrap_interval(x, y, **options).excludes_zero for x, y in pairs)
    check(found, trials)


# --- intervals over seeds ---------------------------------------------------------------------------


def found_by_seeds(of_seed: np.ndarray, states: int, samples: int) -> int:
    """How often seeds whose gains, float (trials, seeds), are 0 on average are said to gain or lose."""
    rng, (trials, seeds) = np.random.default_rng(3), of_seed.shape
    rate, own = rng.uniform(0.3, 0.6, (trials, 1, states)), rng.uniform(-0.05, 0.05, (trials, 1, states))
    after = rng.binomial(samples, rate + own + of_seed[..., None], (trials, seeds, states))
    difference = (after - rng.binomial(samples, rate)) / samples  # One evaluation of the base for all seeds.
    return sum(summarize_seeds(table).interval.excludes_zero for table in difference)


@pytest.mark.parametrize("states", FEWEST_AND_MOST)
@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_over_seeds_that_are_alike(seeds: int, states: int) -> None:
    for spread, samples in ((0.0, 1), (0.06, 1), (0.06, 5)):
        gains = np.clip(np.random.default_rng(seeds).normal(0, 1, (800, seeds)), -2.5, 2.5) * spread
        check(found_by_seeds(gains, TASKS * states, samples), 800)


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_over_seeds_of_which_one_in_five_collapses_cover_82_of_100(seeds: int) -> None:
    """As `SEEDS_ALIKE` says beside each: four gain 5 points, one loses 20; 500 states."""
    gains = np.where(np.random.default_rng(4).random((1500, seeds)) < 0.2, -0.2, 0.05)
    found = found_by_seeds(gains, 500, 1)
    assert "82 %" in statistics.SEEDS_ALIKE
    assert found / 1500 == pytest.approx(0.18, abs=0.03), "a better interval is told of without the caveat"


# --- tests that may stop early ----------------------------------------------------------------------


@pytest.mark.parametrize("differing", [0.15, 0.45])
@pytest.mark.parametrize(("states", "checks"), [*((n, 1) for n in STATES), (2, 5), (10, 3)])
def test_the_gate(states: int, checks: int, differing: float) -> None:
    found = simulate([[0.0] * checks], TASKS * states, ALPHA, differing, num_trials=2000)
    check(round(2000 * found.better[0]), 2000, ALPHA)
    check(round(2000 * found.worse[0]), 2000, ALPHA)


def outcomes(pairs: int, gain: float, differing: float, trials: int, repeats: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Gained and lost after each pair, int (trials, pairs). A state that is met again has the same chance of each."""
    rng = np.random.default_rng(pairs)
    share = np.tile(rng.beta(0.5, 0.5, (trials, -(-pairs // repeats))), repeats)[:, :pairs] * 2 * differing
    draw = rng.random((trials, pairs))
    gained, lost = draw < (share + gain) / 2, (draw >= (share + gain) / 2) & (draw < np.maximum(share, gain))
    return gained.cumsum(1), lost.cumsum(1)


@pytest.mark.parametrize("states", STATES)
def test_a_sequential_comparison_looked_at_after_every_pair(states: int) -> None:
    for repeats in (1, 5):
        gained, lost = outcomes(TASKS * states, 0.0, 0.4, 1000, repeats)
        most = 1 + int(max(gained.max(), lost.max()))
        e_value = np.array([[discordant_e_value(g, n) for n in range(most)] for g in range(most)])
        check((e_value[gained, lost] >= 1 / ALPHA).any(1).sum(), 1000, ALPHA)


def test_no_gain_is_not_said_of_a_gain_as_large_as_asked_for() -> None:
    gained, lost = outcomes(100, 0.1, 0.4, 400)
    wrong = np.zeros(400, bool)
    for pair in range(4, 100, 5):
        for g, n in {(int(g), int(n)) for g, n in zip(gained[:, pair], lost[:, pair], strict=True)}:
            if g - n < 0.1 * (pair + 1) and difference_e_value(g, n, pair + 1 - g - n, 0.1) >= 1 / ALPHA:
                wrong |= (gained[:, pair] == g) & (lost[:, pair] == n)
    check(wrong.sum(), 400, ALPHA)


# --- false alarms -----------------------------------------------------------------------------------


def episodes(of_state: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Scores of episodes of uneven length, which are alike where their states are."""
    scores = of_state[:, None] + 0.3 * rng.normal(size=(len(of_state), 20))
    return [row[:length] for row, length in zip(scores, rng.integers(5, 20, len(of_state)), strict=True)]


@pytest.mark.parametrize("kind", ["functional", "centered", "constant"])
@pytest.mark.parametrize("states", FEWEST_AND_MOST)
def test_conformal_bands_on_fresh_states(states: int, kind: BandKind) -> None:
    """Scores with a heavy tail; ranked episode by episode, 6.3 to 6.6 % were alarms at ten episodes a state."""
    of, rng = TASKS * states, np.random.default_rng(states)
    if of < successes_needed(ALPHA) + MIN_SHAPE and kind != "constant":
        with pytest.raises(CalibrationError, match=r"alpha=0\.05 needs at least 24 states"):
            Band.fit(episodes(np.zeros(of), rng), [""] * of, ALPHA, kind=kind, states=range(of))
        return
    for repeats in (1, 10):
        alarms = []
        for trial in range({50: 10, 10: 60}.get(states, 200)):
            number = np.repeat(np.arange(of), repeats)
            own = episodes((rng.standard_exponential(of) ** 2)[number], rng)
            band = Band.fit(own, [""] * len(own), ALPHA, trial, kind=kind, states=number.tolist())
            fresh = episodes(rng.standard_exponential(60) ** 2, rng)
            alarms.append(np.mean([band.standing(curve, "").max() > band.q for curve in fresh]))
        assert np.mean(alarms) <= ALPHA + 2 * np.std(alarms) / np.sqrt(len(alarms)), f"{100 * np.mean(alarms):.1f} %"


# --- doubly robust GRPO -----------------------------------------------------------------------------

# Every option that it takes and that changes the gradient of a first step, one by one.
OPTIONS = {
    "ratio_level": ("action", "chunk"),
    "normalize_std": (True,),
    "clip": ({"dual": 3.0},),
    "kl_coef": (0.3,),
    "entropy_coef": (0.2,),
    "candidates": (2,),
}
# What concerns later steps, how a step is cut, or chunks of earlier policies, which are refused.
NOT_OF_A_FIRST_STEP = {
    *("kind", "optim", "decay_iterations", "epochs", "minibatch_size", "micro_batch_size"),
    *("bc_coef", "values", "coefficients"),
}
ONE_VALUE = {"filter_groups": False, "loss_reduction": "token_mean"}  # An episode's own weight was biased (|z| 15).
BATCHES, GROUPS = 32, 12
EACH_OPTION = slow_but_for(
    (("kind", "dr_grpo"), ("candidates", 2)), [("kind", "dr_grpo"), *((n, v) for n, vs in OPTIONS.items() for v in vs)]
)


@pytest.fixture(scope="module")
def rollouts() -> list:
    return [roll_out(TablePolicy(), GROUPS, 3, seed) for seed in range(BATCHES)]


def gradients(algo: GRPOConfig, rollouts: list) -> Iterator[np.ndarray]:
    for seed, episodes in enumerate(rollouts):
        policy = TablePolicy()
        learner = algo.build(policy, seed)
        learner._apply = lambda losses, found: {}
        learner.update(learner.prepare(episodes))
        assert policy.logits.grad is not None
        yield policy.logits.grad.flatten().numpy().copy()


@pytest.mark.parametrize(("name", "value"), EACH_OPTION)
def test_doubly_robust_grpo_is_grpo_on_average(name: str, value: object, rollouts: list) -> None:
    options = {"filter_groups": False, "normalize_std": False, "micro_batch_size": 4096, name: value}
    plain = build_component("algo", {n: v for n, v in options.items() if n != "candidates"} | {"kind": "grpo"})
    values = {"kind": "tabular_problem:PlantedConfig", "which": "wrong"}
    own = {"values": values, "coefficients": (0.8, 0.6)}
    robust = build_component("algo", own | options | {"kind": "dr_grpo"})
    assert isinstance(plain, GRPOConfig) and isinstance(robust, GRPOConfig)
    added = np.stack(list(gradients(robust, rollouts))) - np.stack(list(gradients(plain, rollouts)))
    error = added.std(0, ddof=1) / np.sqrt(BATCHES)
    assert np.abs(added).max() > 1e-4, "the values change each batch"
    assert (np.abs(added.mean(0)) / (error + 1e-9)).max() < 4


def test_no_option_of_doubly_robust_grpo_is_left_out() -> None:
    fields = DRGRPOConfig.model_fields
    assert fields.keys() == OPTIONS.keys() | NOT_OF_A_FIRST_STEP | ONE_VALUE.keys()
    for name, field in fields.items():
        if get_origin(field.annotation) is Literal and name not in NOT_OF_A_FIRST_STEP:
            asked = {field.default, *OPTIONS.get(name, ())}
            assert asked == set(get_args(field.annotation)), f"{name}: not all of its values are asked for here"
