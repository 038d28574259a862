"""`python -m vla_rl`: the `vla-rl` program of this Python, where it is not on the PATH (torchrun -m vla_rl)."""

from vla_rl.cli import main

if __name__ == "__main__":
    main()
