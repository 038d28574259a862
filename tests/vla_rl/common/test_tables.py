"""Tables in a pipe or a file: every number whole, whatever the width that the terminal had."""

import pytest
from rich.table import Table

from vla_rl.common.tables import print_table


def test_a_piped_table_is_as_wide_as_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("task", *(f"figure {n}" for n in range(12)))
    rows = [[f"task {row}", *(f"{row + n / 7:.9f}" for n in range(12))] for row in range(3)]
    for row in rows:
        table.add_row(*row)
    print_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    for row in rows:
        assert sum(all(cell in line for cell in row) for line in lines) == 1


def test_a_terminals_width_holds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal.
    table = Table(*(f"figure {n}" for n in range(12)))
    table.add_row(*(f"{n / 7:.9f}" for n in range(12)))
    print_table(table)
    from rich.text import Text

    assert max(len(Text.from_ansi(line).plain) for line in capsys.readouterr().out.splitlines()) <= 40
