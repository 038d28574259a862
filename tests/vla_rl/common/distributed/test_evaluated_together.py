"""Evaluation and the gate by several processes: the episodes are shared, greedy ones end as one process's do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluated_together import EVAL, evaluated, gated, run
from launching import fork, launch
from tiny_run import make_recipe, save_policy

from vla_rl.common.distributed.process_group import ALONE
from vla_rl.config import dump_yaml
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.load import load_policy


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("evaluated")
    return save_policy(folder / "first"), save_policy(folder / "second", seed=1)


@pytest.fixture(scope="module")
def alone(policies, tmp_path_factory) -> tuple[dict, dict]:
    """An evaluation and a greedy comparison in this process."""
    folder = tmp_path_factory.mktemp("alone")
    return evaluated(policies[0], ALONE), gated(*policies, folder, ALONE, 0.0)["comparison"]


@pytest.fixture(scope="module")
def together(policies, alone, tmp_path_factory) -> Path:
    """After what one process makes: what it imports for that, its forks need not."""
    output = tmp_path_factory.mktemp("together")
    fork(lambda: run(*policies, output))
    return output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_episodes_are_shared_and_greedy_ones_end_as_in_one_process(together, alone, strategy):
    found = json.loads((together / f"{strategy}.json").read_text())
    (there, expected), here = alone, found["evaluation"]
    assert here["shares"] == [9, 9] and there["shares"] == [18]
    order = [[(e["mode"], e["task"], e["index"], e["sample"]) for e in result["episodes"]] for result in (here, there)]
    assert order[0] == order[1]
    greedy = [[e for e in result["episodes"] if e["mode"] == "greedy"] for result in (here, there)]
    assert greedy[0] == greedy[1] and len(greedy[0]) == 6
    assert (here["meta"]["num_processes"], there["meta"]["num_processes"]) == (2, 1)
    assert {**found["greedy_gate"]["comparison"], "num_episodes": 0} == {**expected, "num_episodes": 0}
    assert found["gate"]["comparison"]["num_pairs"] == found["gate"]["comparison"]["max_pairs"] == 9


def test_a_check_in_two_processes_keeps_whole_policies(together, policies):
    for strategy in ("ddp", "fsdp"):
        confirmed = load_policy(together / f"{strategy}-sampled" / "iteration_00000")
        expected = dict(load_policy(policies[0]).named_parameters())
        assert all(p.equal(expected[n]) for n, p in confirmed.named_parameters())


@pytest.mark.slow
def test_the_command_evaluates_with_two_processes(policies, tmp_path):
    recipe = make_recipe(policies[0], f"eval.episodes_per_task={EVAL.episodes_per_task}", "eval.videos=1")
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    folder = tmp_path / "run"
    result = launch("vla_rl", "eval", str(tmp_path / "recipe.yaml"), "--output", str(folder), module=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("report: ") == 1, "one process speaks"
    evaluation = Evaluation.load(folder / "evaluations" / "policy.json")
    assert evaluation.meta.num_processes == 2 and len(evaluation.episodes) == 6
    assert list((folder / "videos").glob("*.mp4"))
