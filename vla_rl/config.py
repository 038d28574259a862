"""Configs: frozen pydantic models read from YAML, components chosen by `kind`, overrides, errors for people.

A recipe is one YAML file. It may name a `base:` recipe, whose values it extends. `key=value` arguments override
(`algo.optim.lr=1e-5`). What a section builds is chosen by its `kind`: a name of `common/kinds.py`, or your own class,
"package.module:Class". It is imported when a recipe names it: this module imports no torch and no simulator.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import logging
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vla_rl.common.errors import ConfigError
from vla_rl.common.kinds import BASES, DEFAULT_KINDS, KINDS, OUR_PACKAGES, RUNS, SECTION_OF
from vla_rl.common.validation_errors import SectionError, explain

HIDDEN = (
    "{}: Python finds this as {!r}, in place of vla-rl's own package {}. Rename or move yours, or take {} off Python's "
    "path (PYTHONPATH, the script's folder, and with `python -m` the current one)."
)
log = logging.getLogger(__name__)
Section = Mapping[str, Any]


class Config(BaseModel):
    """Base of every config: frozen, no unknown keys, no number that is infinite or NaN.

    Attributes:
        shorthand: the option that is meant where a text stands in place of the section; empty: none.
        bound_to_kind: options that mean something to one kind alone: a section loses them where its `kind` changes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    shorthand: ClassVar[str] = ""
    bound_to_kind: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Read a shorthand. Of a section given in part, the other options are those of this class's default of it."""
        if not isinstance(values, Mapping):
            return {cls.shorthand: values} if cls.shorthand and isinstance(values, str) else values
        parts: dict[str, Any] = {}
        for name in values.keys() & cls.model_fields.keys():
            default, given = cls.model_fields[name].default, values[name]
            if isinstance(default, Config) and (isinstance(given, Mapping) or type(given) is type(default)):
                said = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
                parts[name] = {**default.model_dump(exclude_unset=True), **said}
        return {**values, **parts}


# Not `def validate[C]`: this module and the tabletop also run in a simulator's Python, from 3.10 on.
C = typing.TypeVar("C", bound=Config)
M = typing.TypeVar("M", bound=BaseModel)


# --- fields that several configs have ----------------------------------------------------------


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("name each task once: its initial states would count several times")
    return value


def as_list(value: object) -> object:
    """What is meant by one thing in place of a list of such; by null or an empty text, none."""
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


TaskName = Annotated[str, Field(coerce_numbers_to_str=True)]  # Some simulators count their tasks: 0 is "0".
TaskNames = Annotated[tuple[TaskName, ...], AfterValidator(_each_once)]  # Of what is run from each task's states.
Number = Annotated[  # null in JSON: NaN.
    float, AllowInfNan(True), BeforeValidator(lambda value: math.nan if value is None else value)
]


# --- sections whose class depends on their `kind` ----------------------------------------------


def resolve_kind(section: str, kind: str, name: str = "") -> type[Config]:
    """The config class for a `kind` of a section, or of a recipe by its `run`: a known name or "package.module:Class".

    A ConfigError, which calls the section by its `name`: unknown, or no class here that extends the section's base.
    """
    check_packages()
    is_run, place = section == "run", name or section
    known, base = (RUNS, RUNS["eval"]) if is_run else (KINDS[section], BASES[section])
    field, what = ("run", "kind of run") if is_run else (f"{place}.kind", f"{section} section")
    if not isinstance(kind, str) or (kind not in known and ":" not in kind):
        names, hint = ", ".join(known if is_run else sorted(known)), _nearest(str(kind), known)
        raise SectionError(place, f"{field}: got {kind!r}, allowed: {names}, or 'package.module:Class'.{hint}")
    target = known.get(kind, kind)
    try:
        found = resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise SectionError(place, f"{field}: {kind!r} names {target!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, resolve_name(base))):
        needed = f"it must be a class that extends {base.replace(':', '.')}"
        raise SectionError(place, f"{field}: {target!r} is no {what}; {needed}")
    return found


def check_packages() -> None:
    """Refuse a user's own `sim.py`, or a folder of such a name, that Python finds in place of the package beside us."""
    ours = Path(__file__).resolve().parents[1]
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
        found = next((path for path in map(Path, places) if path.exists()), None)
        if found is not None and (ours / name) not in (found.resolve(), *found.resolve().parents):
            raise ConfigError(HIDDEN.format(found, name, ours / name, found.parent))


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def component(section: str) -> Any:
    """Mark a field as a section whose class depends on its `kind`; None stays None."""
    return BeforeValidator(lambda values: None if values is None else build_component(section, values))


def build_component(section: str, values: Section | Config) -> Any:
    """Validate a section whose class depends on its `kind`; returns a config that extends the section's base."""
    if isinstance(values, resolve_name(BASES[section])):
        return values
    if isinstance(values, Mapping) and section in DEFAULT_KINDS:
        values = {"kind": DEFAULT_KINDS[section], **values}
    if not isinstance(values, Mapping) or "kind" not in values:
        raise _no_section(section, values)
    return validate(resolve_kind(section, values["kind"]), dict(values), prefix=section)


def _no_section(section: str, values: Any) -> SectionError:
    if isinstance(values, Config):
        needed = f"it must be a config that extends {BASES[section].replace(':', '.')}"
        return SectionError(section, f"{section}: got {type(values).__name__}; {needed}")
    hint = f". Write it as a section: {{kind: {values}}}" if isinstance(values, str) else ""
    kinds = ", ".join(sorted(KINDS[section]))
    return SectionError(section, f"{section}: needs a 'kind', one of: {kinds}; got {values!r}{hint}")


# --- validation, with errors for people --------------------------------------------------------


def validate(config_class: type[C], values: dict[str, Any], prefix: str = "") -> C:  # noqa: UP047
    """`config_class(**values)`; a ConfigError says the full name of what is wrong, what it got and what it allows."""
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise SectionError(prefix, explain(config_class, error, prefix)) from None


def read_written(kind: type[M], file: Path, fix: str) -> M:  # noqa: UP047
    """Read what a program wrote into a JSON file; `fix`: what to do with one of other fields.

    Raises:
        ConfigError: it is damaged, or of a version that says other things.
    """
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        what = ".".join(map(str, found["loc"])) or "the file"
        raise ConfigError(f"{file}: {what}: {found['msg']}. {fix}") from None


# --- YAML files and overrides ------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-5 as a number (YAML 1.1: a string) and refuses a key given twice (YAML: the last)."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for i, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:i]):
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
        return node


class Dumper(yaml.SafeDumper):
    """`Loader`'s counterpart: quotes strings that it would read as numbers."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe file's mapping, with its `base:` chain merged in; `above` are the files whose base this one is.

    A ConfigError: file missing, not YAML, not a mapping, or a base that leads back to itself.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise _not_found(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    base = values.pop("base", None)
    return values if base is None else _extended(path, base, values, above)


def _extended(path: Path, base: Any, values: dict[str, Any], above: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file over those of its base; of one that is for another kind of run, its shared sections."""
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: expected the path or name of a recipe, got {base!r}")
    beside = path.parent / base
    file = (beside if beside.is_file() else find_recipe(base, f"{path}: base: ")).resolve()
    if file in (*above, path):
        raise ConfigError(f"base: {file} is its own base ({' -> '.join(p.name for p in (*above, path, file))})")
    below = read_yaml(file, (*above, path))
    run = values.get("run", below.get("run"))
    if run is not None and run != below.get("run"):
        below = {name: below[name] for name in below if name in resolve_kind("run", str(run)).model_fields}
    level = logging.DEBUG if path.parent == recipes_folder() else logging.WARNING  # What ships has been looked at.
    return merge(below, values, level)


def merge(base: Section, over: Section, level: int = logging.WARNING) -> dict[str, Any]:
    """`base` with `over` on top, section by section.

    A section whose `kind` changes keeps the options that both kinds share. A line of this level says what else it had.
    """
    return functools.reduce(_with_option, (([key], value) for key, value in over.items()), _kept(base, over, level))


def _kept(base: Section, over: Section, level: int, name: str = "") -> dict[str, Any]:
    """`base`, a recipe or the section of a name, without the options that it loses where `over` changes a `kind`."""
    section = SECTION_OF.get(name, name)
    was = base.get("kind", DEFAULT_KINDS.get(section))
    is_other = section in KINDS and was not in (None, over.get("kind", was))
    result = _shared_options(base, over, level, section, name) if is_other else dict(base)
    for key, new in over.items():
        if isinstance(old := result.get(key), Mapping) and isinstance(new, Mapping):
            result[key] = _kept(old, new, level, f"{name}.{key}" if name else key)
    return result


def _shared_options(base: Section, over: Section, level: int, section: str, name: str) -> dict[str, Any]:
    """Of a section whose kind changes, what both kinds have from a base of both, not what only shares a name.

    Options that are `bound_to_kind` are among them only where one class extends the other.
    """
    was, kind = base.get("kind", DEFAULT_KINDS.get(section)), over["kind"]
    a, b = resolve_kind(section, was, name), resolve_kind(section, kind, name)
    bound = set() if issubclass(a, b) or issubclass(b, a) else set(a.bound_to_kind)
    common = [one for one in a.__mro__ if issubclass(one, BaseModel) and issubclass(b, one)]
    shared = {option for one in common for option in one.model_fields if option not in bound}
    if lost := sorted(base.keys() - shared - over.keys()):
        log.log(level, f"{name}.kind: {was!r} became {kind!r}, so what was said of {', '.join(lost)} is left out")
    return {key: value for key, value in base.items() if key in shared}


def parse_override(text: str) -> tuple[list[str], Any]:
    """Read `"train.groups=8"` as `["train", "groups"], 8`, `"algo=ppo"` as `["algo"], {"kind": "ppo"}`, else raise."""
    key, equals, raw = text.partition("=")
    if not equals or not all(keys := key.split(".")):
        raise ConfigError(f"override {text!r}: expected key=value, for example algo.optim.lr=1e-5")
    try:
        value = yaml.load(raw, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {error}") from None
    return keys, {"kind": value} if key in (*KINDS, *SECTION_OF) and isinstance(value, str) else value


def apply_overrides(values: Section, overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with each `key=value` on top, in order; none is lost by a section's `kind` that follows it."""
    overs = [parse_override(text) for text in overrides]
    asked = functools.reduce(_with_option, overs, {})
    return functools.reduce(_with_option, overs, _kept(values, asked, logging.WARNING))


def _with_option(values: Section, over: tuple[Sequence[str], Any], above: str = "") -> dict[str, Any]:
    """`values` with an option, by its keys from the outermost on; where it is a section, on top of the one there."""
    (key, *inner), value = over
    name, old = f"{above}{key}", values.get(key)
    if inner and isinstance(old, list | tuple):
        raise _given_whole(name, old)
    if inner:
        value = _with_option(old if isinstance(old, Mapping) else {}, (inner, value), f"{name}.")
    elif isinstance(value, Mapping) and isinstance(old, Mapping):
        value = functools.reduce(_with_option, (([key], one) for key, one in value.items()), old)
    return {**values, key: value}


def _given_whole(name: str, found: Sequence[Any]) -> ConfigError:
    return ConfigError(
        f"override of something in {name}: {name} is a list, of {len(found)}, and is given whole: {name}='[...]'. "
        "Or change it in a recipe of your own (`base:` names the one that it extends)."
    )


def find_recipe(name: str | Path, asked_by: str = "") -> Path:
    """A recipe by path, or by the name of one that ships with the package (with or without .yaml)."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = recipes_folder() / (path.name if path.suffix else f"{path.name}.yaml")
    if shipped.is_file() and path.parent == Path("."):
        return shipped
    raise _not_found(path, asked_by)


def _not_found(path: Path, asked_by: str = "") -> ConfigError:
    hint = _nearest(path.stem, (p.stem for p in recipes_folder().glob("*.yaml")))
    listed = "`vla-rl list recipes` shows those that ship with the package."
    return ConfigError(f"{asked_by}recipe not found: {path}.{hint} {listed}")


def recipes_folder() -> Path:
    """Where the shipped recipes live: inside the installed package, or in `configs/` of a clone."""
    installed = Path(__file__).resolve().parent / "configs"
    return installed if installed.is_dir() else installed.parents[1] / "configs"


def dump_yaml(config: Config) -> str:
    """A resolved config as YAML that loads again to the same config."""
    values = config.model_dump(mode="json")
    text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in "\x85\u2028\u2029"):  # Line breaks to YAML: written as escapes.
        text = yaml.dump(values, Dumper=Dumper, sort_keys=False)
    return text
