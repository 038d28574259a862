"""Comparisons: pairs of the same states, hand-computed numbers, refusals, tables, verdicts."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.evaluation import statistics
from vla_rl.evaluation.compare import Comparison, PairedResult, compare, format_p
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationError, EvaluationMeta
from vla_rl.evaluation.verdict import changed_tasks, verdict


def make(outcomes: dict[str, list[int]], mode="sampled", samples=1, start=0, lost=(), **meta) -> Evaluation:
    """An evaluation with the given outcomes per task, in the order of states and their samples."""
    episodes = [
        EpisodeRecord(
            mode=mode,
            task=task,
            split=meta.get("split", "eval"),
            index=start + i // samples,
            sample=i % samples,
            success=bool(success),
            steps=10,
            lost=i in lost,
        )
        for task, successes in outcomes.items()
        for i, success in enumerate(successes)
    ]
    values = {
        "name": "x",
        "env": "dummy",
        "split": "eval",
        "seed": 0,
        "temperatures": {mode: 1.0},
        "horizon": dict.fromkeys(outcomes, 16),
        "cameras": ("agentview",),
        "image_size": (32, 32),
        "num_envs": 4,
        "protocol": "",
        "config": {},
        "created": "",
        "wall_seconds": 1.0,
    }
    return Evaluation(meta=EvaluationMeta(**{**values, **meta}), episodes=tuple(episodes))


def test_numbers_by_hand():
    # 20 pairs: 4 solved by both, 1 lost, 9 gained, 6 by none.
    a = make({"push": [1] * 4 + [1] + [0] * 9 + [0] * 6})
    b = make({"push": [1] * 4 + [0] + [1] * 9 + [0] * 6})
    result = compare(a, b).result("sampled")
    assert (result.num_pairs, result.gained, result.lost) == (20, 9, 1)
    assert (result.rate_a, result.rate_b, result.difference) == (0.25, 0.65, 0.4)
    assert result.p_value_by_state == pytest.approx(22 / 1024)
    assert result.interval_b == statistics.wilson_interval(13, 20)
    assert 0.05 < result.bootstrap.low < 0.2 and 0.6 <= result.bootstrap.high < 0.75
    assert "25.0 % -> 65.0 %, +40.0 points" in result.text() and "McNemar p 0.0215" in result.text()


def test_the_other_way_round_is_the_mirror_image():
    a, b = make({"push": [1, 0, 0, 1, 0, 1]}), make({"push": [1, 1, 1, 0, 0, 1]})
    forward, backward = compare(a, b).result("sampled"), compare(b, a).result("sampled")
    assert forward.difference == -backward.difference and forward.p_value_by_state == backward.p_value_by_state


def test_per_task_and_total():
    a = make({"push": [0, 0, 0, 0], "stack": [1, 1, 0, 0]})
    b = make({"push": [1, 1, 1, 0], "stack": [1, 0, 0, 0]})
    comparison = compare(a, b)
    assert [(r.task, r.gained, r.lost) for r in comparison.results] == [("push", 3, 0), ("stack", 0, 1), (None, 3, 1)]
    labeled = comparison.model_copy(update={"labels": {"push": "push the block"}})
    assert [labeled.label(r) for r in labeled.results] == ["push the block", "stack", ""]
    assert labeled.text().splitlines()[0].startswith("sampled, push the block: 0.0 %")
    table = labeled.table()
    assert list(table.columns[0].cells) == ["push the block", "stack", "sampled, all"]
    assert [row.style for row in table.rows] == [None, None, "bold"], "the total stands out"
    with pytest.raises(EvaluationError, match="mode 'greedy'"):
        comparison.result("greedy")


def test_pairs_by_state_whatever_the_order():
    a, b = make({"push": [1, 0, 1, 0]}), make({"push": [1, 1, 0, 0]})
    shuffled = b.model_copy(update={"episodes": tuple(reversed(b.episodes))})
    assert compare(a, shuffled).result("sampled") == compare(a, b).result("sampled")


def test_samples_of_a_state_are_one_piece_of_evidence():
    # Three states, five samples each: one state flips from never to always.
    a = make({"push": [0] * 5 + [1] * 5 + [0] * 5}, samples=5)
    b = make({"push": [1] * 5 + [1] * 5 + [0] * 5}, samples=5)
    result = compare(a, b).result("sampled")
    assert (result.num_pairs, result.num_states) == (15, 3)
    assert result.p_value_by_state == 1.0  # As if the samples were independent it would be 2 / 32.
    assert result.text().endswith("5 gained, 0 lost of 15, p by state 1.00")
    assert result.bootstrap == pytest.approx((1 / 3 - math.sqrt(3 / 2) / 3, 1.0))


def test_refuses_what_does_not_pair():
    a = make({"push": [1, 0]})
    with pytest.raises(EvaluationError, match="split 'eval', 'x' on 'validation'"):
        compare(a, make({"push": [1, 0]}, split="validation"))
    with pytest.raises(EvaluationError, match="env 'dummy', 'x' on 'libero'"):
        compare(a, make({"push": [1, 0]}, env="libero"))
    with pytest.raises(EvaluationError, match="no common mode"):
        compare(a, make({"push": [1, 0]}, mode="greedy"))
    with pytest.raises(EvaluationError, match=r"a: states 0 to 1 of push; b: states 7 to 8 of push"):
        compare(a, make({"push": [1, 0]}, start=7))
    with pytest.raises(EvaluationError, match="b: no episodes"):
        compare(a, make({"push": [1, 0]}, lost=(0, 1)))


def test_warns_of_what_is_not_alike():
    a = make({"push": [1, 0, 1]}, policy_hash="abc", env_config={"horizon": 16, "num_envs": 4})
    b = make({"push": [1, 1, 0, 1, 1]}, lost=(1,), horizon={"push": 20}, temperatures={"sampled": 0.5},
             policy_hash="abc", env_config={"horizon": 20, "num_envs": 8})  # fmt: skip
    comparison = compare(a, b)
    assert comparison.result("sampled").num_pairs == 2
    text = comparison.text()
    assert "2 episodes pair; 1 of a and 2 of b have no counterpart" in text
    assert "1 episodes were lost" in text
    assert "temperature 1 in a, 0.5 in b" in text
    assert "push: horizon is 16 steps in a, 20 in b" in text
    assert "env.horizon is 16 in a, 20 in b" in text and "num_envs" not in text
    assert "the same weights" in text
    assert compare(make({"push": [1, 0]}), make({"push": [0, 0]})).warnings == ()


def test_an_interval_without_width_is_no_certainty():
    same = make({"push": [1, 0], "pick": [1, 0]})
    (warning,) = compare(same, same).warnings
    assert "no width, since the 4 states (within each task) agree; up to 53 % of all states" in warning  # 0.47^4 = 0.05
    (warning,) = compare(make({"push": [0] * 50}), make({"push": [1] * 50})).warnings
    assert "the 50 states" in warning and "up to 5.8 % of all states" in warning


def test_how_an_environment_was_run_is_no_difference():
    old, new = {"horizon": 16, "num_envs": 2}, {"horizon": 16, "num_envs": 4, "num_workers": 2}
    first, second = (make({"push": [1, 0]}, env_config=config) for config in (old, new))
    assert "num_workers" not in compare(second, first).text() and "num_envs" not in compare(second, first).text()
    for old, new in (
        ({"num_hosts": 1, "hosts": ["a:5555"]}, {"num_hosts": 2, "hosts": ["b:5555"]}),
        ({"assets_path": None}, {"assets_path": "elsewhere"}),
    ):
        first, second = (make({"push": [1, 0]}, env_config=config) for config in (old, new))
        assert "env." not in compare(first, second).text()


def test_json_round_trip(tmp_path):
    comparison = compare(make({"push": [1, 0, 0]}), make({"push": [1, 1, 0]}))
    comparison.save(tmp_path / "new" / "comparison.json")
    assert Comparison.load(tmp_path / "new" / "comparison.json") == comparison
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(EvaluationError, match=r"comparison\.json: not valid JSON"):
        Comparison.load(tmp_path / "comparison.json")


def test_says_which_states_the_claim_is_about(tmp_path):
    a, b = {"push": [1, 0, 0, 0]}, {"push": [1, 1, 0, 1]}
    official = compare(*(make(x, samples=2, official_states=True) for x in (a, b)))
    assert official.population == (
        "2 official initial states, 2 samples of each: "
        "a claim about these states, not the task's distribution of states"
    )
    drawn = compare(*(make(x, official_states=False) for x in (a, b)))
    assert drawn.population.startswith("4 initial states, drawn at random: a claim about the distribution")
    unknown = compare(make(a), make(b, official_states=False))
    assert "and about their distribution if drawn at random" in unknown.population
    assert official.population in official.text() and official.table().caption == official.population
    official.save(tmp_path / "comparison.json")
    assert json.loads((tmp_path / "comparison.json").read_text())["population"] == official.population


def test_p_values_for_people():
    assert [format_p(p) for p in (3.14e-7, 0.02148, 0.5)] == ["3.1e-07", "0.0215", "0.50"]


def counted(n: int, gained: int, lost: int, resamples: int = 1000) -> PairedResult:
    """The result of n states, all others solved by both; resampled less often than in use."""
    a, b = np.ones(n), np.ones(n)
    a[:gained], b[gained : gained + lost] = 0, 0
    return PairedResult(
        mode="sampled",
        task=None,
        num_pairs=n,
        num_states=n,
        rate_a=a.mean(),
        interval_a=statistics.wilson_interval(int(a.sum()), n),
        rate_b=b.mean(),
        interval_b=statistics.wilson_interval(int(b.sum()), n),
        gained=gained,
        lost=lost,
        difference=(gained - lost) / n,
        bootstrap=statistics.paired_bootstrap_interval(a, b, num_resamples=resamples),
        p_value_by_state=statistics.clustered_sign_test(b - a),
    )


def test_a_verdict_says_better_worse_no_difference_or_too_few():
    better, worse = verdict(counted(100, 20, 4), 0.05), verdict(counted(100, 4, 20), 0.05)
    assert (better.word, worse.word) == ("better", "worse")
    assert (better.exit_code, worse.exit_code) == (0, 1)
    assert better.text().startswith("sampled: b is better: +16.0 points [") and better.states_needed is None
    none = verdict(counted(400, 8, 8), 0.05)
    assert (none.word, none.exit_code) == (
        "no difference shown",
        0,
    ) and "one of 5 points or more is excluded" in none.text()
    few = verdict(counted(40, 3, 2), 0.05)
    assert (few.word, few.exit_code) == ("too few episodes", 3)
    assert few.states_needed and f"about {few.states_needed} would tell" in few.text()
    assert verdict(counted(40, 3, 2), 0.5).word == "no difference shown"  # By a margin that the user names.
    # 12 states that agree show nothing of a margin that 24 % of all states may exceed, and a gain in 5 of 5 is chance.
    assert verdict(counted(12, 0, 0), 0.1).word == "too few episodes"
    assert verdict(counted(5, 5, 0), 0.05).word == "too few episodes"
    small = verdict(counted(2000, 30, 10), 0.05)  # Surely not 0, and surely less than matters.
    assert small.p_value < 0.01 and small.word == "no difference shown"


@pytest.mark.parametrize(("n", "margin"), [(50, 0.1), (150, 0.05)])
def test_verdicts_err_as_seldom_as_they_say(n: int, margin: float):
    """Of 2,000 pairs of evaluations of each kind; equal counts are judged once."""
    rng = np.random.default_rng(0)
    words: dict[tuple[int, int], str] = {}

    def shares(gained: float, lost: float) -> Counter[str]:
        drawn = Counter(map(tuple, rng.multinomial(n, [gained, lost, 1 - gained - lost], 2000)[:, :2].tolist()))
        found: Counter[str] = Counter()
        for (g, fewer), times in drawn.items():
            if (g, fewer) not in words:
                words[g, fewer] = verdict(counted(n, g, fewer, resamples=250), margin).word
            found[words[g, fewer]] += times / 2000
        return found

    for base in (0.02, 0.1):
        equal = shares(base, base)
        assert equal["better"] + equal["worse"] < 0.055
    for base in (0.0, 0.02, 0.1):
        lost = shares(base, base + margin)
        assert lost["better"] < 0.03 and lost["no difference shown"] < 0.035
    assert shares(0.3 + margin, 0.05)["better"] > 0.95


def test_as_many_states_as_it_asks_for_do_tell():
    few = verdict(counted(60, 4, 3), 0.1)
    needed = few.states_needed or 0
    rng = np.random.default_rng(0)
    for lean in (0.0, 0.1):  # The truth is no difference, or one of the margin.
        drawn = rng.multinomial(needed, [4 / 60 + lean, 3 / 60, 1 - 7 / 60 - lean], 25)
        words = [verdict(counted(needed, int(g), int(lost)), 0.1).word for g, lost, _ in drawn]
        assert words.count("better" if lean else "no difference shown") >= 20, words
        assert "worse" not in words


def test_a_task_that_fell_is_named_in_a_run_that_rose():
    a = {"push": [0] * 50, "pick": [1] * 30, **{f"task_{i}": [0, 1] for i in range(3)}}
    b = {"push": [1] * 40 + [0] * 10, "pick": [0] * 12 + [1] * 18, **{f"task_{i}": [1, 1] for i in range(3)}}
    comparison = compare(make(a), make(b))
    assert verdict(comparison.result("sampled")).word == "better"
    (worst, p), (best, _) = changed_tasks(comparison.results, "sampled")
    assert (worst.task, best.task) == ("pick", "push")
    assert p == pytest.approx(4 * 2 / 2**12)  # The second of five tasks.
    few = compare(make({"push": [1] * 6, "pick": [1] * 6}), make({"push": [0] * 6, "pick": [1] * 6}))
    assert changed_tasks(few.results, "sampled") == []  # p is 0.031 alone, 0.062 of two tasks.


def test_the_exit_code_is_for_a_pipeline(tmp_path):
    def files(gained: int, lost: int, n: int = 100) -> list[str]:
        same = [1] * (n - gained - lost)
        make({"push": [0] * gained + [1] * lost + same}).save(tmp_path / "a.json")
        make({"push": [1] * gained + [0] * lost + same}).save(tmp_path / "b.json")
        return [str(tmp_path / "a.json"), str(tmp_path / "b.json")]

    def run(*arguments: str):
        return CliRunner().invoke(app, ["compare", *arguments])

    worse = run(*files(2, 30), "--margin", "5", "-o", str(tmp_path / "said.json"))
    assert worse.exit_code == 1 and "sampled: b is worse: -28.0 points" in worse.stdout, worse.output
    said = json.loads((tmp_path / "said.json").read_text())
    assert (
        said["verdicts"][0]["word"] == "worse" and Comparison.load(tmp_path / "said.json").result("sampled").lost == 30
    )
    assert run(*files(2, 30)).exit_code == 0  # Without a margin it is a table to read.
    assert run(*files(30, 2), "--margin", "5").exit_code == 0
    for said in (worse, run(*files(3, 1, 20))):  # No recipe beside these files says where to run more.
        assert said.stdout.endswith(f"\nnext, task by task: vla-rl report {tmp_path / 'b.json'}\n"), said.stdout
    few = run(*files(3, 1, 20), "--margin", "5")
    assert few.exit_code == 3 and "states; about" in few.stdout
    zero = run(*files(3, 1), "--margin", "0")
    assert zero.exit_code == 2 and "--margin: got 0" in zero.stderr
