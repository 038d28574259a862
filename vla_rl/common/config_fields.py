"""Kinds of fields that several configs have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

TaskName = Annotated[str, Field(coerce_numbers_to_str=True)]  # Some simulators count their tasks: 0 is "0".


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("name each task once: its initial states would count several times")
    return value


TaskNames = Annotated[tuple[TaskName, ...], AfterValidator(_each_once)]  # Of what is run from each task's states.


def as_list(value: Any) -> Any:
    """Take one value for a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]
