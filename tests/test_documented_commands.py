"""Every `vla-rl ...` line of the README and the docs names commands, options, recipes and keys that exist.

Nothing is run: each line goes through the program's own argument parser, and overrides of a shipped recipe through
its validation.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vla_rl.cli import app as cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("*/pretrained/README.md")),
)
PROGRAM = re.compile(r"(?:vla-rl|-m vla_rl) (?=\S)(.*)")
ASIDE = re.compile(r"\s+#.*|\s{2,}.*")  # a comment, or the description in a table of commands


@cache
def program() -> Any:
    """The whole command line, as the parser's objects."""
    return cli.program()


def documented(text: str) -> list[str]:
    """What follows `vla-rl` in each code block's line and in each inline piece of code."""
    text = re.sub(r"\\\n\s*", " ", text)
    found = []
    inline = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", inline):
        if code.startswith("vla-rl "):
            found.append(" ".join(code.replace("\\|", "|").split()).removeprefix("vla-rl "))
    for line in text.splitlines():
        stripped = line.strip()
        if "`" not in line and re.match(r"(\$ |torchrun .*|\w+=\S+ )*(vla-rl|torchrun) ", stripped):
            match = PROGRAM.search(stripped)
            if match:
                found.append(ASIDE.sub("", match[1]))
    return found


def commands_of(words: list[str]) -> list[tuple[Any, list[str]]]:
    """The commands that a line names (`fit | eval` names two), each with its arguments.

    Raises:
        LookupError: no such command.
    """
    command = program()
    own = {name for parameter in command.params for name in parameter.opts}  # of the program itself, as --version
    words = [word for word in words if word not in own]
    while hasattr(command, "commands") and words and words != ["COMMAND"]:
        names = words.pop(0).split("|")
        while words[:1] == ["|"]:
            names.append(words[1])
            words = words[2:]
        for name in names:
            if name not in command.commands:
                raise LookupError(f"no command {name!r}; there are: {', '.join(command.commands)}")
        if len(names) > 1:
            return [(command.commands[name], words) for name in names]
        command = command.commands[names[0]]
    return [] if hasattr(command, "commands") else [(command, words)]


def check(line: str) -> None:
    """Raises what the program's parser or a recipe's validation says of a documented line."""
    from vla_rl.recipe.recipe import load_recipe

    line = re.sub(r"\$\w+", "0.5", line.partition(" > ")[0])  # a shell variable of the page's own loop
    for command, arguments in commands_of([word for word in shlex.split(line) if word != "..."]):
        context = command.context_class(command, info_name=command.name, **command.context_settings)
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
        if rest and not context.allow_extra_args:
            raise LookupError(f"{command.name} takes no further argument: {rest}")
        recipe = str(values.get("recipe") or "")
        if not re.fullmatch(r"[a-z0-9_]+", recipe):
            continue  # A placeholder, or the reader's own file.
        load_recipe(recipe, [text for name in ("overrides", "override") for text in values.get(name) or ()])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_exist(page: Path) -> None:
    faults = []
    for line in documented(page.read_text(encoding="utf-8")):
        try:
            check(line)
        except Exception as error:  # All of a page's faults at once.
            faults.append(f"vla-rl {line}\n    {type(error).__name__}: {error}")
    assert not faults, f"{page.name}:\n" + "\n".join(faults)
