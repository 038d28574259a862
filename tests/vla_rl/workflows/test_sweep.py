"""Sweeps: which combinations are run, what is refused before anything runs, and one for real."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from run_here import run_jobs_here
from tiny_run import make_recipe, save_policy

from vla_rl.algorithms.base import SurrogateConfig
from vla_rl.cli.options import PROGRAM
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.sweep import RESULT_FILE, Sweep, SweepRow, combinations, folder_names, sweep


def test_combinations_are_the_product_and_leave_lists_whole():
    assert combinations(["algo.optim.lr=1e-4, 3e-4", "seed=0,1"]) == [
        ("algo.optim.lr=1e-4", "seed=0"),
        ("algo.optim.lr=1e-4", "seed=1"),
        ("algo.optim.lr=3e-4", "seed=0"),
        ("algo.optim.lr=3e-4", "seed=1"),
    ]
    lists = combinations(["env.tasks=[a,b],[c]", "algo.x={k: 1, l: 2},null"])
    assert [one[0] for one in lists[::2]] == ["env.tasks=[a,b]", "env.tasks=[c]"]
    assert [one[1] for one in lists[:2]] == ["algo.x={k: 1, l: 2}", "algo.x=null"]


def test_each_combination_has_a_folder_of_its_own_which_a_disk_takes(tmp_path: Path):
    assert folder_names([("algo.optim.lr=1e-4", "seed=0")]) == ["algo.optim.lr=1e-4,seed=0"]
    long = "policy.path=/" + "a" * 300
    names = folder_names([*combinations(["policy.path=runs/a b,runs/a_b", "seed=0"]), (long + "/b",), (long + "/c",)])
    assert len(set(names)) == 4
    for name in names:
        (tmp_path / f"{name}.log").touch()


def test_runs_of_other_temperatures_or_with_lost_episodes_share_a_table():
    greedy = SweepRow(values=("a",), run="a", num_episodes=8, rates={"greedy": 0.5}, gains={"greedy": (0.1, 0.0, 0.2)})
    sampled = SweepRow(values=("b",), run="b", num_episodes=7, rates={"sampled": 0.25}, gains={"sampled": (0, 0, 0)})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(Sweep(recipe="r", rows=(greedy, sampled)).table())
    text = console.export_text()
    assert "2 runs, n = 7 to 8, validation split" in text
    assert "50.0" in text and "25.0" in text and text.count("–") == 4


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("algo.optim.lr", "got 'algo.optim.lr'"),
        ("=1,2", "give a key"),
        ("seed=1,,2", "give a key"),
        ("seed=1,1", "a value twice"),
    ],
)
def test_options_that_cannot_be_read_are_refused(over: str, message: str):
    with pytest.raises(ConfigError, match=message):
        combinations([over])


def test_a_wrong_value_is_refused_before_any_run(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(make_recipe(save_policy(tmp_path / "policy"))))
    with pytest.raises(ConfigError, match=r"algo\.optim\.lr: got -1"):
        sweep(str(recipe), [], ["algo.optim.lr=1e-3,-1"], tmp_path / "sweep", program=("false",))
    assert not (tmp_path / "sweep").exists()


def test_a_kind_alone_chooses_the_section_and_a_sweep_over_kinds_compares_like_with_like():
    chosen = combinations(["algo=grpo,rloo,ppo"])
    algos = [load_recipe("tabletop_grpo", ["policy.value_head=true", *values]).algo for values in chosen]
    assert [algo.kind for algo in algos] == ["grpo", "rloo", "ppo"]
    assert len({algo.model_dump_json(include=set(SurrogateConfig.model_fields) - {"kind"}) for algo in algos}) == 1
    with pytest.raises(ConfigError, match=r"algo\.kind: got 'rlo'.*Did you mean 'rloo'"):
        load_recipe("tabletop_grpo", ["algo=rlo"])


def test_a_sweep_runs_each_combination_once_against_the_policy_it_began_with(tmp_path: Path, monkeypatch):
    run_jobs_here(monkeypatch)
    recipe = tmp_path / "recipe.yaml"
    short = make_recipe(save_policy(tmp_path / "policy"), "train.iterations=1", "eval.temperatures=[1.0]")
    recipe.write_text(dump_yaml(short))
    said: list[str] = []
    options = (str(recipe), [], ["algo.optim.lr=1e-3,1e-2"], tmp_path / "sweep")
    result = sweep(*options, program=PROGRAM, jobs=1, show=said.append)
    base = Evaluation.load(tmp_path / "sweep" / "base-0" / "evaluations" / "base.json")
    assert base.meta.split == "validation"
    assert [row.run for row in result.rows] == ["algo.optim.lr=1e-3", "algo.optim.lr=1e-2"]
    for row in result.rows:
        assert (tmp_path / "sweep" / f"{row.run}.log").stat().st_size > 0  # Each a file of its own.
        after = Evaluation.load(tmp_path / "sweep" / row.run / "evaluations" / "final.json")
        expected = compare(base, after).result("sampled")
        assert row.rates["sampled"] == after.rate("sampled").rate
        assert row.gains["sampled"] == (expected.difference, expected.bootstrap.low, expected.bootstrap.high)
    assert Sweep.model_validate(json.loads((tmp_path / "sweep" / RESULT_FILE).read_text())) == result
    assert sweep(*options, program=("false",), jobs=1, show=said.append) == result, "finished runs are not repeated"
    assert sum("found finished" in line for line in said) == 3
