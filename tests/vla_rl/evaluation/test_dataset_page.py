"""`vla-rl report DATASET`: a page of any dataset, with what doctor finds, in pictures and numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from own_recordings import so101
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.data.recorded import read
from vla_rl.evaluation import dataset_page


def page_of(dataset: Path) -> str:
    done = CliRunner().invoke(app, ["report", str(dataset)])
    assert done.exit_code == 0, done.output
    assert f"report: {dataset / 'report.html'}" in done.stdout
    words = ["env.dataset={0}", "sft.datasets={0}", "policy.cameras=[front,wrist]"]
    named = shlex.join(word.format(dataset) for word in words)
    assert done.stdout.endswith(f"\nnext: vla-rl sft robot_sft {named}\n")
    return (dataset / "report.html").read_text()


def test_any_dataset_has_a_page(tmp_path: Path) -> None:
    page = page_of(so101(tmp_path / "data", episodes=6, videos=False))
    assert "6 episodes, no outcomes recorded" in page and "6 numbers of the action, 6 of the state" in page
    assert page.count("data:video/mp4") == 2 and page.count("data:image/png") == 3 * 2
    assert page.count('<svg class="figure"') == 2
    assert 'class="unknown">unknown<' in page and "cannot be told: needs two instructions" in page
    assert 'class="wrong"' not in page
    low, high = (next(row for row in page.split("<tr>") if "gripper.pos" in row).split('"num">')[i] for i in (1, 5))
    assert low.startswith("0<") and high.startswith("100<")


@pytest.mark.parametrize("videos", [False, True])
def test_of_a_large_dataset_some_episodes_are_looked_at(
    videos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = so101(tmp_path / "data", episodes=7, videos=videos)
    caplog.clear()  # Of its writing.
    whole, shown = read(dataset), page_of(dataset)
    monkeypatch.setattr(dataset_page, "MOST_DECODED", 3 * whole.lengths.mean())
    page = page_of(dataset)
    assert "live in 3 of 7 episodes, the others were not looked at" in page
    assert re.findall("data:image/png[^>]*", page) == re.findall("data:image/png[^>]*", shown)
    assert "codec" not in caplog.text, "LeRobot's 60 lines for each video where torchcodec finds no FFmpeg"
    some = read(dataset, look_at=lambda lengths: np.array([0, 3, 6]))
    rows = np.flatnonzero(~np.isnan(some.brightness[:, 0, 0]))
    assert len(rows) == whole.lengths[[0, 3, 6]].sum()
    for name in ("brightness", "still"):
        np.testing.assert_array_equal(getattr(some, name)[rows], getattr(whole, name)[rows])
    np.testing.assert_array_equal(some.first, whole.first[[0, 3, 6]])
    np.testing.assert_array_equal(some.last, whole.last[[0, 3, 6]])


def test_what_is_wrong_stands_on_the_page(tmp_path: Path) -> None:
    dataset = so101(tmp_path / "data", episodes=2, videos=False)
    (file,) = (dataset / "data").rglob("*.parquet")
    table = pq.read_table(str(file))
    actions = table.column("action").to_pylist()
    actions[4] = [np.nan] * 6
    place = table.column_names.index("action")
    column = pa.array(actions, type=table.schema.field("action").type)
    pq.write_table(table.set_column(place, table.schema.field("action"), column), str(file))
    page = page_of(dataset)
    assert 'class="wrong">wrong<' in page and "NaN or infinite values: episode 0" in page


def test_what_is_no_dataset_and_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "holds no run (no config.yaml) and no dataset" in done.stderr
