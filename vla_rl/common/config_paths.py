"""Sections put on one another, and where an option is that is at fault. Runs from Python 3.10 on."""

from __future__ import annotations

import math
import types as python_types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from vla_rl.common.config_errors import ConfigError

Section = Mapping[str, Any]


def on_top(base: Section, over: Section) -> dict[str, Any]:
    """`base` with `over` on top, section by section."""
    result = {**base, **over}
    for key, new in over.items():
        if isinstance(old := base.get(key), Mapping) and isinstance(new, Mapping):
            result[key] = on_top(old, new)
    return result


Carried = Callable[[str, Section, Section], Section]  # (full name, section, one over it) -> what the first keeps.


def remaining(base: Section, over: Section, carried: Carried, name: str = "") -> dict[str, Any]:
    """`base`, which is a recipe or the section of a name, without what its sections lose under those of `over`."""
    result = dict(base)
    for key, new in over.items():
        old, place = base.get(key), f"{name}.{key}" if name else key
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            result[key] = remaining(carried(place, old, new), new, carried, place)
    return result


def refuse_into_list(text: str, values: Section) -> None:
    """
    Raises:
        ConfigError: an override of something inside a list, which would replace all of it.
    """
    inner: Any = values
    *sections, _ = keys = text.partition("=")[0].split(".")
    for number, key in enumerate(sections, 1):
        inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, list | tuple):
            name = ".".join(keys[:number])
            raise ConfigError(
                f"override {text!r}: {name} is a list, of {len(inner)}, and is given whole: {name}='[...]'. "
                "Or change it in a recipe of your own (`base:` names the one that it extends)."
            )


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
