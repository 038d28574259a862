"""The JSON schema of a recipe, so that editors complete and check it.

In VS Code (with its YAML extension): write the schema once, `vla-rl config --schema > recipe.schema.json`,
and put `# yaml-language-server: $schema=recipe.schema.json` in a recipe's first line.
"""

from __future__ import annotations

from typing import Any

from vla_rl.config import BASES, KINDS, RUNS, ConfigError, resolve_kind


def recipe_schema() -> dict[str, Any]:
    """JSON schema of recipes of every kind of run; a section whose class depends on its `kind` is a `oneOf` of these.

    Kinds whose package is not installed here are left out.
    """
    definitions: dict[str, Any] = {}
    of_run = {run: _schema_of(run, definitions) for run in RUNS}
    for base in BASES.values():  # Of these sections the branches stand in the recipes'.
        definitions.pop(base.partition(":")[2], None)
    definitions["EnvConfig"] = {"type": "object", "description": "An env section.", "required": ["kind"]}
    sections = {name: section for schema in of_run.values() for name, section in schema["properties"].items()}
    sections["run"] = {"enum": list(RUNS), "description": of_run["eval"]["properties"]["run"].get("description", "")}
    whole = [
        {"if": {"properties": {"run": {"const": run}}, "required": ["run"]}, "then": schema}
        for run, schema in of_run.items()
    ]
    extending = {"if": {"not": {"required": ["run"]}}, "then": {"required": ["base"], "additionalProperties": False}}
    extending["then"]["properties"] = sections
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vla-rl recipe",
        "type": "object",
        "properties": {"run": sections["run"], "base": sections["base"]},
        "allOf": [*whole, extending],
        "$defs": definitions,
    }


def _schema_of(run: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of one kind of run's recipes; adds to the definitions."""
    schema = resolve_kind("run", run).model_json_schema()
    definitions |= schema.pop("$defs", {})
    properties = schema["properties"]
    for section in (name for name in KINDS if name in properties):
        kept = {key: properties[section][key] for key in ("description", "title") if key in properties[section]}
        properties[section] = {**kept, "oneOf": _branches(section, definitions)}
    properties["real_env"].pop("allOf", None)
    properties["real_env"]["anyOf"] = [*_branches("env", definitions), {"type": "null"}]
    for branch in (*properties["env"]["oneOf"], *properties["real_env"]["anyOf"]):
        _describe_inner(branch, "reward", "env.reward", definitions)
    plan = definitions["EvalConfig"]["properties"]["plan"]  # Inside a section, and its kind may be left out.
    plan["anyOf"] = [*_branches("plan", definitions), {"type": "null"}]
    for branch in properties.get("algo", {}).get("oneOf", ()):
        _describe_inner(branch, "values", "values", definitions)
    for branch in properties.get("world_model", {}).get("oneOf", ()):
        _describe_inner(branch, "clip_source", "clip_source", definitions)
    if "WorldModelConfig" in definitions:
        _describe_dynamics(definitions)
    properties["base"] = {"type": "string", "description": "A recipe that this one extends, relative to it."}
    required = schema.pop("required", [])
    return {**schema, "anyOf": [{"required": ["base"]}, {"required": required}]}


def _describe_inner(branch: dict[str, Any], name: str, section: str, definitions: dict[str, Any]) -> None:
    """Write the kinds of a section, which may be null, into the branch of the section that has it as an option."""
    if field := branch.get("properties", {}).get(name):
        branches = [*_branches(section, definitions), {"type": "null"}]
        branch["properties"][name] = {"description": field["description"], "anyOf": branches}


def _describe_dynamics(definitions: dict[str, Any]) -> None:
    """Write the kinds of dynamics into the world model's schema; without a kind it is the first of them."""
    branches = _branches("dynamics", definitions)[:-1]
    branches.append({**branches[0], "required": [], "title": "The dynamics without a kind"})
    field = definitions["WorldModelConfig"]["properties"]["dynamics"]
    definitions["WorldModelConfig"]["properties"]["dynamics"] = {
        "description": field["description"],
        "anyOf": branches,
    }


def _branches(section: str, definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """One branch per known kind, one for a user's own class, one for a section that only extends its base's."""
    branches = []
    for kind in KINDS[section]:
        try:
            branch = resolve_kind(section, kind).model_json_schema(ref_template="#/$defs/{model}")
        except ConfigError:
            continue
        definitions.update(branch.pop("$defs", {}))
        branch["properties"] = {**branch.get("properties", {}), "kind": {"const": kind}}
        branch["required"] = sorted({*branch.get("required", []), "kind"})
        branches.append(branch)
    branches.append(
        {
            "title": "A class of your own",
            "type": "object",
            "properties": {"kind": {"type": "string", "pattern": "^[A-Za-z_][\\w.]*:[A-Za-z_]\\w*$"}},
            "required": ["kind"],
        }
    )
    branches.append({"title": "More for the base's section", "type": "object", "not": {"required": ["kind"]}})
    if section in ("algo", "world_model", "failure"):
        branches.append({"type": "null"})
    return branches
