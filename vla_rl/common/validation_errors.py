"""Errors of validation for people: the field's full name, what it got, what it allows, and the nearest name.

Pydantic's errors name a class; these name the option as a recipe's author writes it.
"""

from __future__ import annotations

import difflib
import re
import types as python_types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from vla_rl.common.errors import ConfigError

_A_LIST = "A list is needed, such as [a, b]"
_PLAIN = {"tuple_type": _A_LIST, "list_type": _A_LIST, "model_type": "A section is needed, such as {key: value}"}


class SectionError(ConfigError):
    """What is wrong with a section, each line beginning with `section`, its name where its class was found."""

    def __init__(self, section: str, message: str) -> None:
        super().__init__(message)
        self.section = section

    def at(self, name: str) -> str:
        """The message where the section has another name, as `env` has under `real_env`."""
        return re.sub(rf"^{re.escape(self.section)}(?=[.:])", lambda _: name, str(self), flags=re.MULTILINE)


def explain(config_class: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """A line for each fault of values that are no `config_class`, the section of the name `prefix`."""
    return "\n".join(_explain(config_class, fault, prefix) for fault in _faults(error))


def _faults(error: ValidationError) -> list[Any]:
    """Pydantic's errors, without those that only follow from another."""
    faults = error.errors()
    above = {e["loc"][:n] for e in faults for n in range(len(e["loc"]))}  # A list of wrong items only looks empty.
    faults = [e for e in faults if e["type"] != "too_short" or e["loc"] not in above]
    # A default that depends on other fields, one of which is at fault, is no fault of its own.
    return [e for e in faults if e["type"] != "default_factory_not_called"]


def _explain(config_class: type[BaseModel], error: Any, prefix: str) -> str:
    path = [str(p) for p in error["loc"]]
    owner, shown = _owner_of(config_class, path)
    name = ".".join([prefix, *shown]) if prefix else ".".join(shown)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.at(name) if isinstance(cause, SectionError) else str(cause)
    if error["type"] == "extra_forbidden":
        own = owner.model_fields
        known, above = {key: [key] for key in own}, name.removesuffix(path[-1])
        for place, key in _below(owner):
            if key not in own:
                known.setdefault(key, []).append(f"{above}{place}")
        nearest = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = "".join(f" Did you mean {' or '.join(map(repr, known[key][:2]))}?" for key in nearest)
        return f"{name}: unknown key (value {error['input']!r}).{hint} Allowed: {', '.join(sorted(own))}."
    if error["type"] == "missing":
        return f"{name}: required, but not given."
    reason = f"{cause or _PLAIN.get(error['type'], error['msg'])}".rstrip(".") + "."
    if cause is not None and isinstance(error["input"], Mapping | BaseModel):
        return f"{name}: {reason}"  # A fault of several fields together, which the reason names.
    return f"{name}: got {error['input']!r}. {reason}"


def _below(config_class: type[BaseModel], above: str = "") -> Iterator[tuple[str, str]]:
    """(place, key) of each option in the sections of a class, and in theirs."""
    for name, info in config_class.model_fields.items():
        if (section := _model_in(info.annotation)) is not None:
            yield from ((f"{above}{name}.{key}", key) for key in section.model_fields)
            yield from _below(section, f"{above}{name}.")


def _owner_of(config_class: type[BaseModel], path: Sequence[str]) -> tuple[type[BaseModel], list[str]]:
    """The model class that holds the last key of a path, and the path without the tags of discriminated unions."""
    owner: type[BaseModel] = config_class
    inner: type[BaseModel] | None = config_class
    members: Mapping[str, type[BaseModel]] = {}
    shown = []
    for key in path:
        if key in members:
            inner, members = members[key], {}
            continue
        shown.append(key)
        if key.isdigit() or inner is None:  # A place in a list of models, which `_model_in` has looked through.
            continue
        owner = inner
        info = owner.model_fields.get(key)
        inner = _model_in(info.annotation) if info else None
        members = _by_tag(info.annotation, info.discriminator) if info and isinstance(info.discriminator, str) else {}
    return owner, shown


def _by_tag(union: Any, discriminator: str) -> dict[str, type[BaseModel]]:
    """The models of a discriminated union, by the tag that pydantic puts into an error's place."""
    models = [m for m in typing.get_args(union) if isinstance(m, type) and issubclass(m, BaseModel)]
    return {str(tag): m for m in models for tag in typing.get_args(m.model_fields[discriminator].annotation)}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, python_types.UnionType, typing.Annotated, tuple, list):
        for inner in typing.get_args(annotation):
            if (found := _model_in(inner)) is not None:
                return found
    return None
