"""The commands on real input, end to end and tiny: demonstrations, cloning, resuming, evaluating, comparing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from reach_policy import ReachPolicy
from typer.testing import CliRunner

from sim.dummy import DummyConfig
from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.evaluation.results import EpisodeJournal, EpisodeRecord
from vla_rl.evaluation.sequential_compare import compare_sequential
from vla_rl.policies.fake_input import fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.workflows.evaluate_policy import base_and_final, find_evaluation


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, f"{arguments}: {result.output}{result.exception}"
    return result.output


def following(said: str) -> list[str]:
    """The command that a command's last line names."""
    return shlex.split(said.splitlines()[-1].partition(": vla-rl ")[2])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_demonstrations_to_a_comparison(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "run: sft\nname: tiny\n"
        "env: {kind: 'sim.dummy:DummyConfig', num_envs: 2}\n"
        "policy: {kind: openvla, preset: tiny}\n"
        "collect: {episodes_per_task: 2}\n"
        f"sft: {{datasets: [{tmp_path}/demos], steps: 3, batch_size: 4, optim: {{warmup_steps: 1}}, log_every: 1}}\n"
        "eval: {episodes_per_task: 2, videos: 0}\n"
        "log: {tensorboard: false}\n"
    )
    said = run("collect", str(recipe), "env.tasks=[reach_red]", "-o", str(tmp_path / "demos"))
    assert "2 episodes" in said and following(said) == ["sft", str(recipe), "env.tasks=[reach_red]"]

    folder = tmp_path / "run"
    said = run("sft", str(recipe), "-o", str(folder))
    assert f"policy: {folder / 'policy'}" in said
    assert following(said) == ["eval", str(folder / "config.yaml"), f"policy.path={folder / 'policy'}"]
    run("sft", str(recipe), "-o", str(folder), "--resume")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and max(steps) == 3

    evaluation = tmp_path / "evaluation"
    command = ("eval", str(recipe), f"policy.path={folder / 'policy'}", "-o", str(evaluation))
    said = run(*command)
    assert "greedy" in said and following(said) == ["compare", "BEFORE", str(evaluation)]
    assert "sampled" in run(*command, "--name", "again")  # A second one in the same folder.
    assert CliRunner().invoke(app, list(command)).exit_code == 2  # Not over the first.
    assert (evaluation / "report.html").stat().st_size > 1000
    first, again = (evaluation / "evaluations" / f"{name}.json" for name in ("policy", "again"))
    table = run("compare", str(first), str(again), "-o", str(tmp_path / "comparison.json"))
    assert "McNemar" in table
    policy = str(folder / "policy")
    assert following(table) == ["compare", policy, policy, "--recipe", str(evaluation / "config.yaml")]
    greedy = [r for r in json.loads((tmp_path / "comparison.json").read_text())["results"] if r["mode"] == "greedy"]
    assert greedy and all(r["gained"] == r["lost"] == 0 for r in greedy)

    command = ("compare", policy, policy, "--recipe", str(recipe), "-o", str(tmp_path / "pairs.json"))
    said = run(*command, "compare.max_pairs=4")
    assert "of at most 4 pairs" in said
    *again, more = following(said)
    assert again == [*command[:-2]] and more.startswith("compare.max_pairs=") and int(more[18:]) > 4
    pairs = json.loads((tmp_path / "pairs.json").read_text())
    assert (pairs["num_pairs"], pairs["decision"]) == (4, "undecided")


@pytest.mark.parametrize(("speeds", "then"), [((0.1, 1.0), "serve"), ((1.0, 0.1), "eval")])
def test_a_comparison_names_what_comes_next(
    speeds: tuple[float, float], then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After better and after worse; of scripted policies, which no folder holds."""
    recipe, (before, after) = tmp_path / "tiny.yaml", (ReachPolicy(speed) for speed in speeds)
    recipe.write_text("run: eval\nname: tiny\nenv: {kind: 'sim.dummy:DummyConfig'}\npolicy: {kind: openvla}\n")
    env = DummyConfig(num_envs=8).build()
    monkeypatch.setattr(
        "vla_rl.cli.evaluation.compare_policies",
        lambda recipe, a, b, config, file: compare_sequential(before, after, env, config),
    )
    named = following(run("compare", "a", "b", "--recipe", str(recipe), "seed=1", "compare.temperature=0"))
    expected = {"serve": ["serve", "b"], "eval": ["eval", str(recipe), "seed=1", "policy.path=b"]}
    assert named == expected[then]


def test_ctrl_c_in_an_evaluation_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(
        "run: eval\nname: tiny\nenv: {kind: 'sim.dummy:DummyConfig', num_envs: 2, tasks: [reach_red]}\n"
        "policy: {kind: openvla, preset: tiny}\neval: {episodes_per_task: 3, videos: 0}\nlog: {tensorboard: false}\n"
    )
    policy = OpenVLAConfig(preset="tiny").build(DummyConfig(tasks=("reach_red",)).env_spec(), seed=0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "policy")
    left, add = 2, EpisodeJournal.add

    def stop(journal: EpisodeJournal, record: EpisodeRecord) -> None:
        nonlocal left
        add(journal, record)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(EpisodeJournal, "add", stop)
    stopped = CliRunner().invoke(
        app, ["eval", str(recipe), f"policy.path={tmp_path}/policy", "-o", str(folder), "--name", "base"]
    )
    assert stopped.exit_code == 130, stopped.output
    (again,) = [line for line in stopped.output.splitlines() if line.startswith("  vla-rl ")]
    assert "evaluation base: 2 of 6 episodes have ended" in run("report", "--status", str(folder))
    assert "sampled" in run(*shlex.split(again)[1:])
    assert len(json.loads((folder / "evaluations" / "base.json").read_text())["episodes"]) == 6
    assert "evaluation base: finished" in run("report", "--status", str(folder)).splitlines()


def test_finding_an_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    with pytest.raises(ConfigError, match="It has: none"):
        find_evaluation(tmp_path, "final")
    (folder / "a.json").touch()
    assert find_evaluation(tmp_path, "final") == folder / "a.json" == find_evaluation(folder / "a.json", "final")
    (folder / "b.json").touch()
    with pytest.raises(ConfigError, match=r"which evaluation\? It has: a\.json, b\.json"):
        find_evaluation(tmp_path, "final")
    (folder / "final.json").touch()
    assert find_evaluation(tmp_path, "final") == folder / "final.json"


def test_a_policys_folder_is_not_asked_which_of_its_files_is_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "run" / "policy").mkdir(parents=True)
    for name in ("config.yaml", "policy/config.json", "policy/dataset_statistics.json"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(ConfigError, match=r"policy: a policy, .* the run's folder, .*/run; or add --recipe RECIPE"):
        find_evaluation(tmp_path / "run" / "policy", "final")


def test_a_run_without_evaluations_is_not_asked_which_of_its_other_files(tmp_path: Path) -> None:
    for name in ("config.yaml", "status.json", "versions.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="this run has no evaluation so far"):
        find_evaluation(tmp_path, "final")


def test_a_run_without_its_second_evaluation_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for name in ("base", "final"):
        (folder / f"{name}.json").touch()
        if name == "base":
            with pytest.raises(ConfigError, match=r"has no evaluation 'final' so far \(it has: base\.json\)\. Wait"):
                base_and_final(tmp_path)
    assert base_and_final(tmp_path) == (folder / "base.json", folder / "final.json")
    with pytest.raises(ConfigError, match="is one evaluation; name another"):
        base_and_final(folder / "base.json")
    with pytest.raises(ConfigError, match="no such file or folder"):
        base_and_final(tmp_path / "nosuch")
