"""The command line: quick help, one message for a person's mistake, exit codes, listings, configs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from vla_rl.cli import app as cli
from vla_rl.common.atomic import disk_full
from vla_rl.config import KINDS, recipes_folder

ROOT = Path(cli.__file__).resolve().parent.parent
COMMANDS = (
    "train",
    "sft",
    "collect",
    "eval",
    "compare",
    "sweep",
    "demo",
    "bench",
    "doctor",
    "list",
    "config",
    "loop",
    "plan",
    "world-model keyframes",
    "world-model rank",
    "world-model styles",
)
HEAVY = ("torch", "numpy", "mujoco", "transformers", "lerobot", "matplotlib", "pandas", "wandb", "ray", "sim")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "run: train\nname: tiny\ndescription: For tests.\n"
        "env: {kind: 'sim.dummy:DummyConfig'}\npolicy: {kind: openvla}\nalgo: {kind: grpo}\n"
    )
    return path


# ---------------------------------------------------------------- help


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['vla-rl', '--help']\n"
        "from vla_rl.cli import main\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "train" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.parametrize(("what", "option"), [("gpu", "--part"), ("env", "--kinds"), ("imagination", "--world-model")])
@pytest.mark.parametrize("help_option", ["--help", "-h"])
def test_each_benchmark_shows_its_own_options(
    what: str, option: str, help_option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([what, help_option], [what, "--", help_option]):
        result = run("bench", *arguments)
        shown = result.output + capsys.readouterr().out
        assert result.exit_code == 0 and f"usage: vla-rl bench {what}" in shown and option in shown
    own = run("bench", help_option)
    assert own.exit_code == 0 and "WHAT" in own.output and option not in own.output


def test_no_help_text_is_eaten_as_markup() -> None:
    from rich.text import Text

    def parameters(command: Any) -> list[Any]:
        return [*command.params, *(p for inner in getattr(command, "commands", {}).values() for p in parameters(inner))]

    texts = [p.help for p in parameters(cli.program()) if getattr(p, "help", None)]
    assert len(texts) > 50
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nosuch"], "recipe not found: nosuch"),
        (["config", "{recipe}", "lr"], "override 'lr': expected key=value"),
        (["config", "{recipe}", "seeed=1"], "seeed: unknown key (value 1). Did you mean 'seed'?"),
        (["config", "{recipe}", "lr=1e-4"], "lr: unknown key (value 0.0001). Did you mean 'algo.optim.lr'"),
        (["config", "{recipe}", "algo.lr=1e-4"], "algo.lr: unknown key (value 0.0001). Did you mean 'algo.optim.lr'?"),
        (
            ["train", "{recipe}", "--algo.lr", "1e-4"],
            "--algo.lr: a recipe's options are typed without dashes:",
        ),
        (["train", "{recipe}", "--algo.optim.lr=1e-4"], "typed without dashes: algo.optim.lr=1e-4"),
        (["config", "{recipe}", "seed=x"], "seed: got 'x'"),
        (["config", "{recipe}", "env.kind=tabeltop"], "Did you mean 'tabletop'?"),
        (["train", "{recipe}", "--resume"], "--resume: no run runs/tiny or tiny-DATE-TIME"),
        (["list", "tasks", "nosuch"], "env.kind: got 'nosuch'"),
        (["doctor", "nosuch"], "recipe not found: nosuch"),
        (["doctor", "nosuch"], "doctor also takes a robot: the file of its contract, or one that ships"),
        (["config", "{recipe}", "device=gpu"], "device: got 'gpu', allowed: auto"),
        (["config", "{recipe}", "device=cuda:x"], "device: got 'cuda:x', allowed: auto"),
        (["merge", "{tmp}/nosuch", "-o", "{tmp}/merged"], "nosuch: no such folder"),
        (["compare", "nosuch"], "nosuch: no such file or folder"),
        (["import", "nosuch/*.hdf5", "-o", "{tmp}/out"], "nosuch/*.hdf5: no such file or folder"),
        (["import", "nosuch", "-o", "{tmp}/out"], "import takes: LIBERO's demonstrations (.hdf5); ALOHA's"),
        (["import", "{tmp}", "-o", "{tmp}/out"], "is none of these: LIBERO's"),
        (["import", "{tmp}/a.mcap"], "a.mcap: no such file"),
        (
            ["import", "{recipe}", "--format", "bags", "-o", "{tmp}/out"],
            "need --robot (its contract) and --instruction",
        ),
        (["import", "{recipe}", "--format", "folder"], "--output: videos and CSV (dataset.yaml, episodes/) needs it"),
        (["import", "a", "--format", "recording", "-o", "b"], "--output: a recording becomes the dataset that it was"),
        (
            ["import", "a", "--format", "libero", "--fps", "5"],
            "robomimic's demonstrations (.hdf5) and an RLDS dataset (features.json), and this is",
        ),
        (["import", "a", "b", "--format", "rlds", "-o", "c"], "import: got 2 sources; of an RLDS dataset"),
        (
            ["plan", "--memory", "openvla_libero_grpo", "policy.path={tmp}"],
            "config.json: not found. A policy folder holds",
        ),
        (["plan", "tabletop_grpo", "--memory", "--roofline"], "of the other options --memory takes --gpus alone"),
        (["sweep", "tabletop_grpo"], "sweep: give either --over OPTION=VALUES"),
        (["calibrate", "camera", "a", "--intrinsics", "b"], "--intrinsics: is of --mount, which says what the camera"),
        (["report", "nosuch"], "nosuch: holds no run (no config.yaml)"),
        (["compare", "a", "--recipe", "{recipe}"], "give both folders, A and B"),
        (["eval", "{recipe}", "--name", "../x"], "--name: got '../x'; it names files: give a word"),
        (["eval", "{recipe}", "--name", ""], "--name: got ''; it names files"),
        (["sft", "{recipe}", "--output", "{tmp}/run"], "sft: the recipe has no sft section"),
        (["train", "{recipe}", "device=foo"], "device: got 'foo', allowed: auto"),
        (["plan", "--memory", "tabletop_grpo", "device=foo"], "device: got 'foo', allowed: auto"),
        (["merge", "a", "-o", "b", "--device", "foo"], "--device: got 'foo', allowed: auto"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    arguments: list[str], message: str, recipe: Path, tmp_path: Path
) -> None:
    result = run(*(a.format(recipe=recipe, tmp=tmp_path) for a in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(recipe: Path) -> None:
    result = run("--debug", "config", str(recipe), "seed=x")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "seed: got 'x'" in result.stderr


def test_classes_named_in_a_recipe_may_lie_where_the_program_is_run(tmp_path: Path) -> None:
    (tmp_path / "my_lab.py").write_text(
        "from typing import Literal\nfrom sim.dummy import DummyConfig\n"
        "class BenchConfig(DummyConfig):\n    kind: Literal['my_lab:BenchConfig'] = 'my_lab:BenchConfig'\n"
    )
    (tmp_path / "yaml.py").write_text("raise ImportError('hides an installed package')")
    code = f"import sys; sys.path[:1] = [{str(ROOT)!r}]; from vla_rl.cli import main; main()"
    command = [sys.executable, "-c", code, "list", "tasks", "my_lab:BenchConfig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "reach" in done.stdout, done.stderr


def test_an_unknown_command_exits_with_2() -> None:
    assert run("trian").exit_code == 2


@pytest.mark.parametrize("command", ["train", "eval", "sft", "collect", "loop"])
def test_what_this_machine_lacks_is_said_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    result = run(command, "tabletop_grpo", "device=cuda:99", "--output", str(output))
    assert result.exit_code == 2 and result.stderr.startswith("error: device: got 'cuda:99', but ")
    assert "Set device=auto or device=cpu" in result.stderr and result.stderr.count("\n") == 1
    monkeypatch.setenv("MUJOCO_GL", "foo")
    result = run(command, "tabletop_grpo", "--output", str(output))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: MUJOCO_GL: got 'foo', allowed: egl, osmesa, glfw. Unset it")
    assert not output.exists()
    for device in ("auto", "cpu", "cuda", "cuda:7", "mps"):  # Nothing is run.
        assert run("config", "tabletop_grpo", f"device={device}").exit_code == 0


def test_a_bug_is_not_hidden(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("an invariant")

    monkeypatch.setattr("vla_rl.training.train.train", broken)
    result = run("train", str(recipe), "--output", str(recipe.parent / "run"))
    assert isinstance(result.exception, AssertionError)


def test_whose_errors_are_for_people() -> None:
    from sim.rendering.gl import RenderError
    from vla_rl.config import parse_override

    def caught(function, *arguments) -> Exception:
        with pytest.raises(Exception) as info:
            function(*arguments)
        return info.value

    def raise_(error: Exception) -> None:
        raise error

    assert cli.is_for_people(caught(parse_override, "novalue"))
    assert cli.is_for_people(caught(raise_, RenderError("no GL")))
    assert cli.is_for_people(caught(open, "/no/such/file"))
    assert not cli.is_for_people(caught(json.loads, "{"))
    assert not cli.is_for_people(caught(raise_, AssertionError("an invariant")))


def test_ctrl_c_says_how_to_go_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vla_rl.training.train.train", interrupted)
    folder = recipe.parent / "my run"
    result = run("train", str(recipe), "seed=3", "--output", str(folder))
    assert result.exit_code == 130
    assert f"The run is saved in {folder}" in result.stderr
    assert f"vla-rl train --resume --output '{folder}'" in result.stderr


def test_a_full_disk_is_said_and_how_to_go_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(recipe: object, folder: Path, resume: bool) -> None:
        raise disk_full(folder, "checkpoint")

    monkeypatch.setattr("vla_rl.training.train.train", full)
    result = run("train", str(recipe), "-o", str(recipe.parent / "run"))
    assert result.exit_code == 2 and "disk full while writing the checkpoint" in result.stderr
    assert result.stderr.endswith(f"To resume the run:\n  vla-rl train --resume --output {recipe.parent / 'run'}\n")


# ---------------------------------------------------------------- run folders


def test_train_hands_over_recipe_folder_and_resume(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(loaded: object, folder: Path, resume: bool) -> Path:
        calls.append((loaded.seed, folder, resume))  # type: ignore[attr-defined]
        (folder / "metrics.jsonl").write_text("{}\n")
        (folder / "policy").mkdir(exist_ok=True)
        return folder / "policy"

    monkeypatch.setattr("vla_rl.training.train.train", fake)
    folder = recipe.parent / "run"
    first = run("train", str(recipe), "seed=7", "-o", str(folder))
    assert first.exit_code == 0 and str(folder / "policy") in first.output
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 7
    used = run("train", str(recipe), "seed=7", "-o", str(folder))
    assert used.exit_code == 2 and "is not empty" in used.stderr and "--resume" in used.stderr
    other = run("train", str(recipe), "seed=8", "-o", str(folder), "--resume")
    assert other.exit_code == 2 and "seed: 7" in other.stderr and "seed: 8" in other.stderr
    assert run("train", str(recipe), "seed=7", "-o", str(folder), "--resume").exit_code == 0
    bare = run("train", "--resume", "--output", str(folder))
    assert bare.exit_code == 0, bare.stderr
    assert run("train", "log.console=false", "--resume", "--output", str(folder)).exit_code == 0
    assert yaml.safe_load((folder / "config.yaml").read_text())["log"]["console"] is False
    assert calls == [(7, folder, False), *[(7, folder, True)] * 3]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{recipe}"],
        ["eval", "{recipe}"],
        ["collect", "{recipe}"],
        ["world-model", "rank", "{recipe}", "/no/world", "seed=1", "--policy", "a"],
        ["world-model", "keyframes", "{recipe}", "/no/world", "seed=1", "--dataset", "a"],
        ["world-model", "eval", "{recipe}", "/no/world", "seed=1", "--held-out", "a"],
        ["compare", "a", "b"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_an_output_that_cannot_be_written_is_said_before_any_work(arguments: list[str], recipe: Path) -> None:
    output = "/proc/nothing/can/be/made/here"
    result = run(*(a.format(recipe=recipe) for a in arguments), "--output", output)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: --output {output}: "), result.stderr
    assert "choose another --output" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("styles", "message"),
    [(["shifted"], "--style: got 'shifted', expected NAME=DATASET"), (["a=x", "a=y"], "--style: 'a' is given twice")],
)
def test_a_style_that_would_be_lost_is_refused(styles: list[str], message: str) -> None:
    options = [option for text in styles for option in ("--style", text)]
    result = run("world-model", "eval", "tabletop_style", "pretrained:tabletop", "--held-out", "a", *options)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {message}"), result.stderr


@pytest.mark.parametrize("command", ["train", "sft", "loop", "failure fit", "hub measure", "world-model fit"])
def test_a_run_is_resumed_by_its_folder_alone(command: str, tmp_path: Path) -> None:
    neither = run(*command.split())
    assert neither.exit_code == 2 and "name a RECIPE" in neither.stderr and "--resume --output FOLDER" in neither.stderr
    nothing = run(*command.split(), "--resume", "--output", str(tmp_path))
    assert nothing.exit_code == 2 and f"--resume: {tmp_path} holds no earlier run" in nothing.stderr


# ---------------------------------------------------------------- listings, configs, doctor


@pytest.mark.parametrize(("what", "section"), [("envs", "env"), ("policies", "policy"), ("algos", "algo")])
def test_list_names_every_kind(what: str, section: str) -> None:
    result = run("list", what)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS[section])
    assert all(len(line.split()) > 2 and "not usable" not in line for line in lines), result.output


def test_list_recipes_gives_each_its_description(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    monkeypatch.setattr("vla_rl.cli.about.recipes_folder", lambda: recipe.parent)
    assert run("list", "recipes").output == "tiny  For tests.\n"


def test_list_tasks_gives_instructions() -> None:
    from sim.tabletop import TabletopConfig

    result = run("list", "tasks")
    assert result.exit_code == 0
    for task, instruction in TabletopConfig().env_spec().tasks.items():
        assert f"{task} " in result.output and instruction in result.output


def test_list_tasks_of_a_recipe_gives_its_own(recipe: Path) -> None:
    result = run("list", "tasks", str(recipe), "env.tasks=[reach_red]")
    assert result.exit_code == 0 and result.output == "reach_red  move to the red square\n"
    shipped_one = run("list", "tasks", "tabletop_grpo")
    assert shipped_one.exit_code == 0 and shipped_one.output == run("list", "tasks").output


@pytest.mark.parametrize("size", [100, 4])
def test_inspect_of_a_truncated_file_is_an_error(size: int, tmp_path: Path) -> None:
    import shutil

    from vla_rl.policies.base import resolve_path

    folder = tmp_path / "policy"
    shutil.copytree(resolve_path("pretrained:tabletop_base"), folder)
    assert run("inspect", str(folder)).exit_code == 0
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    result = run("inspect", str(folder))
    assert result.exit_code == 2 and f"{weights}: truncated or not a safetensors file" in result.stderr


def test_config_show_prints_what_loads_again(recipe: Path, tmp_path: Path) -> None:
    shown = run("config", str(recipe), "train.iterations=3", "algo.kind=grpo", "algo.optim.lr=1e-5")
    assert shown.exit_code == 0, shown.stderr
    values = yaml.safe_load(shown.output)
    assert values["train"]["iterations"] == 3 and float(values["algo"]["optim"]["lr"]) == 1e-5
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(shown.output)
    assert run("config", str(resolved)).output == shown.output


def shipped() -> list[Path]:
    return sorted(recipes_folder().glob("*.yaml"))


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_says_what_it_is_for(path: Path) -> None:
    from vla_rl.recipe.recipe import load_recipe

    recipe = load_recipe(path.stem)
    assert recipe.description and recipe.name == path.stem


def test_the_schema_accepts_shipped_recipes_and_refuses_wrong_ones() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    result = run("config", "--schema")
    assert result.exit_code == 0, result.stderr
    schema = json.loads(result.output)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    good = {"run": "eval", "name": "x", "env": {"kind": "tabletop", "image_size": 64}, "policy": {"kind": "openvla"}}
    for values in (
        good,
        {**good, "run": "train", "algo": {"kind": "grpo", "optim": {"lr": 1e-5}}},
        {**good, "env": {"kind": "my_lab.robots:BenchConfig", "anything": 1}},
        {"base": "other.yaml", "env": {"image_size": 64}},
        *{values.get("run"): values for values in (yaml.safe_load(path.read_text()) for path in shipped())}.values(),
    ):
        validator.validate(values)
    for values in (
        {"run": "eval", "name": "x", "policy": {"kind": "openvla"}},
        {**good, "seeed": 1},
        {**good, "run": "trian"},
        {**good, "algo": {"kind": "grpo"}},
        {"base": "other.yaml", "sampeling": {}},
        {**good, "env": {"kind": "tabeltop"}},
        {**good, "env": {"kind": "tabletop", "image_sise": 64}},
        {**good, "env": {"kind": "tabletop", "image_size": "big"}},
    ):
        assert not validator.is_valid(values), values


def test_doctor_exits_with_1_when_the_recipe_needs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.workflows.doctor.find_gl", lambda: ("egl", "stand-in"))
    path = tmp_path / "r.yaml"
    path.write_text(f"run: eval\nenv: {{kind: libero, assets_path: {tmp_path}/nowhere}}\n")
    failing = run("doctor", str(path), "--json")
    assert failing.exit_code == 1 and json.loads(failing.output)["ok"] is False
    passing = run("doctor", str(path), "env.kind=tabletop", "--json")
    assert passing.exit_code == 0 and json.loads(passing.output)["ok"] is True
    shown = run("doctor", str(path), "env.kind=tabletop")
    assert shown.stdout.endswith(f"\nnext: vla-rl eval {path} env.kind=tabletop\n"), shown.stdout


def test_completion_is_installed_and_completes_commands_and_recipes(tmp_path: Path) -> None:
    """By typer, for bash, into a home folder of its own."""
    disabled = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"  # Then the shell is the one that the option names.
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash", disabled: "1"}
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'vla-rl'; from vla_rl.cli import main; main()"]
    done = subprocess.run(
        [*program, "--install-completion", "bash"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_VLA_RL_COMPLETE=complete_bash" in path.read_text() for path in written)
    for words, expected in (("vla-rl imp", "import"), ("vla-rl train tabletop_gr", "tabletop_grpo")):
        asked = {"_VLA_RL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        found = subprocess.run(program, env=environment | asked, capture_output=True, text=True, check=False)
        assert expected in found.stdout.split(), found.stderr
