"""What a part writes on while it measures: figures, what it leaves out, and the clock. Each figure is kept at once."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from vla_rl.common.atomic import write_text_atomic
from vla_rl.evaluation.report import page_template
from vla_rl.workflows.gpu_bench.parts import PARTS
from vla_rl.workflows.gpu_bench.record import PartRecord, Results, Row, Target, finite

Size = Literal["tiny", "full"]
Attempt = tuple[str, Callable[[], None]]
_OURS = ("vla_rl", "sim", "world_model", "real_robot")


class LeftOutError(Exception):
    """An attempt that cannot be made here; the message says why."""


class Sheet:
    """One part's figures while it is measured.

    Attributes:
        device: where it measures. size: full, or tiny to try its logic.
        results: of all parts; `record` is this part's.
    """

    def __init__(self, results: Results, part: str, device: torch.device, seconds: float) -> None:
        self.results, self.device = results, device
        self.record = results.parts.setdefault(part, PartRecord())
        self._started, self._seconds, self._before = time.monotonic(), seconds, self.record.seconds

    @property
    def is_full(self) -> bool:
        """Whether sizes are those that count; else tiny ones, which try the logic."""
        return self.results.size == "full"

    @property
    def seconds_left(self) -> float:
        """Until the part's time is up."""
        return self._seconds - (time.monotonic() - self._started)

    def add(self, what: str, value: float, unit: str, target: Target | None = None, note: str = "") -> None:
        """Keep a figure. At tiny size only what is required of it holds, as the rest are targets of real sizes."""
        if target is not None and not (self.is_full or target.required):
            target = None
        verdict = "" if target is None else target.verdict(value, str(self.results.machine.get("device", "")))
        if finite(value) is None:
            note = f"{value}; {note}".removesuffix("; ")
        text = "" if target is None else target.text()
        self.record.rows.append(Row(what, finite(value), unit, text, verdict, note))
        shown = f"  {what}: {value:,.4g} {unit}" + (
            f" (target {text}: {verdict or 'not for this device'})" if text else ""
        )
        print(shown, flush=True)
        self._save()

    def fact(self, name: str, value: float) -> None:
        """Keep a figure for other parts."""
        self.record.facts[name] = value

    def speed_note(self, flops: float | None, seconds: float, decisions: int) -> str:
        """Decisions a second, and the share of the machine's own rate of bf16 products."""
        rate = self.results.fact("rates", "flops_bf16")
        note = f"{decisions / seconds:,.4g} decisions/s"
        if flops is not None and rate is not None:
            note += (
                f"; {flops / seconds / 1e12:,.4g} TFLOP/s, {100 * flops / seconds / rate:.0f} % of the measured rate"
            )
        return note

    def leave_out(self, text: str) -> None:
        """Say what is not measured, and why."""
        self.record.left_out.append(text)
        print(f"  left out: {text}", flush=True)
        self._save()

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Make the attempts in order, those of an earlier run excepted, while there is time.

        Out of memory, or without a package, an attempt is left out; one that raises is kept as an error; the others go
        on either way.
        """
        record = self.record
        again = [(name, attempt) for name, attempt in attempts if name not in record.finished]
        record.pending = [name for name, _ in again]
        for name, attempt in again:
            if self.seconds_left <= 0:
                break
            record.under_way = name
            self._save()
            self._try(name, attempt)
            record.pending.remove(name)
            record.finished.append(name)
            record.under_way = ""
            self._save()
            self._free()
        self.end("out of time" if record.pending else "failed" if record.errors else "done")

    def _try(self, name: str, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except torch.OutOfMemoryError as error:
            self.leave_out(f"{name}: out of memory ({str(error).splitlines()[0]})")
        except LeftOutError as reason:
            self.leave_out(f"{name}: {reason}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in _OURS:
                self._keep_error(name, error)
            else:
                self.leave_out(f"{name}: needs the package {error.name}")
        except Exception as error:  # Whatever a part meets is a finding, and must not cost the other figures.
            self._keep_error(name, error)

    def _keep_error(self, name: str, error: Exception) -> None:
        traceback.print_exc(file=sys.stderr)
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:600]
        self.record.errors.append(f"{name}: {type(error).__name__} at {where.filename}:{where.lineno}: {text}")

    def end(self, state: Literal["done", "out of time", "failed"]) -> None:
        """Close the record."""
        self.record.state = state
        self._save()

    def _save(self) -> None:
        self.record.seconds = self._before + time.monotonic() - self._started
        self.results.save()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


PAGE_FILE = "report.html"


def write_page(results: Results) -> Path:
    """Write report.html beside the results, and return its path."""
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
