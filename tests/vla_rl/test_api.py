"""The Python API: what a script does with `import vla_rl`."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import vla_rl
from vla_rl.config import ConfigError
from vla_rl.interfaces import VecEnv

TINY = [
    "train.iterations=1",
    "train.groups=2",
    "train.group_size=2",
    "train.evaluate=never",
    "env.num_envs=4",
    "env.num_workers=0",
    "eval.episodes_per_task=1",
    "eval.temperatures=[1.0]",
]


@pytest.fixture(scope="module")
def recipe() -> vla_rl.Recipe:
    return vla_rl.load_recipe("tabletop_grpo", TINY)


def test_importing_it_imports_nothing_heavy_until_a_name_is_used() -> None:
    code = (
        "import sys, vla_rl; assert 'torch' not in sys.modules and vla_rl.__version__; vla_rl.load_recipe; vla_rl.nope"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "module 'vla_rl' has no attribute 'nope'" in ended.stderr


def test_a_recipe_is_trained_and_its_policy_evaluated(recipe: vla_rl.Recipe, tmp_path: Path) -> None:
    policy = vla_rl.train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "report.html").is_file()
    evaluation = vla_rl.evaluate(policy, recipe)
    assert evaluation.modes == ["sampled"] and len(evaluation.episodes) == len(evaluation.tasks)
    assert evaluation.meta.policy == str(policy) and evaluation.meta.policy_hash
    again = vla_rl.evaluate(vla_rl.load_policy(policy), recipe, tasks=[evaluation.tasks[0]])
    assert again.meta.policy is None and again.episodes[0] == evaluation.episodes[0]


def test_an_environment_is_the_one_the_policy_acts_in(recipe: vla_rl.Recipe) -> None:
    with closing(vla_rl.make_env(recipe, num_envs=2)) as env:
        assert isinstance(env, VecEnv) and env.num_envs == 2 and env.spec.kind == "tabletop"


def test_the_page_of_the_docs_runs() -> None:
    page = Path(vla_rl.__file__).parent.parent / "docs" / "python_api.md"
    _, step_by_step = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(step_by_step, str(page), "exec"), names)
    assert names["result"].success.shape == (2,)


def test_options_are_checked_like_those_of_a_recipe(recipe: vla_rl.Recipe) -> None:
    with pytest.raises(ConfigError, match=r"eval\.episodes_per_task"):
        vla_rl.evaluate("pretrained:tabletop_base", recipe, episodes_per_task=0)
    with pytest.raises(ConfigError, match="tabletop_grp"):
        vla_rl.make_env("tabletop_grp")


def test_an_approximate_evaluation_is_of_the_approximation(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("vla_rl.training.api.run_evaluation", lambda policy, env, config: found.append(env))
    light = vla_rl.load_recipe("libero_object_bc", ["env.tasks=[]", "env.rendering=light"])
    policy: Any = object()
    vla_rl.evaluate(policy, light)
    vla_rl.evaluate(policy, light, approximate=True)
    assert [env.rendering for env in found] == ["exact", "light"]


def test_one_override_that_is_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^overrides: got the text 'seed=3'; give a list .*: \['seed=3'\]$"):
        vla_rl.load_recipe("tabletop_grpo", "seed=3")
