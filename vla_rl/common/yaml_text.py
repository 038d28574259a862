"""YAML as recipes and contracts have it, read and written. Imports nothing of ours, and runs from Python 3.10 on."""

from __future__ import annotations

import re
from typing import Any

import yaml


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
