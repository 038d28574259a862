"""Fields that several configs have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

TaskName = Annotated[str, Field(coerce_numbers_to_str=True)]  # Some simulators count their tasks: 0 is "0".


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("name each task once: its initial states would count several times")
    return value


TaskNames = Annotated[tuple[TaskName, ...], AfterValidator(_each_once)]  # Of what is run from each task's states.


def as_list(value: Any) -> Any:
    """Take one value for a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def shared_fields(a: Any, b: Any) -> set[str]:
    """Return the options that two config classes have from a base of both, not those that only share a name.

    Those that are `bound_to_kind` are among them only where one class extends the other.
    """
    bound = set() if issubclass(a, b) or issubclass(b, a) else set(a.bound_to_kind)
    bases = [base for base in a.__mro__ if issubclass(base, BaseModel) and issubclass(b, base)]
    return {name for base in bases for name in base.model_fields if name not in bound}
