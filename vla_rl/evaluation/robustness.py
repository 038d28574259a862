"""Robustness: loss of success by perturbation axis and level, paired with the clean episodes.

robustness = Robustness.load("runs/x/robustness.json")
print(robustness.markdown())
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from vla_rl.common.saved import Saved
from vla_rl.common.tables import console_table, markdown_table
from vla_rl.config import Config, Number
from vla_rl.evaluation.compare import compare, format_p
from vla_rl.evaluation.results import MODE_COLORS, Evaluation, EvaluationError
from vla_rl.evaluation.statistics import Interval


class PerturbedRate(Config):
    """Success along one axis at one level, or of the clean episodes (level 0).

    Attributes:
        rate: with `interval`, 95 %, of `num_episodes`.
        difference: to the clean episodes of the same initial states; with `bootstrap`, its 95 % interval, and
            `p_value`, exact, by initial state.
    """

    mode: str
    axis: str
    level: int
    num_episodes: int
    rate: Number
    interval: Interval
    difference: Number = 0.0
    bootstrap: Interval = Interval(0.0, 0.0)
    p_value: float = 1.0


class Robustness(Saved):
    """Every axis and level of one policy."""

    WHAT = "robustness"
    ERROR = EvaluationError
    AGAIN = "Evaluate with `vla-rl eval --perturb`."
    name: str
    env: str
    split: str
    rates: tuple[PerturbedRate, ...]

    @staticmethod
    def of(clean: Evaluation, perturbed: Mapping[tuple[str, int], Evaluation]) -> Robustness:
        """Pair each perturbed evaluation, by (axis, level), with the clean one."""
        rates = []
        for mode in clean.modes:
            whole = clean.rate(mode)
            rates.append(
                PerturbedRate(
                    mode=mode,
                    axis="clean",
                    level=0,
                    num_episodes=whole.num_episodes,
                    rate=whole.rate,
                    interval=whole.interval,
                )
            )
            for (axis, level), evaluation in perturbed.items():
                result = compare(clean, evaluation).result(mode)
                rates.append(
                    PerturbedRate(
                        mode=mode,
                        axis=axis,
                        level=level,
                        num_episodes=result.num_pairs,
                        rate=result.rate_b,
                        interval=result.interval_b,
                        difference=result.difference,
                        bootstrap=result.bootstrap,
                        p_value=result.p_value_by_state,
                    )
                )
        meta = clean.meta
        return Robustness(name=meta.name, env=meta.env_title, split=meta.split, rates=tuple(rates))

    @property
    def modes(self) -> list[str]:
        """Modes, in the order evaluated."""
        return list(dict.fromkeys(r.mode for r in self.rates))

    def table(self) -> Table:
        """A table for the console, 80 columns wide."""
        title = f"{self.name} on {self.env}, {self.split} split: what one change costs, 95 % intervals"
        table = console_table(title, ("axis", "level", "%", "interval", "against clean, points", "p", "n"), ("axis",))
        for place, rate in enumerate(self.rates):
            last = place + 1 == len(self.rates) or self.rates[place + 1].axis != rate.axis
            table.add_row(*_cells(rate), style="bold" if rate.level == 0 else None, end_section=last)
        return table

    def markdown(self) -> str:
        """The table for a page."""
        head = ("axis", "level", "success, %", "95 % interval", "against clean, points", "p", "n")
        return markdown_table(head, [*map(_cells, self.rates)])

    def plot(self, path: Path) -> None:
        """A picture (PNG, SVG, ... by suffix): success by axis and level with 95 % intervals, a part for each mode."""
        from matplotlib.figure import Figure

        axes_names = list(dict.fromkeys(r.axis for r in self.rates if r.level))
        figure = Figure(
            figsize=(max(1.6 + 1.25 * len(axes_names), 6.5), 0.9 + 2.6 * len(self.modes)), layout="constrained"
        )
        parts = figure.subplots(len(self.modes), 1, squeeze=False)[:, 0]
        for part, mode in zip(parts, self.modes, strict=True):
            clean, *rates = [r for r in self.rates if r.mode == mode]
            part.axhspan(*(100 * end for end in clean.interval), color="#e3e8ed")
            part.axhline(100 * clean.rate, color="#5b6875", linewidth=1.2, label="clean")
            levels = sorted({r.level for r in rates})
            width = 0.8 / max(len(levels), 1)
            for column, level in enumerate(levels):
                chosen = [r for r in rates if r.level == level]
                x = np.array([axes_names.index(r.axis) for r in chosen]) + (column - (len(levels) - 1) / 2) * width
                percent = np.array([100 * r.rate for r in chosen])
                ends = 100 * np.array([r.interval for r in chosen]).T
                part.bar(x, percent, 0.9 * width, color=MODE_COLORS[column], label=f"level {level}")
                reach = np.clip([percent - ends[0], ends[1] - percent], 0, None)
                part.errorbar(x, percent, yerr=reach, fmt="none", ecolor="#222222", capsize=2, linewidth=1)
            part.set_xticks(range(len(axes_names)), axes_names)
            part.set_ylim(0, 100)
            part.set_ylabel(f"{mode} success, %")
            part.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.name}: {self.env}, {self.split} split; 95 % intervals", x=0.01, ha="left", fontsize=11)
        handles, labels = parts[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels), fontsize=9)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def _cells(rate: PerturbedRate) -> list[str]:
    low, high = (f"{100 * end:.1f}" for end in rate.interval)
    axis = rate.axis if rate.level else f"{rate.mode}, {rate.axis}"
    cells = [axis, str(rate.level or ""), f"{100 * rate.rate:.1f}", f"{low} - {high}"]
    if not rate.level:
        return [*cells, "", "", str(rate.num_episodes)]
    less = f"{100 * rate.difference:+.1f} {rate.bootstrap.percent('+')}"
    return [*cells, less, format_p(rate.p_value), str(rate.num_episodes)]
