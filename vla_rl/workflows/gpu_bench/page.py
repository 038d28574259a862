"""The benchmark's page, and its summary for the terminal."""

from __future__ import annotations

from pathlib import Path

from vla_rl.common.atomic import write_text_atomic
from vla_rl.workflows.gpu_bench.parts import PARTS
from vla_rl.workflows.gpu_bench.record import Results

PAGE_FILE = "report.html"


def write_page(results: Results) -> Path:
    """Write report.html beside the results, and return its path."""
    from vla_rl.report.page import page_template

    template = page_template(__package__ or "", "page_template.html")
    parts = [(PARTS[name], record) for name, record in results.parts.items() if name in PARTS]
    target = results.folder / PAGE_FILE
    write_text_atomic(target, template.render(results=results, parts=parts, wrong=faults(results)))
    return target


def faults(results: Results) -> list[str]:
    """What went wrong, a line each."""
    lines = []
    for name, record in results.parts.items():
        lines += [
            f"{name}: wrong: {row.what}: {'no number' if row.value is None else format(row.value, '.4g')} {row.unit}, "
            f"must be {row.target}"
            for row in record.rows
            if row.verdict == "wrong"
        ]
        lines += [f"{name}: {error}" for error in record.errors]
    return lines


def summary(results: Results) -> str:
    """A line for each part, then what went wrong."""
    lines = []
    for name, record in results.parts.items():
        verdicts = [row.verdict for row in record.rows if row.verdict]
        count = ", ".join(f"{verdicts.count(v)} {v}" for v in ("met", "missed", "wrong") if v in verdicts)
        left = f"; {len(record.left_out)} left out" if record.left_out else ""
        lines.append(
            f"{name:<12} {record.state}, {record.seconds:.0f} s, {len(record.rows)} figures"
            f"{f' ({count})' if count else ''}{left}"
        )
    return "\n".join([*lines, *(f"FAULT {text}" for text in faults(results))])
