"""Tables for the console, 80 columns wide where the texts are short, and for a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


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
