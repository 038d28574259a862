"""Recipes: overrides, bases, kinds, and the messages people get when one is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field, PositiveInt, SerializeAsAny, model_validator

from vla_rl.config import (
    BASES,
    KINDS,
    Config,
    ConfigError,
    apply_overrides,
    build_component,
    dump_yaml,
    find_recipe,
    merge,
    parse_override,
    read_yaml,
    resolve_kind,
    validate,
)
from vla_rl.interfaces import EnvConfig
from vla_rl.recipe.recipe import load_recipe


class Inner(Config):
    """A nested section."""

    learning_rate: float = Field(1e-4, gt=0)
    mode: Literal["fast", "exact"] = "fast"


class MyEnv(EnvConfig):
    """A user's own environment config."""

    kind: str = f"{__name__}:MyEnv"
    num_envs: PositiveInt = 4


def _env(values: object) -> Config:
    return build_component("env", values)  # type: ignore[arg-type]


class Serial(Config):
    """One member of a union."""

    kind: Literal["serial"] = "serial"
    baud: PositiveInt = 9600


class Network(Config):
    """Another."""

    kind: Literal["network"] = "network"
    port: PositiveInt = 80

    @model_validator(mode="after")
    def _not_both(self) -> Network:
        if self.port == 81:
            raise ValueError("port: 81 is taken.")
        return self


class Outer(Config):
    """A small recipe."""

    link: Serial | Network = Field(default=Serial(), discriminator="kind")

    name: str
    steps: PositiveInt = 3
    inner: Inner = Inner()
    maybe: Inner | None = None
    sizes: tuple[int, ...] = ()
    env: Annotated[SerializeAsAny[Config] | None, BeforeValidator(lambda v: None if v is None else _env(v))] = None


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stepz=5", ["stepz: unknown key", "(value 5)", "Did you mean 'steps'?", "Allowed: env, inner, link, maybe"]),
        ("link={kind: network, prot: 1}", ["link.prot: unknown key", "Did you mean 'port'?", "Allowed: kind, port."]),
        ("link={kind: network, port: 0}", ["link.port: got 0. Input should be greater than 0."]),
        ("link={kind: network, port: 81}", ["link: port: 81 is taken."]),
        ("inner.learning_rte=0.1", ["inner.learning_rte: unknown key", "Did you mean 'learning_rate'?", "mode"]),
        ("maybe.moode=fast", ["maybe.moode: unknown key", "'fast'", "Did you mean 'mode'?"]),
        ("steps=many", ["steps: got 'many'", "valid integer"]),
        ("steps=2.5", ["steps: got 2.5", "integer"]),
        ("steps=0", ["steps: got 0", "greater than 0"]),
        ("inner.learning_rate=-1e-5", ["inner.learning_rate: got -1e-05", "greater than 0"]),
        ("inner.learning_rate=.inf", ["inner.learning_rate: got inf", "finite number"]),
        ("inner.learning_rate=.nan", ["inner.learning_rate: got nan", "Input should be"]),
        ("inner.mode=slow", ["inner.mode: got 'slow'", "'fast' or 'exact'"]),
        ("sizes=one", ["sizes: got 'one'. A list is needed, such as [a, b]."]),
        ("inner=5", ["inner: got 5. A section is needed, such as {key: value}."]),
        ("sizes=[1,two]", ["sizes.1: got 'two'", "valid integer"]),
        ("env={num_envs: 2}", ["env: needs a 'kind'", "tabletop", "got {'num_envs': 2}"]),
        ("env={kind: tabletopp}", ["env.kind: got 'tabletopp'", "tabletop", "Did you mean 'tabletop'?"]),
        (f"env={{kind: '{__name__}:MyEnv', num_envs: 0}}", ["env.num_envs: got 0", "greater than 0"]),
        (f"env={{kind: '{__name__}:MyEnv', num_env: 1}}", ["env.num_env: unknown key", "Did you mean 'num_envs'?"]),
        ("env={kind: 'no.such.module:Thing'}", ["env.kind: 'no.such.module:Thing'", "cannot be imported"]),
        (f"env={{kind: '{__name__}:Nothing'}}", ["env.kind", "cannot be imported", "Nothing"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override: str, parts: list[str]) -> None:
    values = apply_overrides({"name": "x"}, [override])
    with pytest.raises(ConfigError) as caught:
        validate(Outer, values)
    for part in parts:
        assert part in str(caught.value)
    assert ".." not in str(caught.value) and "Value error" not in str(caught.value)


def test_a_missing_value_and_several_faults_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Outer, {"steps": -1, "inner": {"mode": "x"}})
    message = str(caught.value)
    assert "name: required" in message and "steps: got -1" in message and "inner.mode: got 'x'" in message


def test_a_list_of_wrong_items_is_not_called_empty_too() -> None:
    class Listed(Config):
        sizes: Annotated[tuple[int, ...], Field(min_length=1)]

    with pytest.raises(ConfigError, match=r"^sizes\.0: got 'a'\. Input should be a valid integer[^\n]*$"):
        validate(Listed, {"sizes": ["a"]})
    with pytest.raises(ConfigError, match=r"^sizes: got \[\]\. .*at least 1"):
        validate(Listed, {"sizes": []})


def test_a_default_that_depends_on_a_wrong_value_is_not_named_too() -> None:
    with pytest.raises(ConfigError, match=r"^collect\.episodes_per_task: got 0\. [^\n]*$"):
        load_recipe("libero_object_bc", ["collect.episodes_per_task=0"])


def test_a_section_that_is_not_a_mapping_is_named() -> None:
    with pytest.raises(ConfigError, match=r"inner: got 'text'"):
        validate(Outer, {"name": "x", "inner": "text"})


def test_a_kind_in_place_of_its_section_is_answered_with_the_section() -> None:
    values: Any = "grpo"
    with pytest.raises(ConfigError, match=r"got 'grpo'\. Write it as a section: \{kind: grpo\}$"):
        build_component("algo", values)


def test_a_class_that_is_no_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.kind.*pathlib:Path.*Config"):
        build_component("env", {"kind": "pathlib:Path"})


@pytest.mark.parametrize("section", sorted(KINDS))
def test_a_section_takes_only_classes_that_extend_its_base(section: str) -> None:
    base = BASES[section].replace(":", ".")
    with pytest.raises(ConfigError) as error:
        resolve_kind(section, f"{__name__}:Inner")
    assert f"{section}.kind: '{__name__}:Inner' is no {section} section" in str(error.value)
    assert f"must be a class that extends {base}" in str(error.value)
    with pytest.raises(ConfigError, match=f"^{section}: got Inner; it must be a config that extends {base}$"):
        build_component(section, Inner())


def test_a_kind_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.kind: got 3"):
        build_component("env", {"kind": 3})


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Inner().mode = "exact"  # type: ignore[misc]


# ---------------------------------------------------------------- files and bases


def test_base_chain_extends_section_by_section(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "name: a\nsteps: 1\ninner: {learning_rate: 0.5, mode: exact}\n")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "b.yaml", "base: ../a.yaml\nname: b\ninner: {learning_rate: 0.25}\n")
    path = write(tmp_path, "c.yaml", "base: sub/b.yaml\nsteps: 7\n")
    assert read_yaml(path) == {"name": "b", "steps": 7, "inner": {"learning_rate": 0.25, "mode": "exact"}}


def test_a_cycle_of_bases_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "base: b.yaml\n")
    path = write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(ConfigError, match=r"is its own base \(b\.yaml -> a\.yaml -> b\.yaml\)"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "a recipe is a mapping of sections, got list"),
        ("a: [1, 2\n", "not valid YAML"),
        ("base: nowhere.yaml\n", r"r\.yaml: base: recipe not found: .*nowhere\.yaml"),
        ("base: 3\n", r"base: .*3"),
        ("train:\n  lr: 1\n  steps: 2\n  lr: 3\n", r"(?s)r\.yaml: not valid YAML: 'lr' is given twice.*line 4"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "r.yaml", text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match=r"r\.yaml: not"):
        read_yaml(path)


def test_a_key_may_stand_again_over_one_that_yaml_merges_in(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 4}}


def test_an_empty_file_is_an_empty_recipe(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "r.yaml", "")) == {}


def test_a_base_may_also_be_a_shipped_recipe_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write(shipped, "first.yaml", "name: first\nsteps: 9\n")
    monkeypatch.setattr("vla_rl.config.recipes_folder", lambda: shipped)
    path = write(tmp_path, "mine.yaml", "base: first\nname: mine\n")
    assert read_yaml(path) == {"name": "mine", "steps": 9}


def test_find_recipe_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = write(tmp_path, "first.yaml", "name: first\n")
    monkeypatch.setattr("vla_rl.config.recipes_folder", lambda: tmp_path)
    assert find_recipe("first") == find_recipe("first.yaml") == find_recipe(shipped) == shipped
    with pytest.raises(ConfigError, match=r"recipe not found: firts\. Did you mean 'first'\?"):
        find_recipe("firts")


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1e-5", 1e-5),
        ("a=1E5", 1e5),
        ("a=-2.5e-3", -2.5e-3),
        ("a=1.0", 1.0),
        ("a=3", 3),
        ("a=true", True),
        ("a=null", None),
        ("a=", None),
        ("a=text", "text"),
        ("a='1e-5'", "1e-5"),
        ("a=x=y", "x=y"),
        ("a=[1, 2]", [1, 2]),
        ("a=[1e-4, 1e-5]", [1e-4, 1e-5]),
        ("a={b: 2}", {"b": 2}),
        ("a={b: 1e-3}", {"b": 1e-3}),
        ("a=nan-task", "nan-task"),
        ("a=nan", "nan"),
        ("a=infinity", "infinity"),
        ("a=1_000", 1000),
    ],
)
def test_override_values_are_yaml_with_plain_floats(text: str, value: object) -> None:
    keys, found = parse_override(text)
    assert keys == ["a"] and found == value and type(found) is type(value)


def test_floats_of_a_file_are_read_like_those_of_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", "lr: 1e-5\nname: '1e-5'\n")
    assert read_yaml(path) == {"lr": 1e-5, "name": "1e-5"}


@pytest.mark.parametrize("text", ["novalue", "=3", "a.=3", ".a=3", "a..b=3", "a=[1, 2", ""])
def test_a_malformed_override_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_override(text)


def test_an_override_into_a_value_that_is_no_section_replaces_it_and_is_then_refused() -> None:
    with pytest.raises(ConfigError, match=r"name: got \{'first': 'x'\}"):
        validate(Outer, apply_overrides({"name": "x"}, ["name.first=x"]))


def test_an_override_of_something_inside_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override of something in inner\.sizes: .* is a list, of 2, and is given"):
        apply_overrides({"inner": {"sizes": [1, 2]}}, ["inner.sizes.0=5"])
    assert apply_overrides({"inner": {"sizes": [1, 2]}}, ["inner.sizes=[5]"]) == {"inner": {"sizes": [5]}}


def test_later_overrides_win_and_the_original_is_untouched() -> None:
    values = {"inner": {"mode": "fast", "learning_rate": 1.0}}
    result = apply_overrides(values, ["inner.mode=exact", "inner.learning_rate=2", "inner.learning_rate=3"])
    assert result == {"inner": {"mode": "exact", "learning_rate": 3}}
    assert values == {"inner": {"mode": "fast", "learning_rate": 1.0}}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_the_command_line(value: float) -> None:
    keys, found = parse_override(f"a.b={value!r}")
    assert keys == ["a", "b"] and float(found) == value and math.copysign(1, found) == math.copysign(1, value)


def test_the_same_kind_extends_a_section() -> None:
    base = {"env": {"kind": "tabletop", "image_size": 64, "num_envs": 4}}
    assert merge(base, {"env": {"kind": "tabletop", "num_envs": 8}})["env"]["image_size"] == 64
    assert merge(base, {"env": {"num_envs": 8}})["env"] == {"kind": "tabletop", "image_size": 64, "num_envs": 8}


def test_another_kind_keeps_only_what_both_have_from_a_common_class(caplog: pytest.LogCaptureFixture) -> None:
    base = {"env": {"kind": "tabletop", "num_envs": 4, "tasks": ["stack"], "knock": 0.5}}
    merged = merge(base, {"env": {"kind": f"{__name__}:MyEnv"}})
    assert merged["env"] == {"kind": f"{__name__}:MyEnv", "num_envs": 4}
    assert "env.kind: 'tabletop' became" in caplog.text and "knock, tasks is left out" in caplog.text


def test_a_base_of_another_kind_of_run_gives_the_sections_that_both_have(tmp_path: Path) -> None:
    write(tmp_path, "sft.yaml", "run: sft\nname: a\nenv: {kind: tabletop}\nsft: {steps: 2}\n")
    fit = write(tmp_path, "fit.yaml", "base: sft.yaml\nrun: fit\n")
    assert read_yaml(fit) == {"run": "fit", "name": "a", "env": {"kind": "tabletop"}}
    again = write(tmp_path, "again.yaml", "base: sft.yaml\nrun: sft\nname: b\n")
    assert read_yaml(again) == {"run": "sft", "name": "b", "env": {"kind": "tabletop"}, "sft": {"steps": 2}}


# ---------------------------------------------------------------- kinds


def test_a_users_own_class_by_module_and_name() -> None:
    kind = f"{__name__}:MyEnv"
    assert resolve_kind("env", kind) is MyEnv
    built = build_component("env", {"kind": kind, "num_envs": 9})
    assert isinstance(built, MyEnv) and built.num_envs == 9
    assert build_component("env", built) is built


@pytest.mark.parametrize(("section", "kind"), [(s, k) for s in KINDS for k in KINDS[s]])
def test_every_known_kind_resolves_to_a_documented_config(section: str, kind: str) -> None:
    config_class = resolve_kind(section, kind)
    assert issubclass(config_class, Config)
    assert config_class.__doc__, f"{config_class} needs a docstring: `vla-rl list` shows its first line"
    assert "kind" in config_class.model_fields


def test_dump_and_load_round_trip(tmp_path: Path) -> None:
    config = validate(
        Outer,
        {
            "name": "ünï",
            "inner": {"learning_rate": 1e-5, "mode": "exact"},
            "sizes": [1, 2],
            "env": {"kind": f"{__name__}:MyEnv", "num_envs": 2},
        },
    )
    path = write(tmp_path, "dumped.yaml", dump_yaml(config))
    again = validate(Outer, read_yaml(path))
    assert again == config and isinstance(again.env, MyEnv) and again.env.num_envs == 2
    assert dump_yaml(again) == dump_yaml(config)


@given(st.floats(min_value=1e-300, max_value=1e300), st.text(max_size=20))
@example(1.0, "\x85").via("a line break to YAML")
def test_any_value_survives_dump_and_load(rate: float, name: str) -> None:
    import tempfile

    config = Outer(name=name, inner=Inner(learning_rate=rate))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.yaml"
        path.write_text(dump_yaml(config), encoding="utf-8")
        assert validate(Outer, read_yaml(path)) == config


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path: Path) -> None:
    for name in ("1e-5", "1E5", "3", "true", "null", "1.5", ".5e3"):
        config = Outer(name=name)
        assert validate(Outer, read_yaml(write(tmp_path, "r.yaml", dump_yaml(config)))) == config


def test_importing_the_config_module_imports_neither_torch_nor_a_simulator() -> None:
    code = "import sys, json, vla_rl.config; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))
    assert not modules & {"torch", "mujoco", "libero", "lerobot", "transformers", "sim"}


def test_rates_that_end_before_the_run_does_are_refused() -> None:
    decay = ["train.iterations=8", "algo.decay_iterations=8"]
    assert load_recipe("tabletop_grpo", decay).algo.lr_share(6) == 0.25  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"algo\.decay_iterations: got 8: the last of train\.iterations \(9\)"):
        load_recipe("tabletop_grpo", [*decay, "train.iterations=9"])


def test_tasks_that_are_numbers_need_no_quotes() -> None:
    recipe = load_recipe("libero_object_bc", ["env.tasks=[0]", "eval.tasks=[1, '2']", "collect.tasks=[3]"])
    assert recipe.eval.tasks == ("1", "2") and recipe.collect is not None and recipe.collect.tasks == ("3",)
