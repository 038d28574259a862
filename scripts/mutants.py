"""Plant small faults in the core and count those that the fast tests catch: whether the suite still has its teeth.

python scripts/mutants.py OUT.json [--commit HEAD] [--like BEFORE.json]   # stopped, it goes on where it was
python scripts/mutants.py --compare BEFORE.json AFTER.json                # exits with 1 if a fault is caught no more

A copy of the commit gets one fault at a time, on the disk, so that the programs that tests start have it too; its tests
run until the first fails. A fault has a key made of its own line and its function's name, not of the line's number, its
class or its file: as long as the line stands, the draw stays the same, and two commits are compared fault by fault. One
core, low priority.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutant_draw import draw

ROOT = Path(__file__).resolve().parent.parent
FAST = "not slow and not gpu and not network"
# Imported once, before the forks: most of a test file's start. Nothing of ours, and nothing that opens a device.
SHARED = "torch scipy.stats transformers peft timm cv2 pydantic typer pytest pytest_timeout hypothesis"
# Module -> the tests that are to catch its faults: files (test_NAME.py) that run it, those that end first in front.
TABLE = {
    "vla_rl/algorithms/losses.py": "losses stale learner",
    "vla_rl/algorithms/batch.py": "prepare sharding",
    "vla_rl/algorithms/ppo.py": "prepare advantages learner",
    "vla_rl/algorithms/learner.py": "waits prepare learner stale",
    "vla_rl/rollout/runner.py": "episode_runner rollout",
    "vla_rl/rollout/task_sampling.py": "task_sampling perturbed_training",
    "vla_rl/evaluation/statistics.py": "statistics",
    "vla_rl/evaluation/compare.py": "compare",
    "vla_rl/evaluation/sequential_compare.py": "sequential",
    "vla_rl/evaluation/probability.py": "calibration learned_reward",
    "vla_rl/config.py": "config",
    "vla_rl/common/run_folder.py": "run",
    "vla_rl/training/checkpoint.py": "checkpoint",
    "vla_rl/data/dataset.py": "data",
    "vla_rl/policies/normalization.py": "normalization",
    "vla_rl/policies/openvla/tokenizer.py": "action_tokens",
    "vla_rl/algorithms/offpolicy/replay.py": "replay",
    "world_model/trust/measures/metrics.py": "trust_figures",
    "world_model/trust/measures/outcomes.py": "trust_figures",
    "world_model/imagination/reward.py": "reward branches",
    "world_model/env/env.py": "env env_config",
    "world_model/model/dynamics.py": "dynamics",
    "sim/tabletop/env.py": "tabletop_practice tabletop_knock tabletop_take_over tabletop",
    "sim/tabletop/tasks.py": "tabletop_knock tabletop_practice tabletop_take_over tabletop",
    "sim/perturb.py": "perturb",
    "real_robot/control/limiter.py": "limiter supervisor plausibility safety_properties",
    "real_robot/control/supervisor.py": "checks supervisor wrench plausibility",
    "real_robot/control/chunk_executor.py": "chunk_executor",
    "real_robot/failure/conformal.py": "conformal",
    "real_robot/failure/float_ot.py": "float_ot",
    "real_robot/client_package/vla_rl_client/wire.py": "protocol",
    "real_robot/contract/contract.py": "contract",
    "real_robot/contract/channels.py": "contract messages codec",
    "real_robot/bridge/codec.py": "codec",
    "vla_rl/policies/openvla/policy.py": "openvla_policy",
    "vla_rl/evaluation/gate.py": "gate",
    "vla_rl/training/run.py": "run_steps train",
    "vla_rl/training/bc_trainer.py": "demonstrations sft",
    "sim/vector/pool.py": "vector",
    "vla_rl/workflows/plan/costs.py": "plan",
    "world_model/fit/fit.py": "fit",
    "world_model/fit/replay.py": "guard",
}


class Outcomes:
    """A plugin of pytest: how many tests passed, and which failed, files that could not be read included."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_pytest(copied: Path, scratch: Path, arguments: list[str], cpu_limit: float) -> None:
    """What a fork does: run pytest in silence, write the outcomes, end."""
    os.setsid()
    os.chdir(copied)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit), int(cpu_limit)))
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    os.environ |= {"TMPDIR": str(scratch), "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis")}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # A search through all packages that takes a third of the start.
    outcomes = Outcomes()
    options = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    options += ["--hypothesis-seed=0", f"--basetemp={scratch / 'pytest'}"]
    status = importlib.import_module("pytest").main([*options, *arguments], plugins=[outcomes])
    if status and not outcomes.failed:
        outcomes.failed.append(f"pytest ended with {status}")
    (scratch / "outcomes.json").write_text(json.dumps(vars(outcomes)))
    os._exit(0)


def outcomes_of(copied: Path, arguments: list[str], cpu_limit: float, wall_limit: float) -> dict[str, Any]:
    """The outcomes of pytest in a fork, with its seconds; a process that ended otherwise, or was too slow, failed."""
    scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
    start, pid = time.monotonic(), os.fork()
    if pid == 0:
        try:
            run_pytest(copied, scratch, arguments, cpu_limit)
        finally:
            os._exit(1)
    while (done := os.wait4(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.02)
        if time.monotonic() > start + wall_limit:
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # What a test has left behind.
    file = scratch / "outcomes.json"
    result = json.loads(file.read_text()) if file.exists() else {"passed": 0, "failed": [f"ended with {done[1]}"]}
    shutil.rmtree(scratch, ignore_errors=True)
    return result | {"cpu": round(done[2].ru_utime + done[2].ru_stime, 1), "wall": round(time.monotonic() - start, 1)}


def test_files(folder: Path) -> dict[str, Path]:
    """NAME -> tests/.../test_NAME.py; no two have the same name."""
    return {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("tests/**/test_*.py"))}


def try_module(module: str, copied: Path, known: dict[str, Any], wanted: set[str]) -> Iterator[dict[str, Any]]:
    """Run a module's tests as they are, then with each mutant not known yet; yields what is known after each run."""
    path = copied / module
    source = path.read_text(encoding="utf-8")
    marks = FAST if module.startswith("real_robot/") else f"{FAST} and not live"  # The robot's side is tested live.
    arguments = ["-m", marks, *(str(test_files(copied)[name]) for name in TABLE[module].split())]
    if not known:
        whole = outcomes_of(copied, arguments, 1200, 3600)
        if not whole["passed"] or any("::" not in name for name in whole["failed"]):
            print(f"{module} is left out: its tests do not run: {whole['failed'][:3]}", flush=True)
            return
        known = whole | {"failed": sorted(set(whole["failed"])), "mutants": []}
        yield known
    arguments += ["-x", *(f"--deselect={name}" for name in known["failed"])]
    tried = {mutant["key"] for mutant in known["mutants"]}
    for number, mutant in enumerate(draw(module, source, wanted), start=1):
        if mutant["key"] not in tried:
            path.write_text(mutant.pop("code"), encoding="utf-8")
            os.utime(path, (number, number))  # A time of its own: no compiled file of another mutant is taken.
            result = outcomes_of(copied, arguments, 2.5 * known["cpu"] + 5, 10 * known["wall"] + 60)
            known["mutants"].append(mutant | {"caught_by": result["failed"][:1], "cpu": result["cpu"]})
            yield known
    path.write_text(source, encoding="utf-8")


def run(out: Path, commit: str, wanted: set[str]) -> None:
    """Try all modules of TABLE; what is known stands in `out` after each run."""
    command = ["git", "rev-parse", "--short=12", commit]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    state = json.loads(out.read_text()) if out.exists() else {"commit": commit, "modules": {}}
    if state["commit"] != commit:
        raise SystemExit(f"{out} is of commit {state['commit']}, not of {commit}: name another file")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied = Path(folder)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        gone = [module for module in TABLE if not (copied / module).exists()]
        gone += sorted({name for tests in TABLE.values() for name in tests.split()} - set(test_files(copied)))
        if gone:
            raise SystemExit(f"{commit} has none of these; name in TABLE what took their place: {' '.join(gone)}")
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.environ |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
        sys.path[:] = [folder, *(place for place in sys.path if not (Path(place) / "vla_rl").is_dir())]
        for name in SHARED.split():
            importlib.import_module(name)
        for module in TABLE:
            for known in try_module(module, copied, state["modules"].get(module, {}), wanted):
                state["modules"][module] = known
                out.write_text(json.dumps(state, indent=1))
            if (known := state["modules"].get(module)) is None:
                continue
            rest = [
                f"{known['passed']} tests, {known['cpu']:.0f} s",
                *(f"left out: {name}" for name in known["failed"]),
            ]
            print(row(module, known["mutants"]), *rest, flush=True)


def row(name: str, *columns: list[dict[str, Any]]) -> str:
    return f"{name:44s}" + "".join(f"{sum(bool(m['caught_by']) for m in c):6d} of {len(c):3d}" for c in columns)


def compare(before: Path, after: Path) -> int:
    """Print what was caught of the mutants that both have; 1 if one that was caught is caught no more."""
    old, new = (
        {m["key"]: m | {"module": name} for name, known in modules.items() for m in known["mutants"]}
        for modules in (json.loads(file.read_text())["modules"] for file in (before, after))
    )
    both = [key for key in old if key in new]
    for module in sorted({new[key]["module"] for key in both}):
        keys = [key for key in both if new[key]["module"] == module]
        print(row(module, [old[key] for key in keys], [new[key] for key in keys]))
    print(row("of those that both have", [old[key] for key in both], [new[key] for key in both]))
    print(row("of each one's own", list(old.values()), list(new.values())))
    lost = [key for key in both if old[key]["caught_by"] and not new[key]["caught_by"]]
    for mutant in map(new.get, lost):
        print(f"lost: {mutant['module']}:{mutant['line']} {mutant['what']}; by {old[mutant['key']]['caught_by'][0]}")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--like", type=Path, help="take the mutants of this file where their lines still stand")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    if args.out is None:
        parser.error("name the file for the results")
    like = json.loads(args.like.read_text())["modules"].values() if args.like else []
    run(args.out, args.commit, {mutant["key"] for known in like for mutant in known["mutants"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
