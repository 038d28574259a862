"""Tables for people: on a terminal as wide as it, elsewhere as wide as they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

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
