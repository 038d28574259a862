"""A policy that is of another environment than the recipe's is said to be."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest

from vla_rl.cli import main
from vla_rl.policies.base import pretrained_folder
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows import recipe_parts
from vla_rl.workflows.recipe_parts import build_policy, env_spec, other_environment


@pytest.mark.parametrize(
    ("config", "statistics", "kind", "said"),
    [
        ("env: {kind: tabletop}", None, "libero", "tabletop"),
        ("env: {kind: world_model}\nreal_env: {kind: libero}", None, "libero", ""),
        ("env: {kind: world_model}\nreal_env: {kind: libero}", None, "tabletop", "libero"),
        ("env: {kind: 'mine:Env'}", None, "libero", ""),
        (None, ["libero_goal_no_noops"], "tabletop", "libero"),
        (None, ["libero_goal_no_noops"], "libero", ""),
        (None, ["bridge_orig"], "libero", ""),
        (None, None, "libero", ""),
    ],
)
def test_a_policys_folder_says_where_it_is_from(tmp_path: Path, config, statistics, kind: str, said: str) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    if config:
        (tmp_path / "config.yaml").write_text(config)
    if statistics:
        (policy / "dataset_statistics.json").write_text(json.dumps(dict.fromkeys(statistics, 0)))
    assert other_environment(policy, kind) == said


def test_the_shipped_policy_warns_in_libero_and_not_on_the_tabletop() -> None:
    assert other_environment(pretrained_folder() / "tabletop_base", "libero") == "tabletop"
    own = load_recipe("tabletop_grpo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_policy(own, env_spec(own))
    other = load_recipe("libero_object_grpo", ["policy.path=pretrained:tabletop_base"])
    with pytest.warns(UserWarning, match="tabletop_base was trained in tabletop, and this is libero"):
        build_policy(other, env_spec(other))


def test_a_command_prints_a_warning_of_ours_without_a_line_of_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # To be as it was after the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["vla-rl", "--version"])
    with pytest.raises(SystemExit):
        main()
    warned = UserWarning("policy.path: runs/a was trained in tabletop, and this is libero")
    assert warnings.formatwarning(warned, UserWarning, recipe_parts.__file__, 37) == f"warning: {warned}\n"
    assert warnings.formatwarning(warned, UserWarning, json.__file__, 37).startswith(f"{json.__file__}:37: UserWarning")
