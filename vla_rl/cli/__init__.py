"""The command line, a file for each group of commands."""

from vla_rl.cli.app import main

__all__ = ["main"]
