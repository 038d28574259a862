"""A section whose `kind` changes: what it keeps, what it leaves out and says so, what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError, apply_overrides, build_component, read_yaml, recipes_folder

GRPO = {"algo": {"kind": "grpo", "optim": {"lr": 2e-4}, "epochs": 2, "normalize_std": False, "filter_groups": False}}


class MyTabletop(TabletopConfig):
    """A user's own tabletop."""

    kind: str = f"{__name__}:MyTabletop"  # type: ignore[assignment]


def test_a_new_kind_keeps_what_both_share_and_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    assert apply_overrides(GRPO, ["algo=ppo"]) == {"algo": {"kind": "ppo", "optim": {"lr": 2e-4}, "epochs": 2}}
    assert caplog.messages == [
        "algo.kind: 'grpo' became 'ppo', so what was said of filter_groups, normalize_std is left out"
    ], "both have normalize_std, and mean other things by it"
    assert apply_overrides(GRPO, ["algo=rloo"])["algo"] == {
        "kind": "rloo", "optim": {"lr": 2e-4}, "epochs": 2, "filter_groups": False
    }  # fmt: skip
    caplog.clear()
    kept = apply_overrides(GRPO, ["algo=dr_grpo"])["algo"]
    assert kept == {**GRPO["algo"], "kind": "dr_grpo"} and not caplog.messages


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["algo.optim.lr=3e-4", "algo=ppo", "algo.value_lr=1e-3"]))
)
def test_no_override_is_lost_by_a_kind_that_follows(order: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    assert apply_overrides({"algo": {"kind": "grpo", "optim": {"lr": 2e-4}}}, order)["algo"] == {
        "kind": "ppo", "optim": {"lr": 3e-4}, "value_lr": 1e-3
    }  # fmt: skip
    assert not caplog.messages


@pytest.mark.parametrize(
    "overrides",
    [["algo.filter_groups=true", "algo=ppo"], ["algo=ppo", "algo.filter_groups=true"], ["algo={kind: ppo, values: 1}"]],
)
def test_an_override_that_the_new_kind_lacks_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"algo\.(filter_groups|values): unknown key"):
        build_component("algo", apply_overrides(GRPO, overrides)["algo"])


def test_of_several_kinds_the_last_one_counts_and_what_it_shares_is_not_lost_between() -> None:
    assert apply_overrides(GRPO, ["algo=ppo", "algo=rloo"])["algo"]["filter_groups"] is False
    assert apply_overrides({}, ["rollout.hosts=2", "rollout=ray"]) == {"rollout": {"hosts": 2, "kind": "ray"}}
    assert apply_overrides({"eval": {"plan": {"candidates": 3}}}, ["eval.plan=best_of_n"])["eval"]["plan"] == {
        "kind": "best_of_n", "candidates": 3
    }  # fmt: skip
    assert apply_overrides(GRPO, ["algo=null", "algo=ppo"]) == {"algo": {"kind": "ppo"}}, "null empties a section"


def test_what_is_bound_to_a_kind_does_not_go_to_another_unless_one_extends_the_other(caplog) -> None:
    base = {
        "env": {"kind": "tabletop", "tasks": ["stack"], "num_envs": 4, "image_size": 32},
        "policy": {"kind": "openvla", "path": "runs/a/policy"},
    }
    found = apply_overrides(base, ["env=libero", "env.suite=x", "policy=lerobot"])
    assert found["env"] == {"kind": "libero", "num_envs": 4, "image_size": 32, "suite": "x"}
    assert found["policy"] == {"kind": "lerobot"}
    assert [text.rpartition(" of ")[2] for text in caplog.messages] == ["tasks is left out", "path is left out"]
    caplog.clear()
    assert apply_overrides(base, ["policy=value_guided", "policy.path=b"])["policy"] == {
        "kind": "value_guided", "path": "b"
    }  # fmt: skip
    mine = f"{__name__}:MyTabletop"
    assert apply_overrides(base, [f"env.kind={mine}"])["env"] == {**base["env"], "kind": mine}
    assert not caplog.messages


def test_a_file_over_another_keeps_what_both_kinds_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(GRPO))
    path = tmp_path / "b.yaml"
    path.write_text("base: a.yaml\nalgo: {kind: ppo, optim: {lr: 1.0}}\n")
    assert read_yaml(path)["algo"] == {"kind": "ppo", "optim": {"lr": 1.0}, "epochs": 2}
    assert len(caplog.messages) == 1
    caplog.clear()
    for recipe in recipes_folder().glob("*.yaml"):
        read_yaml(recipe)
    assert not caplog.messages, "recipes that ship leave out what they mean to"
