"""Check results of a machine, robot or dataset, and the table that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

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
