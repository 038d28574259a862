"""`vla-rl eval --suites` in LIBERO itself: all five suites, resumed where it was cut off; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from libero_setup import ASSETS, needs_assets, needs_library
from typer.testing import CliRunner, Result

from sim.dummy import DummyConfig
from sim.libero import LiberoConfig
from sim.libero.suites import HORIZONS, TITLES
from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, _official
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.suites import SuiteResults
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.evaluate_policy import suite_recipes

OPTIONS = ('env.tasks=["0"]', "env.image_size=64", "env.num_envs=1", "env.num_workers=0")
FEW = ("eval.split=eval", "eval.episodes_per_task=1", "eval.temperatures=[0]", "eval.videos=0", "env.horizon=8")


def save_policy(folder: Path) -> Path:
    """A fresh policy that fits LIBERO: it moves at random."""
    spec = LiberoConfig(tasks=("0",), image_size=64).env_spec()
    policy = OpenVLAConfig(preset="tiny", image_size=64, chunk_size=4, cameras=("agentview",)).build(spec, seed=0)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    policy.save(folder)
    return folder


@needs_library
def test_each_suite_has_its_tasks_and_horizon() -> None:
    assert list(TITLES) == list(HORIZONS)
    recipe = load_recipe("libero_object_bc", ["env.tasks=[]"])
    found = suite_recipes(recipe, "all")
    sizes = {suite: len(one.acting_env.env_spec().tasks) for suite, one in found.items()}
    assert sizes == {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
    for suite, one in found.items():
        assert set(one.acting_env.env_spec().horizon.values()) == {HORIZONS[suite]}


@needs_library
def test_each_suite_may_have_its_own_policy(tmp_path: Path) -> None:
    one, other = save_policy(tmp_path / "one"), save_policy(tmp_path / "other")
    recipe = load_recipe("libero_object_bc", [f"policy.path={one}"])
    found = suite_recipes(recipe, f"libero_goal={other},libero_10")
    assert {suite: str(r.policy.path) for suite, r in found.items()} == {  # type: ignore[attr-defined]
        "libero_goal": str(other),
        "libero_10": str(one),
    }


@needs_library
@pytest.mark.parametrize(
    ("recipe", "suites", "message"),
    [
        ("tabletop_grpo", "all", "--suites: tabletop has no suites"),
        ("libero_object_bc", "libero_goal,libero_long", "--suites: got 'libero_long'; libero has: libero_spatial"),
        ("libero_object_bc", "libero_goal,libero_goal", "name each suite once"),
        ("libero_object_bc", "libero_goal=nowhere", "policy path 'nowhere'"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(recipe: str, suites: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suite_recipes(load_recipe(recipe), suites)


@needs_library
def test_a_named_task_is_of_one_suite_alone() -> None:
    task = LiberoConfig(suite="libero_goal").task_names()[0]
    with pytest.raises(ConfigError, match="a task of libero_goal alone; for several suites give numbers"):
        LiberoConfig(suite="libero_goal", tasks=(task,)).in_suite("libero_10")


@pytest.mark.slow
@needs_assets
def test_all_five_suites_in_one_table(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")

    def command() -> Result:
        more = (f"env.assets_path={ASSETS}", f"policy.path={policy}", "--suites", "all", "--name", "tiny")
        return CliRunner().invoke(app, ["eval", "libero_object_bc", *OPTIONS, *FEW, *more, "-o", str(tmp_path / "run")])

    result = command()
    assert result.exit_code == 0, result.output
    for row in ("Spatial", "Object", "Goal", "Long", "90", "average of 4", "average of 5"):
        assert row in result.stdout
    found = SuiteResults.load(tmp_path / "run/suites.json")
    assert [rate.num_episodes for rate in found.rates] == [1, 1, 1, 1, 1, 4, 5]
    assert found.rates[-2].suites == ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    assert (tmp_path / "run/suites.tex").is_file() and (tmp_path / "run/suites.md").is_file()
    files = {suite: tmp_path / f"run/evaluations/tiny-{suite}.json" for suite in TITLES}
    for suite, file in files.items():
        meta = Evaluation.load(file).meta
        assert meta.env_title == f"libero/{suite}" and meta.official_states
    before = {suite: file.stat().st_mtime_ns for suite, file in files.items()}
    files["libero_90"].unlink()  # As if it had been cut off there.
    (tmp_path / "run/suites.json").unlink()
    assert command().exit_code == 0
    again = {suite: file.stat().st_mtime_ns for suite, file in files.items()}
    assert [suite for suite in TITLES if again[suite] != before[suite]] == ["libero_90"]
    assert [rate.rate for rate in SuiteResults.load(tmp_path / "run/suites.json").rates] == [
        r.rate for r in found.rates
    ]


def test_the_official_protocol_stands_beside_the_own(monkeypatch) -> None:
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    whole = LiberoConfig(suite="libero_object").env_spec()
    said = _official(whole, EvalConfig(episodes_per_task=50))
    assert {what for what, (here, there) in said.items() if here != there} == set(), said
    assert said["control steps"] == ("280", "280") and said["tasks"] == ("10", "10")
    assert said["initial states of each task"] == ("the 50 official ones", "the 50 official ones")
    other = LiberoConfig(
        suite="libero_object",
        tasks=("3",),
        horizon=160,
        image_size=64,
        rendering="light",
        assets_path=Path("elsewhere"),
    )
    said = _official(other.env_spec(), EvalConfig(episodes_per_task=10))
    assert said["control steps"] == ("160", "280") and said["tasks"] == ("1", "10")
    assert said["initial states of each task"][0] == "10 of the eval split"
    assert said["pixels"] == ("64 x 64", "256 x 256") and said["pictures"] == ("light", "exact")
    assert said["meshes and textures"][0] == "of another folder, stand-ins perhaps"
    assert _official(DummyConfig().env_spec(), EvalConfig()) == {}
