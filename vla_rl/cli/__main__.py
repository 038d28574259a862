"""`python -m vla_rl.cli`: the `vla-rl` program, where it is not on the PATH (torchrun -m vla_rl.cli)."""

from vla_rl.cli import main

if __name__ == "__main__":
    main()
