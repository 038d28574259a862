"""Command line of `vla-rl bench gpu`, and its parts run one after the other, each in a process of its own.

From a plain checkout: PYTHONPATH=. python -m vla_rl.workflows.gpu_bench --output runs/gpu
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.workflows.gpu_bench.parts import FIRST, PARTS, Part
from vla_rl.workflows.gpu_bench.record import PartRecord, Results, ResultsError

if TYPE_CHECKING:
    from vla_rl.workflows.gpu_bench.sheet import Size

MODULE = "vla_rl.workflows.gpu_bench"
MINUTES = 51.0
GRACE = 45.0  # Seconds beyond a part's time, in which it may end what it is at.
# What is deterministic in cuBLAS only if set before the first call; the parts compare runs with each other.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}


class DeviceError(ValueError):
    """The device that was asked for is not there; the message says what to do."""


def find_device(name: str, size: Size) -> str:
    """The device to measure: `auto` is the CUDA device.

    Raises:
        DeviceError: there is none, or it is none that can be measured at this size.
    """
    import torch

    name = "cuda" if name == "auto" else name
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise DeviceError(f"--device: got {name!r}, allowed: auto, cuda, cuda:N, and cpu with --size tiny")
    if device.type == "cpu" and size != "tiny":
        raise DeviceError(
            f"--device {name}: at full size a CPU would need hours and 30 GB; to try the benchmark's own logic there, "
            "add --size tiny"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        raise DeviceError(
            f"--device {name}: torch {torch.__version__} (built for {built}) sees no CUDA device. Look at nvidia-smi; "
            "to try the benchmark's own logic without one: --device cpu --size tiny"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise DeviceError(f"--device {name}: the GPUs here are cuda:0 to cuda:{last}; name one of them")
    return name


def machine_facts(device: str) -> dict[str, Any]:
    """What was measured: device, versions, cores."""
    import numpy
    import torch

    facts: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if device.partition(":")[0] == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 1024**3, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def open_results(folder: Path, size: Size, device: str, resume: bool) -> Results:
    """New results, or with `resume` those that are there.

    Raises:
        ResultsError: there are some without `resume`, or they are of another machine or size.
    """
    machine = machine_facts(device)
    fresh = Results(folder, size, machine)
    if not fresh.file.exists():
        return fresh
    if not resume:
        raise ResultsError(f"{fresh.file}: is there already; go on with --resume, or give another folder with --output")
    found = Results.load(folder)
    for name, ours, theirs in (("machine", machine, found.machine), ("size", size, found.size)):
        if ours != theirs:
            raise ResultsError(
                f"{fresh.file}: {name} was {theirs}, here it is {ours}; give another folder with --output"
            )
    return found


def run_parts(
    results: Results, names: Sequence[str], device: str, *, minutes: float = MINUTES, in_process: bool = False
) -> Results:
    """Measure the parts that are not done; the results are in their file after each figure.

    Args:
        names: of the parts; the first one of all is added, because the others measure against it.
        minutes: for all parts together; each has its own limit besides.
        in_process: run the parts here, without a hard limit of time.
    """
    ends = time.monotonic() + 60 * minutes
    for part in (PARTS[name] for name in PARTS if name in names or name == FIRST):
        before = results.parts.get(part.name)
        if before is not None and before.state == "done":
            continue
        print(f"{part.name}: {part.what}", flush=True)
        seconds = min(60 * part.minutes, ends - time.monotonic())
        if problem := _cannot_run(part, seconds):
            results.parts[part.name] = PartRecord(state="left out", left_out=[problem])
            print(f"  left out: {problem}", flush=True)
            results.save()
            continue
        _forget_failures(results, part.name)
        if in_process:
            run_inside(results, part.name, device, seconds)
        else:
            results = _run_child(results, part.name, device, seconds)
    return results


def _cannot_run(part: Part, seconds: float) -> str:
    if part.missing:
        return f"needs {', '.join(part.missing)}, which this Python lacks"
    return "no time left" if seconds <= 0 else ""


def _forget_failures(results: Results, name: str) -> None:
    """What is measured again is not to be found twice."""
    if (before := results.parts.get(name)) is not None:
        done = [] if before.errors or before.state == "died" else before.finished
        kept = before if done else PartRecord()
        results.parts[name] = PartRecord(rows=kept.rows, finished=done, facts=kept.facts, seconds=kept.seconds)


def run_inside(results: Results, name: str, device: str, seconds: float) -> None:
    """Measure one part in this process."""
    import torch

    from vla_rl.workflows.gpu_bench.sheet import Sheet

    sheet = Sheet(results, name, torch.device(device), seconds)
    importlib.import_module(PARTS[name].module).measure(sheet)
    for pending in sheet.record.pending:
        sheet.leave_out(f"{pending}: no time left")


def _run_child(results: Results, name: str, device: str, seconds: float) -> Results:
    """Measure one part in a process of its own; returns the results with what it wrote."""
    results.parts.setdefault(name, PartRecord())
    results.save()
    command = [sys.executable, "-m", MODULE, "--inside", name, "--output", str(results.folder)]
    command += ["--device", device, "--seconds", f"{seconds:.0f}"]
    started = time.monotonic()
    code, is_over_time = 0, False
    with subprocess.Popen(command, env=os.environ | _ENVIRONMENT) as child:
        try:
            code = child.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            is_over_time = True
        except BaseException:
            child.kill()
            raise
    found = Results.load(results.folder)
    record = found.parts[name]
    if record.state == "running":
        record.seconds = time.monotonic() - started
        left = [text for text in (record.under_way, *record.pending) if text]
        record.left_out += [
            f"{text}: no time left" if is_over_time else f"{text}: not reached" for text in dict.fromkeys(left)
        ]
        record.state = "out of time" if is_over_time else "died"
        if not is_over_time:
            record.errors.append(f"{record.under_way or 'start'}: the part's process ended with exit code {code}")
        found.save()
    return found


OUTPUT = Path("runs/bench_gpu")
EXIT_WRONG, EXIT_USER_ERROR = 1, 2
MINIMUM = ("torch", "numpy")


def parser() -> argparse.ArgumentParser:
    """The options."""
    parts = "\n".join(f"  {part.name:<12} {part.what}; {part.minutes:g} min" for part in PARTS.values())
    made = argparse.ArgumentParser(
        prog="vla-rl bench gpu",
        description="Check what a GPU computes against the CPU, then measure it: acting, learning, imagining, memory.",
        epilog=f"parts, each with the time that it may take:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--part", action="append", choices=PARTS, metavar="PART", help="this part alone; may be repeated")
    made.add_argument("--output", type=Path, default=OUTPUT, help=f"folder of results.json and report.html ({OUTPUT})")
    made.add_argument(
        "--device", default="auto", help="cuda, cuda:N, or with --size tiny cpu, to try the logic (auto: cuda)"
    )
    made.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: sizes that try the logic (full)")
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"for all parts together ({MINUTES:g})")
    made.add_argument("--resume", action="store_true", help="go on with the results in --output: what is done is kept")
    made.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)  # A part's own process.
    made.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0; 1 where something was wrong or failed; 2 where it cannot start."""
    options = parser().parse_args(argv)
    if missing := [name for name in MINIMUM if find_spec(name) is None]:
        print(f"error: needs at least {' and '.join(MINIMUM)}; this Python lacks {', '.join(missing)}", file=sys.stderr)
        return EXIT_USER_ERROR
    if options.inside:
        run_inside(Results.load(options.output), options.inside, options.device, options.seconds)
        return 0
    if options.minutes <= 0:
        print(f"error: --minutes: got {options.minutes:g}, must be above 0", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        device = find_device(options.device, options.size)
        results = open_results(options.output, options.size, device, options.resume)
    except (DeviceError, ResultsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    results = run_parts(results, options.part or list(PARTS), device, minutes=options.minutes)
    return finish(results)


def finish(results: Results) -> int:
    """Write the page, say in short what was found, and return the exit status."""
    from vla_rl.workflows.gpu_bench.sheet import summary, write_page

    page = write_page(results)
    print(summary(results))
    print(f"results: {results.file}\npage: {page}")
    return 0 if results.is_good else EXIT_WRONG
