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
    "harm": "run, no gain",
    "update": "updates run",
    "contract": "contract tested",
    "loads": "loads, outputs equal the reference's",
    "none": "not run",
}
WEIGHTS = ("ours", "random", "published", "–")
FIELDS = {"simulator", "policy", "algorithm", "level", "weights", "evidence", "note"}
HEAD = """# What was run

Which simulator, policy family and algorithm have been run together, and with what result. All rows were run by
the project itself, on CPUs. `python scripts/support_table.py` writes this page from `support.yaml` and checks that each
row's evidence exists. If you have run another combination, send the row ([contributing](CONTRIBUTING.md)).

**gain** means that success rose, with an interval, on states that training had not seen. Weights: *ours* were trained
here, *random* are tiny random weights in the published layout, *published* are those on the hub.

| simulator | policy | algorithm | how far | weights | evidence |
|---|---|---|---|---|---|
"""


def problems(rows: list[dict[str, str]]) -> list[str]:
    """Return what is wrong with the rows: unknown words, evidence that is not there."""
    found = []
    for number, row in enumerate(rows, start=1):
        if unknown := set(row) - FIELDS or (FIELDS - {"note"}) - set(row):
            found.append(f"row {number}: has or lacks {sorted(unknown)}; fields are {sorted(FIELDS)}")
            continue
        if row["level"] not in LEVELS or row["weights"] not in WEIGHTS:
            found.append(f"row {number}: level {row['level']!r}, weights {row['weights']!r}")
        file, _, anchor = row["evidence"].partition("#")
        path = ROOT / file if file.startswith("tests/") else ROOT / "docs" / file
        if not path.is_file():
            found.append(f"row {number}: no file {path.relative_to(ROOT)}")
        elif anchor and anchor not in anchors(path):
            found.append(f"row {number}: {file} has no heading #{anchor}")
    return found


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def page(rows: list[dict[str, str]]) -> str:
    """Return the page's text."""
    lines = []
    for row in rows:
        evidence = row["evidence"]
        link = f"`{evidence}`" if evidence.startswith("tests/") else f"[{evidence.partition('#')[0][:-3]}]({evidence})"
        far = LEVELS[row["level"]] + (f": {row['note']}" if row.get("note") else "")
        cells = (row["simulator"], row["policy"], row["algorithm"], far, row["weights"], link)
        lines.append("| " + " | ".join(cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page; return the exit code."""
    rows = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    if found := problems(rows):
        print("\n".join(found), file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(rows):
            print(f"{PAGE.name} is out of date; run python scripts/support_table.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
