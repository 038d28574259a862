"""Progress: success over the episodes so far, a rate, and no flood where the output is a file."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from vla_rl.common import progress
from vla_rl.common.progress import Stopwatch, episode_progress, step_progress
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.rollout.source import LocalRolloutConfig
from vla_rl.workflows.collect import collect


def play(num: int, **options) -> None:
    with episode_progress(num, "rollout", **options) as on_episode:
        for i in range(num):
            on_episode(SimpleNamespace(lost=i == 0, success=i in (1, 2)))


def test_a_file_gets_one_line(capsys):
    play(300)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) <= 2
    text = " ".join(lines)
    assert "rollout" in text and "300/300" in text and "1 % of 299" in text and re.search(r"\d/s", text)


def test_a_passing_bar_leaves_nothing_and_no_bar_is_no_bar(capsys):
    play(300, transient=True)
    play(300, show=False)
    assert capsys.readouterr().out.strip() == ""


def test_a_file_gets_a_line_a_minute_and_the_end(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with step_progress("behavior cloning", 30, show=True) as advance:
        for step in range(31):
            now = 7.0 * step  # 3.5 minutes in all.
            advance(step, f"loss {1 / (step + 1):.4f}")
    lines = [re.sub(r"[━╸╺]+", " ", line).split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[2] for line in lines] == ["9/30", "18/30", "27/30", "30/30"]
    assert all(line[:2] == ["behavior", "cloning"] and line[3:5] == ["0.1", "steps/s"] for line in lines), lines
    assert lines[0][-2:] == ["loss", "0.1000"]


def test_collecting_shows_the_success_of_what_was_played(monkeypatch, capsys):
    def collect_dataset(*_, on_progress, **__):
        on_progress(
            {
                "episodes": 20,
                "episodes_wanted": 100,
                "attempts": {"push": 20, "stack": 0},
                "success_rate": {"push": 0.9, "stack": 0.0},
                "frames_per_second": 30.4,
            }
        )
        return {}

    monkeypatch.setattr("vla_rl.workflows.collect.collect_dataset", collect_dataset)
    recipe = SimpleNamespace(acting_env=None, seed=0, rollout=LocalRolloutConfig())
    collect(recipe, CollectConfig(tasks=("push", "stack"), episodes_per_task=50), print)  # type: ignore[arg-type]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 and "20/100" in shown[0] and shown[0].endswith("90 % success, 30 frames/s")


def test_a_stopwatch_waits_for_the_gpu_only_where_asked_to(monkeypatch):
    waited = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    for device, waits in ((None, []), ("cpu", []), ("cuda:1", ["cuda:1", "cuda:1"])):
        waited.clear()
        stopwatch = Stopwatch(device)
        with stopwatch.measure("forward_backward"):
            assert waited == waits[:1]
        assert waited == waits and stopwatch.seconds["forward_backward"] >= 0
