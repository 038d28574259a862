"""What RL can learn from a policy: shares by hand, lost episodes, what is refused, and the command on a real policy."""

import math

import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationError, EvaluationMeta
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.evaluation.verdict import headroom, silent_groups

META = {
    **{"name": "base", "env": "dummy", "split": "train", "seed": 0, "temperatures": {"sampled": 1.0}},
    **{"horizon": {"push": 9}, "cameras": (), "image_size": (8, 8), "num_envs": 1, "protocol": "", "config": {}},
    **{"created": "", "wall_seconds": 0.0},
}


def evaluation(groups: list[str], greedy: str = "") -> Evaluation:
    """Of one task: a group of letters for each state, s(olved), f(ailed) or l(ost)."""
    drawn = [("sampled", index, group) for index, group in enumerate(groups)]
    drawn += [("greedy", index, letter) for index, letter in enumerate(greedy)]
    episodes = [
        EpisodeRecord(
            **{"mode": mode, "task": "push", "split": "train", "index": index, "sample": sample},
            **{"success": letter == "s", "steps": 9, "lost": letter == "l"},
        )
        for mode, index, group in drawn
        for sample, letter in enumerate(group)
    ]
    return Evaluation(meta=EvaluationMeta(**META), episodes=tuple(episodes))


def test_shares_by_hand():
    found = headroom(evaluation(["ssss", "sfff", "ffff", "ssff", "ffff"], greedy="sfffs"))
    assert found.success == pytest.approx((1 + 0.25 + 0 + 0.5 + 0) / 5) and found.greedy == pytest.approx(0.4)
    shares = [found.mixed.value, found.all_failed.value, found.all_solved.value, found.best_of_n]
    assert shares == pytest.approx([0.4, 0.4, 0.2, 0.6])
    assert (found.mixed.low, found.mixed.high) == pytest.approx(tuple(wilson_interval(2, 5)))
    assert found.text().splitlines()[0] == "success 35.0 % sampled, greedy 40.0 %; the best of 4 draws 60.0 %"


def test_lost_episodes_are_left_out():
    found = headroom(evaluation(["slss", "llls", "fflf"]))
    assert (found.mixed.n, found.success, found.mixed.value, found.greedy) == (2, 0.5, 0.0, None)
    assert math.isclose(found.all_solved.value, 0.5)


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        (["ssss", "sfff"], "RL has something to learn from: 50 of 100"),
        (["ssss", "ffff", "ffff"], "clone longer"),
        (["ssss", "ssss", "ffff"], "harder tasks"),
    ],
)
def test_advice_names_what_most_groups_lack(groups: list[str], advice: str):
    assert advice in headroom(evaluation(groups)).advice()


def test_a_run_says_what_to_do_where_most_groups_taught_nothing():
    def rows(*iterations: tuple[float, float, float]) -> list[dict[str, float]]:
        names = ("all_failed", "all_solved", "collapsed")
        return [{f"rollout/{k}_groups": v for k, v in zip(names, shares, strict=True)} for shares in iterations]

    assert silent_groups([{"train/success": 0.0}]) == silent_groups(rows((0.25, 0.25, 0.0))) == []
    assert silent_groups(rows((0.5, 0.0, 0.0), (0.5, 0.25, 0.0))) == [
        "62 % of the groups taught nothing: 50 % all failed, 12 % all solved, 0 % had the same actions throughout; "
        "clone longer (`vla-rl sft`), or choose easier tasks (env.tasks) or initial states (keyframes)"
    ]
    assert silent_groups(rows((0.125, 0.5, 0.0)))[0].endswith("choose harder tasks or perturbed states (env.perturb)")
    assert "raise train.temperature" in silent_groups(rows((0.0, 0.25, 0.75)))[0]


def test_one_sample_a_state_is_refused():
    with pytest.raises(EvaluationError, match=r"no initial state was sampled twice .*eval.samples_per_state=8"):
        headroom(evaluation(["s", "f"]))


def test_the_command_plays_the_base_policy():
    small = ["num_threads=1", "env.num_workers=0", "env.tasks=[push_to_zone]", "train.group_size=4"]
    result = CliRunner().invoke(app, ["plan", "tabletop_grpo", "--preflight", "16", *small])
    assert result.exit_code == 0, result.output
    assert "of 4 groups of 4:" in result.output and "next: vla-rl train tabletop_grpo" in result.output
    refused = CliRunner().invoke(app, ["plan", "tabletop_grpo", "--preflight", "16", "--json"])
    assert refused.exit_code == 2 and "--preflight none" in refused.stderr
