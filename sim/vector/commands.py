"""What a vector runner asks of an environment, here or in a worker process."""

from __future__ import annotations

from typing import Any, Literal

from sim.single_env import SingleEnv

Command = Literal["reset", "step", "save_state", "expert_action", "expert_remaining", "drive_home"]

# Errors of a caller's, which are raised again in the caller's process.
CALLER_ERRORS = {error.__name__: error for error in (ValueError, NotImplementedError)}


def run_command(env: SingleEnv, command: Command, argument: Any) -> Any:
    """One command of `BaseVecEnv._call` in one environment."""
    match command:
        case "reset":
            env.succeeded_at, env.is_over = None, False
            return env.reset(argument)
        case "step":
            return env.run_chunk(argument)
        case "save_state":
            return env.save_state()
        case "expert_action":
            return env.expert_action()
        case "expert_remaining":
            return env.expert_remaining()
        case "drive_home":
            return env.drive_home()
