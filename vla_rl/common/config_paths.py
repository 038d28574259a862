"""Where an option is that is at fault: its class, its full name. Imports nothing of ours, runs from Python 3.10 on."""

from __future__ import annotations

import math
import types as python_types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def owner_of(config_class: type[BaseModel], path: Sequence[str]) -> tuple[type[BaseModel], list[str]]:
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


def not_finite(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """(name, value) of each number that is infinite or NaN; what is free to hold anything, in a mapping, may be."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name, value
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, BaseModel):
        inner = iter(value)
    elif isinstance(value, tuple | list):
        inner = enumerate(value)
    elif isinstance(value, Mapping):
        inner = ((key, section) for key, section in value.items() if isinstance(section, BaseModel))
    for key, one in inner:
        yield from not_finite(one, f"{name}.{key}" if name else str(key))
