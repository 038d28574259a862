"""Command line of `vla-rl bench gpu`. Needs torch and numpy alone; each part says what it needs besides.

From a plain checkout: PYTHONPATH=. python -m vla_rl.workflows.gpu_bench --output runs/gpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vla_rl.workflows.gpu_bench.parts import PARTS
from vla_rl.workflows.gpu_bench.record import Results, ResultsError
from vla_rl.workflows.gpu_bench.run import MINUTES, DeviceError, find_device, open_results, run_inside, run_parts

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
