"""Costs of each stage of a run with their sources, and the file that keeps them. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError, read_yaml
from vla_rl.policies.base import CONFIG_FILE, read_json, resolve_path
from vla_rl.workflows.gpu_bench.record import Results

FORMAT = 1

ON_CPU = " on a CPU"  # In a source, of what was measured there.


@dataclass(frozen=True)
class Curve:
    """Seconds for a number of decisions at once: straight lines between what is known.

    Below the smallest number known it costs what that does, above the largest as the last line goes on; known at one
    number alone, in proportion above it.

    Attributes:
        points: (decisions, seconds), at least one, by decisions.
    """

    points: tuple[tuple[float, float], ...]

    def of(self, count: float) -> float:
        """Seconds for `count` decisions; 0 for none."""
        if count <= 0:
            return 0.0
        sizes, seconds = [size for size, _ in self.points], [each for _, each in self.points]
        if count <= sizes[-1]:
            return float(np.interp(count, sizes, seconds))
        slope = seconds[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
        return seconds[-1] + slope * (count - sizes[-1])

    def times(self, factor: float) -> Curve:
        """The same for a policy that takes `factor` times as long."""
        return Curve(tuple((size, factor * seconds) for size, seconds in self.points))


@dataclass(frozen=True)
class Costs:
    """Seconds of every stage, as samples where they vary.

    Attributes:
        act: of a batch's action chunks. forward, update: of a micro-batch, without gradient, and with it.
        optimizer: of a step. other: of an iteration, for what is none of these.
        step: samples, of one environment's chunk; reset: samples, of starting one's episode.
        chunks: samples, decisions of an episode.
        active: share of the decisions that are learned from, as groups without spread are not.
        trained_bytes: of the parameters that are trained, which is what processes exchange.
        sources: stage -> where the figure comes from, in words that begin with "measured", "computed" or "assumed".
    """

    act: Curve
    forward: Curve
    update: Curve
    optimizer: float
    other: float
    step: tuple[float, ...]
    reset: tuple[float, ...]
    chunks: tuple[int, ...]
    active: float
    trained_bytes: float
    sources: dict[str, str]

    def __post_init__(self) -> None:
        for name in ("step", "reset", "chunks"):
            if not getattr(self, name):
                raise ConfigError(f"plan: no sample of {name!r}: nothing was measured")
        numbers = [*self.step, *self.reset, *self.chunks, self.optimizer, self.other, self.active, self.trained_bytes]
        numbers += [x for curve in (self.act, self.forward, self.update) for point in curve.points for x in point]
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ConfigError("plan: a cost is negative, infinite or not a number; measure anew")

    @property
    def caveat(self) -> str:
        """What to know of rates on GPUs where acting or learning was measured on a CPU; else empty."""
        on_cpu = [name for name in ("act", "forward", "update") if ON_CPU in self.sources.get(name, "")]
        stages = ", ".join(on_cpu)
        said = (
            f"Measured on a CPU: {stages}. A CPU's seconds are not a GPU's: these rates are of CPUs in the GPUs' place."
        )
        return said if on_cpu else ""

    def of_larger_policy(self, factor: float) -> Costs:
        """With a policy that takes `factor` times as long to act and to learn."""
        parts = {name: getattr(self, name).times(factor) for name in ("act", "forward", "update")}
        return replace(self, optimizer=factor * self.optimizer, **parts)

    def save(self, file: Path) -> None:
        """Write them as JSON."""
        write_text_atomic(file, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file is damaged, or of another format.
        """
        try:
            values = json.loads(file.read_text())
            if values.pop("format") != FORMAT:
                raise ConfigError(f"{file}: of another format than {FORMAT}; measure anew")
            curves = {n: Curve(tuple((a, b) for a, b in values[n]["points"])) for n in ("act", "forward", "update")}
            samples = {n: tuple(values[n]) for n in ("step", "reset", "chunks")}
            rest = {f.name: values[f.name] for f in fields(cls) if f.name not in curves | samples}
            return cls(**curves, **samples, **rest)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file}: not costs that `vla-rl plan` wrote ({error}); measure anew") from None


def from_run(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the stages' costs that a run's log tells, and where they come from.

    A log has sums alone: an environment's chunk costs the same each time, a batch was as large as there were
    environments, and episodes are as long as their mean. The first iteration, which warms up, is left out. Seconds are
    the first process's, episodes and decisions all processes'. Rollouts elsewhere tell nothing of acting and stepping.

    Raises:
        ConfigError: the folder is no finished iteration of `vla-rl train`.
    """
    run = RunFolder(folder)
    try:
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        recipe = read_yaml(run.config)
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--costs {folder}: not the folder of a run ({error})") from None
    rows = [row for row in rows if "time/forward_backward" in row and "rollout/num_episodes" in row]
    if not rows:
        raise ConfigError(f"--costs {folder}: its log has no iteration of `vla-rl train`")
    rows = rows[1:] or rows
    env, algo = recipe["env"], recipe["algo"]

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in rows]))

    chunk = _chunk_size(run, recipe)
    chunks = max(mean("rollout/length") / chunk, 1.0)
    processes = max(mean("rollout/num_processes"), 1.0)
    episodes = mean("rollout/num_episodes") / processes
    decisions = chunks * episodes
    learned = max(mean("advantage/decisions") * mean("advantage/active") / processes, 1.0)
    passes = algo["epochs"] + 1 / 3  # Old log-probabilities are computed by a forward pass first.
    each, size = mean("time/forward_backward") / learned / passes, float(algo["micro_batch_size"])
    workers = max(1, min(env.get("num_workers", 0), env["num_envs"]))
    calls = decisions / min(env["num_envs"], episodes)
    values = {
        "act": Curve(((float(env["num_envs"]), mean("time/inference") / calls),)),
        "forward": Curve(((size, size * each / 3),)),
        "update": Curve(((size, size * each),)),
        "optimizer": mean("time/optimizer") / max(mean("update/num_steps"), 1.0),
        "other": mean("time/other"),
        "step": (mean("time/simulation") * workers / decisions,),
        "reset": (0.0,),  # Within the steps: the log has one figure for both.
        "chunks": tuple(max(1, round(row["rollout/length"] / chunk)) for row in rows),
        "active": min(1.0, learned / decisions),
    }
    if recipe.get("rollout", {}).get("kind", "local") != "local":
        values = {name: value for name, value in values.items() if name not in ("act", "step", "reset")}
    where = {"cpu": ON_CPU}.get(recipe.get("device", "auto"), f" on device {recipe.get('device', 'auto')}")
    return values, f"measured in {len(rows)} iterations of {folder}{where}"


def _chunk_size(run: RunFolder, recipe: Mapping[str, Any]) -> int:
    """Actions of a chunk of the run's policy, as the files of it say that the run wrote or began with."""
    began_with = recipe["policy"].get("path")
    for folder in (run.policy, *([resolve_path(began_with)] if began_with else [])):
        if (folder / CONFIG_FILE).is_file():
            found = _value(read_json(folder / CONFIG_FILE), "chunk_size")
            if found is not None:
                return int(recipe["policy"].get("num_actions") or found)
    raise ConfigError(
        f"--costs {run.path}: its policy's files do not say how many actions a chunk has; measure instead"
    )


def _value(values: Mapping[str, Any], name: str) -> Any:
    """The value of a name, here or in what is inside; None where it is nowhere."""
    if name in values:
        return values[name]
    inside = (_value(part, name) for part in values.values() if isinstance(part, Mapping))
    return next((found for found in inside if found is not None), None)


def bench_points(rows: Sequence[Mapping[str, Any]], before: str) -> tuple[tuple[float, float], ...]:
    """Points of a curve from a GPU benchmark's rows whose name is `before` and a number; their unit is ms."""
    found = [(row["what"].removeprefix(before), row["value"]) for row in rows if row["what"].startswith(before)]
    return tuple(sorted((float(size), value / 1000) for size, value in found if size.isdigit() and value is not None))


def from_bench(folder: Path, decoder: str = "parallel") -> tuple[dict[str, Any], str]:
    """Return what `vla-rl bench gpu` measured of acting and learning with 7 billion parameters, and its source.

    Args:
        decoder: parallel or autoregressive.

    Raises:
        ConfigError: it measured neither, or tiny networks alone.
    """
    results = Results.load(folder)
    if results.size != "full":
        raise ConfigError(
            f"--costs {folder}: was measured with --size {results.size}, whose networks only try its logic; "
            "run `vla-rl bench gpu` at full size on a GPU"
        )
    rows = {name: [asdict(row) for row in part.rows] for name, part in results.parts.items()}
    act = bench_points(rows.get("act", ()), f"{decoder}, LoRA, eager, B=")
    update = bench_points(rows.get("update", ()), "forward and backward, micro-batch of ")
    values: dict[str, Any] = {"act": Curve(act)} if act else {}
    if update:  # With checkpointing: two passes forward, and one backward that costs two of them.
        values |= {"update": Curve(update), "forward": Curve(update).times(0.25)}
    if not values:
        raise ConfigError(f"--costs {folder}: the benchmark measured neither acting nor updating")
    device = results.machine.get("device", "a GPU")
    return values, f"measured by `vla-rl bench gpu`, OpenVLA 7B with LoRA and one camera, on {device} in {folder}"
