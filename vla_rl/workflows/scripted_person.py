"""Scripted person beside a policy: options and environment of the workflows that have one."""

from __future__ import annotations

from real_robot.operator.sim_interventions import OperatorOptions
from vla_rl.config import ConfigError, validate
from vla_rl.interfaces import EnvConfig
from vla_rl.recipe.rac_config import ScriptedPersonConfig


def operator_options(
    config: ScriptedPersonConfig, demonstrate: bool = False, budget: int | None = None
) -> OperatorOptions:
    """How the scripted person works; `budget`: interventions that it still gives."""
    return OperatorOptions(
        alarm=config.alarm,
        patience=config.patience,
        alarm_fraction=config.alarm_fraction,
        demonstrate=demonstrate,
        temperature=config.temperature,
        budget=budget,
    )


def longer(env: EnvConfig, horizons: dict[str, int], steps: int) -> EnvConfig:
    """The environment with horizons that leave the person `steps` control steps.

    Args:
        horizons: the environment's own, task -> control steps.

    Raises:
        ConfigError: it has no such option, or its simulator ends episodes before.
    """
    options, lengths = type(env).model_fields, set(horizons.values())
    if "horizons" in options:
        changes: dict[str, object] = {"horizons": {task: horizon + steps for task, horizon in horizons.items()}}
    elif "horizon" in options and len(lengths) == 1:
        changes = {"horizon": lengths.pop() + steps}
    else:
        raise ConfigError(f"env: {env.kind} has no option horizon or horizons, so there is no room for a person")
    try:
        return validate(type(env), env.model_dump() | changes, "env")
    except ConfigError as error:
        raise ConfigError(
            f"{error} The person has {steps} control steps beyond the policy's horizon; lower that, or operator_steps."
        ) from None
