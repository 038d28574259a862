"""`python -m vla_rl.workflows.gpu_bench`: the benchmark from a plain checkout, without the program's own packages."""

from vla_rl.workflows.gpu_bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
