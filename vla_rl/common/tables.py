"""Tables for people, and what they hold of tasks and checks: 80 columns wide where texts are short, or Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table


def console_table(title: str, head: Sequence[str], words: Sequence[str], caption: str = "") -> Table:
    """An empty table with these columns; those in `words` stand at the left and may wrap, numbers at the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = caption or None, "left"
    for name in head:
        is_word = name in words
        table.add_column(name, justify="left" if is_word else "right", no_wrap=not is_word, overflow="fold")
    return table


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown, without a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


LONGEST = 32  # characters; filling words go from names beyond it
_ALWAYS_DROPPED = ("and place it", "and put it", "pick up", "the")
_FILLING = ("put", "both", "of", "and", "it")


def libero_instruction(task: str) -> str:
    """The instruction of one of LIBERO's tasks, as its benchmark and OpenVLA word it: the name without scene and
    underscores. The tasks' BDDL files, and so the published demonstrations, say it otherwise in several suites."""
    return re.sub(r"^[A-Z_]+_SCENE\d+_", "", task).replace("_", " ")


def short_names(tasks: Sequence[str]) -> list[str]:
    """A short name for each task: without what all begin and end with, and without words that only fill.

    Words are parted by underscores or spaces. Names are as distinct as the tasks: one that would be another's stays
    long. Where every task's name is short as it is, it is the name.
    """
    if all(len(task) <= LONGEST for task in tasks):
        return list(tasks)
    words = [task.replace("_", " ").split() for task in tasks]
    if len(tasks) > 1:
        start, end = _num_shared(words), _num_shared([w[::-1] for w in words])
        words = [w[start : max(len(w) - end, start + 1)] for w in words]
    names = [_without(" ".join(w), _ALWAYS_DROPPED) for w in words]
    shorter = [_until_short(name) for name in names]
    return [short if shorter.count(short) == 1 else name for short, name in zip(shorter, names, strict=True)]


def _num_shared(words: Sequence[Sequence[str]]) -> int:
    """How many words all begin with; one is left to each."""
    shared = 0
    while shared < min(map(len, words)) - 1 and len({w[shared] for w in words}) == 1:
        shared += 1
    return shared


def _without(name: str, phrases: Sequence[str]) -> str:
    for phrase in phrases:
        name = f" {name} ".replace(f" {phrase} ", " ").strip() or name
    return name


def _until_short(name: str) -> str:
    for word in _FILLING:
        if len(name) > LONGEST:
            name = _without(name, [word])
    return name


_UNBOUNDED = 10_000


def print_table(table: Table) -> None:
    """Print a table to standard output; in a file or a pipe, which has no width, no number is cut."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=_UNBOUNDED), table).maximum
        console.width = max(console.width, needed)
    console.print(table)


Status = Literal["ok", "warning", "missing", "unknown", "wrong"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at. status: "ok", "warning" (works with less), "missing", "unknown" (it cannot be
            told), "wrong".
        found: what was found. fix: what to do, empty when nothing.
        needed: what is missing cannot be done without.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    needed: bool = False

    @property
    def is_fault(self) -> bool:
        return self.status == "wrong" or (self.needed and self.status == "missing")


def report(checks: list[Check], as_json: bool, write: Callable[[str], None] = print) -> int:
    """Show the checks as a table or JSON. Returns the exit code: 1 when something is wrong, or missing and needed."""
    faults = [c for c in checks if c.is_fault]
    if as_json:
        write(json.dumps({"ok": not faults, "checks": [asdict(c) for c in checks]}, indent=1))
        return 1 if faults else 0
    marks = {
        "ok": "[green]ok[/]",
        "warning": "[yellow]warning[/]",
        "missing": "[dim]not here[/]",
        "unknown": "[dim]unknown[/]",
        "wrong": "[bold red]WRONG[/]",
    }
    table = Table("", "what", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
    for check in checks:
        mark = "[bold red]MISSING[/]" if check.status == "missing" and check.is_fault else marks[check.status]
        table.add_row(mark, escape(check.name), escape(check.found), escape(check.fix))
    console = Console()
    console.print(table)
    for title, status in (("Missing and needed", "missing"), ("Wrong", "wrong")):
        if names := [c.name for c in faults if c.status == status]:
            console.print(f"[bold red]{title}: {escape(', '.join(names))}[/]")
    return 1 if faults else 0
