"""Write docs/support.md from docs/support.yaml, after checking that each row's evidence is there.

python scripts/support_table.py            # write it
python scripts/support_table.py --check    # exit with 1 where it is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PAGE = ROOT / "docs" / "support.yaml", ROOT / "docs" / "support.md"
LEVELS = {
    "gain": "**gain**",
    "no gain": "run, no gain",
    "harm": "**harm**",
    "measured": "measured",
    "update": "updates run",
    "contract": "contract tested",
    "loads": "loads, outputs equal the reference's",
    "none": "not run",
}
WEIGHTS = ("ours", "random", "published", "–")
# Table -> its heading and the columns before and behind the one that says how far it was brought.
TABLES = {
    "combinations": (
        "Simulators, policies and algorithms together",
        ("simulator", "policy", "algorithm"),
        ("weights",),
    ),
    "methods": ("Methods, those that lost among them", ("name", "option"), ()),
    "workflows": ("Workflows", ("name", "option"), ()),
    "transports": ("The robot's transports", ("name", "option"), ()),
}
HEAD = """# What was run

What has been run, and with what result. All rows were run by the project itself, on CPUs where nothing else is said.
`python scripts/support_table.py` writes this page from `support.yaml` and checks that each row's evidence exists. If
you have run another combination, send the row ([contributing](CONTRIBUTING.md)).

**gain** means that success rose, with an interval, on states that training had not seen; **harm** that it fell, or that
the method did. Weights: *ours* were trained here, *random* are tiny random weights in the published layout,
*published* are those on the hub.
"""
Row = dict[str, str]


def problems(tables: dict[str, list[Row]]) -> list[str]:
    """Return what is wrong with the rows: unknown words, evidence that is not there."""
    found = []
    for table, number, row in ((t, n, row) for t, rows in tables.items() for n, row in enumerate(rows, start=1)):
        needed = {*TABLES[table][1], *TABLES[table][2], "level", "evidence"}
        if unknown := set(row) - needed - {"note"} or needed - set(row):
            found.append(f"{table} {number}: has or lacks {sorted(unknown)}; fields are {sorted({*needed, 'note'})}")
            continue
        if row["level"] not in LEVELS or row.get("weights", "–") not in WEIGHTS:
            found.append(f"{table} {number}: level {row['level']!r}, weights {row.get('weights')!r}")
        file, _, anchor = row["evidence"].partition("#")
        path = ROOT / file if file.startswith("tests/") else ROOT / "docs" / file
        if not path.is_file():
            found.append(f"{table} {number}: no file {path.relative_to(ROOT)}")
        elif anchor and anchor not in anchors(path):
            found.append(f"{table} {number}: {file} has no heading #{anchor}")
    return found


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def page(tables: dict[str, list[Row]]) -> str:
    """Return the page's text."""
    parts = [HEAD]
    for table, rows in tables.items():
        heading, before, behind = TABLES[table]
        columns = (*before, "how far", *behind, "evidence")
        lines = [f"## {heading}", "", _line(columns), "|" + "---|" * len(columns)]
        for row in rows:
            evidence = row["evidence"]
            name, _, _ = evidence.partition("#")
            link = f"`{evidence}`" if evidence.startswith("tests/") else f"[{name.removesuffix('.md')}]({evidence})"
            far = LEVELS[row["level"]] + (f": {row['note']}" if row.get("note") else "")
            own = [f"`{row[field]}`" if field == "option" else row[field] for field in before]
            lines.append(_line((*own, far, *(row[field] for field in behind), link)))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Write or check the page; return the exit code."""
    tables = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    if found := problems(tables):
        print("\n".join(found), file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(tables):
            print(f"{PAGE.name} is out of date; run python scripts/support_table.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
