"""The environment benchmark: what it counts and prints. Nothing here asserts how fast anything is."""

import importlib.util
import json
import time

import numpy as np
import pytest
import remote_speed

from sim import bench
from sim.dummy import DummyConfig
from sim.libero.library import find_assets


class Clockwork:
    """A runner with a known rate; remembers the order in which runners take turns."""

    def __init__(self, name: str, rate: float, order: list[str]) -> None:
        self.name, self.rate, self.order = name, rate, order

    def run(self, seconds: float) -> tuple[int, float]:
        self.order.append(self.name)
        return round(self.rate * seconds), seconds


def test_measure_takes_turns_and_divides_steps_by_seconds() -> None:
    order: list[str] = []
    rates = bench.measure([Clockwork("a", 100.0, order), Clockwork("b", 50.0, order)], seconds=3.0)
    assert rates == pytest.approx([100.0, 50.0])
    assert order == ["a", "b"] * (1 + bench.NUM_TURNS)


def test_ours_counts_executed_steps_of_all_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(1000.0))  # every reading a second later: each call to step takes one
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    runner = bench.OursRunner(DummyConfig(horizon=6).build(3), chunk=4)
    assert runner.run(3.0) == (3 * (4 + 2 + 4), 3.0)  # the horizon cuts the second chunk; then new episodes


def test_rows_and_table() -> None:
    rows = bench.run_bench(["sim.dummy:DummyConfig"], num_envs=2, num_workers=0, chunk=8, seconds=0.01, image_size=16)
    assert [(r["cameras"], r["rendered"]) for r in rows] == [
        (1, "each step"),
        (1, "each 8"),
        (2, "each step"),
        (2, "each 8"),
    ]
    assert all(r["steps_per_second"] > 0 and "ratio" not in r for r in rows)
    table = bench.format_table([*rows, {"environment": "libero", "skipped": "no assets"}])
    assert "2 environments in this process, 16 px" in table
    assert "libero              skipped: no assets" in table


def test_simulator_that_cannot_run_costs_only_its_own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("hf-libero is not installed")

    monkeypatch.setattr(bench, "prepare_libero", missing)
    rows = bench.run_bench(["libero", "sim.dummy:DummyConfig"], 1, 0, chunk=2, seconds=0.01, image_size=16)
    assert rows[0] == {"environment": "libero", "skipped": "hf-libero is not installed"}
    assert len(rows) == 5


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--kinds", "sim.dummy:DummyConfig", "--seconds", "0.01", "--image-size", "16", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    with pytest.raises(SystemExit):
        bench.main(["--chunk", "0"])
    assert "--chunk must be positive, got 0" in capsys.readouterr().err


def test_behind_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kinds", "sim.dummy:DummyConfig", "--seconds", "0.02", "--image-size", "16"]
    remote_speed.main([*options, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["here"] > 0 and row["there"] > 0 and row["low"] <= row["ratio"] <= row["high"]
    remote_speed.main(options)
    assert "2 environments, 16 px, 8 a chunk" in capsys.readouterr().out


@pytest.mark.slow
def test_against_lerobot() -> None:
    if importlib.util.find_spec("libero") is None or find_assets(None) is None:
        pytest.skip("needs hf-libero and LIBERO's assets (LIBERO_ASSETS)")
    rows = bench.run_bench(["libero"], num_envs=1, num_workers=0, chunk=8, seconds=0.1, image_size=64)
    assert [r["environment"] for r in rows] == ["libero"] * 4 + ["libero by LeRobot"]
    assert rows[-1]["ratio"] == 1.0
    assert all(r["ratio"] == pytest.approx(r["steps_per_second"] / rows[-1]["steps_per_second"]) for r in rows)
