"""`python -m vla_rl.cli`: what `python -m vla_rl` runs."""

from vla_rl.cli import main

if __name__ == "__main__":
    main()
