"""The outer loop's rounds: what each fit learns from and chooses on, what is counted, and a late report."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from test_loop import recipe  # noqa: F401  (fixtures)
from tiny_run import save_policy

from vla_rl.cli.options import PROGRAM
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import apply_overrides
from vla_rl.evaluation import evaluate as evaluate_module
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import load_recipe, read_recipe
from vla_rl.recipe.runs import LoopConfig, LoopRecipe
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.workflows.collect import collect
from vla_rl.workflows.loop import controls as loop_controls
from vla_rl.workflows.loop.closed_loop import in_round
from vla_rl.workflows.loop.rounds import Round, _imagined, calibrates, counted_episodes, learned_from, planned_episodes
from vla_rl.workflows.world_model import fit_world_model
from world_model.metadata import read_metadata


def collected(folder: Path, **episodes: int) -> Round:
    """A round that has collected so many real episodes."""
    for name, number in episodes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "collect.json").write_text(json.dumps({"attempts": {"reach": number}}))
    return Round(folder)


def checked(done: Round, reference: int, rolled_back: bool) -> None:
    """The round's gate has made one check."""
    counts = {"gained": 0, "lost": 9, "tied": 1, "num_pairs": 10, "max_pairs": 10, "num_lost_pairs": 0}
    counts |= {"num_episodes": 20, "rate_a": 0.9, "rate_b": 0, "interval": [-1, 0], "p_value": 0, "alpha": 0.05}
    check = {"iteration": 4, "reference": reference, "comparison": counts | {"decision": "worse"}, "imagined": 0.5}
    done.run.mkdir(parents=True)
    pooled = {"num_checks": 1, "gained": 0, "lost": 9, "num_pairs": 10, "better": 0.1, "worse": 90, "needed": 20}
    found = check | {"pooled": pooled, "verdict": "worse", "rolled_back": rolled_back}
    (done.run / "gate.json").write_text(json.dumps({"reference": reference, "checks": [found]}))


def test_a_fit_learns_from_what_judged_earlier_rounds_and_not_its_own(tmp_path):
    rounds = [collected(tmp_path / f"round_{n}", held_out=10, rollouts=30) for n in (1, 2, 3)]
    first, second, third = rounds
    assert learned_from(rounds, 0) == ([first.rollouts], [1.0])
    datasets, weights = learned_from(rounds, 2)
    judged = [first.held_out, first.rollouts, second.held_out, second.rollouts]
    assert datasets == [*judged, third.rollouts], "the newest rollouts are last, some of which choose thresholds"
    assert weights == [0.25 / 4, 0.75 / 4, 0.5 / 4, 1.5 / 4, 1.0], "a round's weight, dealt by episodes"
    assert first.newest_episodes is None
    checks = [f"train/gate_episodes/iteration_{n:05d}/{name}" for n in (10, 20) for name in ("checked", "reference")]
    collected(first.folder, **dict.fromkeys(checks, 10))
    assert first.newest_episodes == first.folder / "train/gate_episodes/iteration_00020/checked"
    assert first.calibrating == [first.held_out, *(first.folder / checks[number] for number in (0, 1, 3))]
    datasets, weights = learned_from(rounds, 2)
    assert datasets[:6] == [first.held_out, *(first.folder / one for one in checks), first.rollouts]
    assert weights == [0.25 * part / 8 for part in (1, 1, 1, 1, 1, 3)] + [0.5 / 4, 1.5 / 4, 1.0], "the gate's teach too"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], "frames"),
        (["loop.every_frame=false"], "decisions"),
        (["gate.every=0"], "none"),
        (["world_model.objects.steps=10"], "none"),
        (["world_model.objects.steps=10", "gate.keep_episodes=frames"], "none"),
    ],
)
def test_the_gates_episodes_are_kept_where_a_fit_can_learn_from_them(tmp_path, options, kept):
    recipe = load_recipe("tabletop_imagination", options)
    rounds = [Round(tmp_path / "round_1")]
    assert in_round(recipe, rounds, 0, "policy", "world_model").gate.keep_episodes == kept


def test_no_two_rounds_imagine_from_the_same_initial_state(tmp_path):
    """Also where every group of a rollout is drawn again."""
    options = ["train.iterations=3", "train.groups=4", "train.resample_budget=2", "env.tasks=[push_to_zone]"]
    recipe = load_recipe("tabletop_imagination", options)
    rounds = [Round(tmp_path / f"round_{n}") for n in (1, 2)]
    drawn = []
    for number in range(2):
        sampler = in_round(recipe, rounds, number, "policy", "world_model").sampling.build(["push_to_zone"])
        drawn.append({spec.index for _ in range(3) for spec in [*sampler.draw(4), *sampler.draw(2)]})
    assert len(drawn[0]) == len(drawn[1]) == 18 and not drawn[0] & drawn[1]


@pytest.mark.parametrize(
    ("reference", "rolled_back", "kept_is_known"), [(0, True, True), (2, True, False), (0, False, False)]
)
def test_after_a_rollback_the_threshold_is_chosen_on_the_policy_that_rl_starts_from(
    tmp_path, reference, rolled_back, kept_is_known
):
    """Not on the rejected policy's, whose rollouts are the newest; nor are those episodes learned from then."""
    rounds = [collected(tmp_path / f"round_{n}", held_out=10, rollouts=30) for n in (1, 2, 3)]
    checked(rounds[0], reference, rolled_back)
    first, second, third = rounds
    assert calibrates(rounds, 0) == []
    assert calibrates(rounds, 1) == ([first.held_out] if kept_is_known else [])
    assert (first.held_out in learned_from(rounds, 1)[0]) != kept_is_known
    assert sum(learned_from(rounds, 1)[1]) == 1.5, "the rest of the round counts as much as all of it"
    later = [first.held_out, first.rollouts, second.held_out, second.rollouts, third.rollouts]
    assert learned_from(rounds, 2)[0] == later, "learned from once they choose nothing more"


@pytest.fixture(scope="module")
def new(recipe, tmp_path_factory) -> list[Path]:
    """A round's rollouts and held-out episodes."""
    folder = tmp_path_factory.mktemp("new")
    for number, name in enumerate(("rollouts", "held_out")):
        options = {"source": "policy", "episodes_per_task": 24, "start_index": 300 + 50 * number}
        collect(recipe, CollectConfig.model_validate(options | {"dataset": str(folder / name)}), lambda _: None)
    return [folder / "rollouts", folder / "held_out"]


@pytest.mark.parametrize("cross_fit", [0, 2])
def test_a_fit_chooses_its_threshold_on_the_episodes_that_it_is_given(recipe, new, tmp_path, cross_fit):
    options = [f"world_model.cross_fit={cross_fit}"]
    recipe = read_recipe(apply_overrides(recipe.model_dump(mode="json"), options))
    start: Any = recipe.env
    fitted = fit_world_model(recipe, tmp_path / "fit", new[:1], str(start.path), [1.0], "last", new[1:])
    before, after = (read_metadata(folder)[1] for folder in (Path(start.path), fitted))
    assert after.calibration["num_episodes"] == 24 and len(after.calibrated_on) == 1
    assert set(after.calibrated_on).isdisjoint(after.datasets)
    assert len(after.datasets) == len(before.datasets) + 1, "all of the rollouts, none held out"


def test_validation_is_counted_as_it_is_run(tmp_path):
    options = ["train.validate_every=2", "train.validation_episodes=5", "eval.samples_per_state=4"]
    one_task = "eval.tasks=[reach_red]"
    training = tiny_run.make_recipe(tmp_path / "policy", "env.tasks=[reach_red, reach_blue]", *options, one_task)
    recipe = LoopRecipe.model_construct(**dict(training), loop=LoopConfig())
    assert planned_episodes(recipe).validation == 2 * 5 * (1 + 4), "twice; one task; greedy and four samples"
    done = Round(tmp_path / "round_1")
    done.run.mkdir(parents=True)
    rows = [{"step": step, "validation/sampled": 0.5} for step in (2, 4, 4)]
    (done.run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert counted_episodes(recipe, done).validation == 2 * 5 * (1 + 4)


def test_imagined_success_is_of_episodes_from_initial_states_or_not_known():
    share = {"train/success": 0.5, "train/success_from_keyframes": 0.75}
    assert [_imagined(row) for row in ({"train/imagined": 0.25} | share, share)] == [0.25, None]


def test_a_round_that_was_killed_before_its_report_gets_it(tmp_path):
    recipe = tiny_run.make_recipe(
        save_policy(tmp_path / "policy"), "train.evaluate=after", "train.iterations=1", "train.allow_no_success=true"
    )
    done = Round(tmp_path / "round_1")
    for _ in range(2):
        done.folder.mkdir(exist_ok=True)
        loop_controls.run_beside_controls(recipe, (), done, None, PROGRAM, lambda _: None)
        run = RunFolder(done.run)
        status = json.loads(run.status.read_text())
        assert status["state"] == "finished" and status["done"] == 1 and done.finished
        assert "was stopped before its end" not in run.report.read_text()
        run.status.write_text(json.dumps(status | {"state": "running", "step": "evaluation after", "process": 0}))
        run.report.unlink()


def test_a_round_that_was_killed_while_filming_is_finished_and_not_run_again(tmp_path, monkeypatch):
    recipe = tiny_run.make_recipe(
        save_policy(tmp_path / "policy"),
        *("train.evaluate=after", "train.iterations=1", "train.allow_no_success=true", "eval.videos=1"),
    )
    done = Round(tmp_path / "round_1")
    done.folder.mkdir()

    def killed(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(evaluate_module, "film", killed)
        loop_controls.run_beside_controls(recipe, (), done, None, PROGRAM, lambda _: None)
    run = RunFolder(done.run)
    saved = Evaluation.load(run.evaluation("final"))
    assert done.finished and saved.meta.policy_hash == policy_hash(run.policy)
    loop_controls.run_beside_controls(recipe, (), done, None, PROGRAM, lambda _: None)
    assert Evaluation.load(run.evaluation("final")) == saved
    assert json.loads(run.status.read_text())["state"] == "finished"
    assert "was stopped before its end" not in run.report.read_text()
