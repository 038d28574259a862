"""Environments behind hosts: equal to in-process ones, in other Pythons, on other machines; and what the docs say."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from other_python import other_python

from sim.remote import RemoteConfig
from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import VecEnv
from vla_rl.types import EpisodeSpec, StepResult

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FAULTY = {"kind": "remote", "env": "faulty_sim:FaultySim", "python_path": [str(HERE)]}
TABLETOP = {"image_size": 64, "cameras": ["agentview", "wrist"]}


def episodes(env: VecEnv, num_chunks: int = 4) -> list[StepResult]:
    """The results of some episodes under the expert's and random actions."""
    tasks = list(env.spec.tasks)
    env.reset([EpisodeSpec(tasks[i % len(tasks)], "validation", i) for i in range(env.num_envs)])
    rng = np.random.default_rng(0)
    results = []
    for _ in range(num_chunks):
        actions = rng.uniform(-1, 1, (env.num_envs, 5, env.spec.action_dim)).astype(np.float32)
        actions[:, 0] = env.expert_action() if env.spec.kind == "tabletop" else 0
        results.append(env.step(actions))
    return results


def assert_equal(some: list[StepResult], others: list[StepResult]) -> None:
    for a, b in zip(some, others, strict=True):
        assert a.obs.instruction == b.obs.instruction
        np.testing.assert_equal([a.obs.images, a.obs.state, a.info], [b.obs.images, b.obs.state, b.info])
        for name in ("reward", "terminated", "truncated", "num_steps", "success", "lost"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


LATER = {"Self", "Never", "LiteralString", "NotRequired", "Unpack", "override", "assert_never", "StrEnum", "UTC"}


def test_what_a_simulators_own_python_reads_imports_nothing_that_3_10_lacks() -> None:
    """A guard of the test below, which makes that Python: names that typing, enum and datetime got later."""
    code = "import sys, sim.tabletop; print(*(getattr(m, '__file__', None) for m in list(sys.modules.values())))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(file) for file in printed.split() if file.startswith((f"{ROOT / 'sim'}/", f"{ROOT / 'vla_rl'}/"))]
    assert ROOT / "sim/base.py" in files
    for file in files:
        body = ast.parse(file.read_text()).body
        names = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not names & LATER, f"{file}: {sorted(names & LATER)}; import them under TYPE_CHECKING"


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("version", ["3.10", "3.13", ""])
def test_tabletop_in_another_python_gives_exactly_what_it_gives_here(version: str, num_hosts: int) -> None:
    physics = f"mujoco=={importlib.metadata.version('mujoco')}"
    python = other_python(version, "numpy<2" if version == "3.10" else "numpy", physics, "pydantic", "pyyaml")
    config = RemoteConfig(
        env="sim.tabletop:TabletopConfig", kwargs=TABLETOP, python=python, working_dir=str(ROOT), num_hosts=num_hosts
    )
    here, there = TabletopConfig.model_validate(TABLETOP).build(3, True), config.build(3, True)
    try:
        assert {k: str(v) for k, v in vars(here.spec).items()} == {k: str(v) for k, v in vars(there.spec).items()}
        assert_equal(episodes(here), episodes(there))
        frame = there.save_state([1])[0]
        task = frame.task
        restored = here.reset([EpisodeSpec(task, keyframe=frame)], [0])
        np.testing.assert_equal(restored.images, there.reset([EpisodeSpec(task, keyframe=frame)], [0]).images)
    finally:
        here.close()
        there.close()


def docs_example() -> tuple[str, dict[str, object]]:
    """The class and the recipe that docs/remote.md shows."""
    text = (ROOT / "docs" / "remote.md").read_text()
    code = re.search(r"<!-- a test runs this example -->\n```python\n(.*?)```", text, re.DOTALL)
    recipe = re.search(r"and in the recipe:\n\n```yaml\n(.*?)```", text, re.DOTALL)
    assert code and recipe
    import yaml

    return code[1], yaml.safe_load(recipe[1])["env"]


@pytest.mark.parametrize("version", ["", pytest.param("3.10", marks=pytest.mark.slow)])
def test_the_example_in_the_docs_runs(tmp_path: Path, version: str) -> None:
    code, values = docs_example()
    (tmp_path / "my_lab.py").write_text(code)
    python = other_python(version, "numpy<2")
    config = build_component("env", {**values, "python": python, "working_dir": str(tmp_path), "num_hosts": 2})
    env: VecEnv = config.build(3)  # type: ignore[attr-defined]
    assert env.spec == config.env_spec() and env.spec.kind == "Reach"  # type: ignore[attr-defined]
    obs = env.reset([EpisodeSpec("go_right", "train", i) for i in range(3)])
    assert obs.images["agentview"].shape == (3, 64, 64, 3) and obs.instruction == ["move the dot to the right edge"] * 3
    result = env.step(np.tile(np.array([1.0, 0.0], np.float32), (3, 30, 1)))
    assert result.success.all() and (result.reward.sum(1) == 1).all() and (result.num_steps < 30).all()
    env.close()


def test_gymnasium_environments_are_used_as_they_are() -> None:
    facts = {
        "name": "pendulum",
        "tasks": {"swing": "swing the pendulum up"},
        "control_hz": 20,
        "cameras": {"side": "render()"},
        "state": "",
        "reward": "environment",
    }
    pytest.importorskip("pygame")
    config = RemoteConfig.model_validate(
        {"env": "gymnasium:make", "kwargs": {"id": "Pendulum-v1", "render_mode": "rgb_array"}, "facts": facts}
    )
    env = config.build(1)
    assert env.spec.horizon == {"swing": 200} and env.spec.state_dim == 3 and env.spec.image_size == (500, 500)
    env.reset([EpisodeSpec("swing")])
    assert (env.step(np.zeros((1, 3, 1), np.float32)).reward < 0).all()
    env.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """listen.py with the faulty simulator: its address, and the file with its token."""
    token = tmp_path / "token.txt"
    token.write_text("a secret of many characters\n")
    command = [sys.executable, "-u", str(ROOT / "sim" / "remote" / "listen.py"), "127.0.0.1:0"]
    options = ["--env", "faulty_sim:FaultySim", "--token-file", str(token), "--max-hosts", "3"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=HERE)
    assert process.stdout is not None
    address = process.stdout.readline().split()[2]
    yield address, token
    process.terminate()
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def test_another_machine_gives_the_same(listener: tuple[str, Path]) -> None:
    address, token = listener
    values = {**FAULTY, "hosts": [address], "token_file": str(token), "num_hosts": 2}
    here, there = (build_component("env", v).build(2, True) for v in (FAULTY, values))  # type: ignore[attr-defined]
    assert_equal(episodes(here, 2), episodes(there, 2))
    here.close()
    there.close()


def test_a_listeners_log_is_left_to_the_user(tmp_path: Path) -> None:
    for name in ("host.py", "listen.py"):
        text = (ROOT / "sim" / "remote" / name).read_text()
        (tmp_path / name).write_text(text.replace("MAX_LOG_BYTES = 2**24", "MAX_LOG_BYTES = 2**10"))
    log, token = tmp_path / "listen.log", tmp_path / "token.txt"
    token.write_text("a secret of many characters\n")
    options = ["--env", "faulty_sim:FaultySim", "--token-file", str(token)]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "listen.py"), "127.0.0.1:0", *options],
            stdout=output,
            stderr=output,
            cwd=HERE,
        )
    try:
        while not log.read_text().endswith("\n"):
            time.sleep(0.05)
        values = {"kwargs": {"fault": "print"}, "hosts": [log.read_text().split()[2]], "token_file": str(token)}
        env: VecEnv = build_component("env", {**FAULTY, **values}).build(1)  # type: ignore[attr-defined]
        env.reset([EpisodeSpec("go", "train", 7)])
        env.step(np.zeros((1, 4, 2), np.float32))
        env.save_state()
        env.close()
    finally:
        process.terminate()
        process.wait(timeout=20)
    assert log.read_text(errors="replace").startswith("listening on ") and log.stat().st_size > 2**10


def test_as_many_hosts_as_may_be_start_while_an_earlier_one_closes(tmp_path: Path) -> None:
    (tmp_path / "slow_sim.py").write_text(
        "import time\nfrom faulty_sim import FaultySim\n\n\nclass SlowSim(FaultySim):\n"
        "    def close(self) -> None:\n        time.sleep(1.5)\n"
    )
    (tmp_path / "faulty_sim.py").write_text((HERE / "faulty_sim.py").read_text())
    token = tmp_path / "token.txt"
    token.write_text("a secret of many characters\n")
    options = ["--env", "slow_sim:SlowSim", "--token-file", str(token), "--max-hosts", "1"]
    command = [sys.executable, "-u", str(ROOT / "sim" / "remote" / "listen.py"), "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        values = {"env": "slow_sim:SlowSim", "hosts": [process.stdout.readline().split()[2]], "token_file": str(token)}
        config = build_component("env", {"kind": "remote", **values})
        try:
            config.env_spec()  # type: ignore[attr-defined]  # of a host that is closed then
            env: VecEnv = config.build(1)  # type: ignore[attr-defined]
            env.reset([EpisodeSpec("go")])
            env.close()
        finally:
            process.terminate()


def test_who_does_not_know_the_token_is_refused(listener: tuple[str, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("a guess of many characters")
    config = RemoteConfig.model_validate({**FAULTY, "hosts": [listener[0]], "token_file": str(wrong)})
    with pytest.raises(RuntimeError, match="refused us: the token"):
        config.build(1)
    with pytest.raises(ConfigError, match="token_file: needed"):
        config.model_copy(update={"token_file": ""}).build(1)


def test_a_listener_gives_only_its_own_environment(listener: tuple[str, Path]) -> None:
    config = RemoteConfig.model_validate(
        {"env": "os:system", "kwargs": {"command": "true"}, "hosts": [listener[0]], "token_file": str(listener[1])}
    )
    with pytest.raises(RuntimeError, match="this host was started for 'faulty_sim:FaultySim' alone"):
        config.build(1)


def test_nobody_listens() -> None:
    config = RemoteConfig.model_validate({**FAULTY, "hosts": ["127.0.0.1:1"], "token_file": str(ROOT / "README.md")})
    with pytest.raises(RuntimeError, match=r"host 0 at 127.0.0.1:1 .* cannot be reached .*Is listen.py running there"):
        config.build(1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": "faulty_sim"}, r"env.env: got 'faulty_sim'.*package.module:Class"),
        ({"hosts": ["machine"]}, r"env.hosts.*expected \"name:port\", got 'machine'"),
        ({"facts": {"eval_seeds": [2**29]}}, "higher ones belong to the splits"),
        ({"facts": {"camera": {}}}, "env.facts.camera: unknown key.*Did you mean 'cameras'"),
    ],
)
def test_bad_options_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_component("env", {**FAULTY, **values})


def test_a_class_names_no_official_seeds_of_other_splits(tmp_path: Path) -> None:
    text = (HERE / "faulty_sim.py").read_text()
    (tmp_path / "greedy_sim.py").write_text(text.replace('"horizon": 12,', '"horizon": 12, "eval_seeds": [2**29 + 5],'))
    config = build_component("env", {**FAULTY, "env": "greedy_sim:FaultySim", "python_path": [str(tmp_path)]})
    with pytest.raises(RuntimeError, match=r"facts.eval_seeds: got \[536870917\].*higher ones belong to the splits"):
        config.build(1)  # type: ignore[attr-defined]


def test_an_episode_that_is_given_up_after_its_success_leaves_none_to_the_next() -> None:
    options = {"kwargs": {"steps_after_success": 12}, "python_path": [str(ROOT)]}
    env: VecEnv = build_component("env", {"kind": "remote", "env": "sim.dummy:DummyConfig", **options}).build(1)  # type: ignore[attr-defined]
    env.reset([EpisodeSpec("reach_red", "train", 1)])
    while not (result := env.step(env.expert_action()[:, None])).success[0]:
        pass
    assert not result.done[0]
    env.reset([EpisodeSpec("reach_blue", "train", 2)])
    result = env.step(np.zeros((1, 16, 7), np.float32))
    assert result.truncated[0, -1] and not result.success[0]
    env.close()


def test_official_seeds_are_the_eval_split() -> None:
    config = build_component("env", {**FAULTY, "facts": {"eval_seeds": [5, 3]}})
    env: VecEnv = config.build(1)  # type: ignore[attr-defined]
    assert env.spec.num_eval_states == {"go": 2, "stay": 2}
    state = env.reset([EpisodeSpec("go", "eval", 1)]).state[0, :2]
    np.testing.assert_allclose(state, np.random.default_rng(3).uniform(0.1, 0.5, 2), rtol=1e-6)
    with pytest.raises(ValueError, match="allowed 0 to 1"):
        env.reset([EpisodeSpec("go", "eval", 2)])
    env.close()
