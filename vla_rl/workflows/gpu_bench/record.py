"""What each part found, in one file that is whole at any moment. Imports no torch.

{"format": 1, "size": "full", "machine": {...}, "parts": {"act": {"state": "done", "rows": [...], ...}, ...}}
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vla_rl.common.atomic import write_text_atomic

FORMAT = 1
RESULTS_FILE = "results.json"

State = Literal["running", "done", "left out", "out of time", "failed", "died"]
Verdict = Literal["", "met", "missed", "wrong"]


class ResultsError(ValueError):
    """A file of results that cannot be read or continued; the message says what to do."""


@dataclass(frozen=True)
class Target:
    """What a figure should be.

    Attributes:
        limit: in the figure's unit. at_least: whether the figure should not be below it; else not above it.
        device: part of the name of the device that it is for; "": any.
        required: a figure that misses it is wrong, and the benchmark fails.
    """

    limit: float
    at_least: bool = False
    device: str = ""
    required: bool = False

    def text(self) -> str:
        """For people."""
        where = f" on {self.device}" if self.device else ""
        return f"{'≥' if self.at_least else '≤'} {self.limit:,.10g}{where}"

    def verdict(self, value: float, device_name: str) -> Verdict:
        """Of a figure measured on a device; NaN meets nothing."""
        if self.device not in device_name:
            return ""
        if value >= self.limit if self.at_least else value <= self.limit:
            return "met"
        return "wrong" if self.required else "missed"


@dataclass(frozen=True)
class Row:
    """One figure. `value` is None where it was NaN or infinite, which `note` then says."""

    what: str
    value: float | None
    unit: str
    target: str = ""
    verdict: Verdict = ""
    note: str = ""


@dataclass
class PartRecord:
    """One part's figures.

    Attributes:
        finished: names of the attempts that ended, well or not. pending: those that were still to come.
        under_way: the attempt being made, "" when none is.
        left_out: what was not measured, and why. errors: attempts that raised.
        facts: figures that other parts use, by name.
    """

    state: State = "running"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    under_way: str = ""
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong; what was left out or not reached is no fault."""
        return not self.errors and self.state not in ("failed", "died") and all(r.verdict != "wrong" for r in self.rows)


@dataclass
class Results:
    """All parts' records, in the order in which they were made, and the machine's.

    Attributes:
        machine: facts about it; results of another machine or size are not continued.
    """

    folder: Path
    size: str
    machine: dict[str, Any]
    parts: dict[str, PartRecord] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / RESULTS_FILE

    @property
    def is_good(self) -> bool:
        """Whether no part went wrong."""
        return all(part.is_good for part in self.parts.values())

    def fact(self, part: str, name: str) -> float | None:
        """A figure that an earlier part measured; None where it did not."""
        record = self.parts.get(part)
        return None if record is None else record.facts.get(name)

    def save(self) -> None:
        """Write the file: the old or the new content, never half."""
        values = {"format": FORMAT, "size": self.size, "machine": self.machine}
        parts = {name: asdict(part) for name, part in self.parts.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.file, json.dumps(values | {"parts": parts}, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Read what `save` wrote.

        Raises:
            ResultsError: the file is missing, damaged or of another format.
        """
        file = folder / RESULTS_FILE
        try:
            values = json.loads(file.read_text())
            if values["format"] != FORMAT:
                raise ResultsError(f"{file}: format {values['format']}, this version writes {FORMAT}; measure anew")
            parts = {
                name: PartRecord(**part | {"rows": [Row(**row) for row in part["rows"]]})
                for name, part in values["parts"].items()
            }
            return cls(folder, values["size"], values["machine"], parts)
        except FileNotFoundError:
            raise ResultsError(f"{file}: not found; run without --resume first") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ResultsError(
                f"{file}: damaged ({type(error).__name__}: {error}); delete it and measure anew"
            ) from None


def finite(value: float) -> float | None:
    """The number as JSON can hold it."""
    return value if math.isfinite(value) else None
