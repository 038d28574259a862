"""The learner of `run: hil` where a robot records: several recordings, a kill before anything was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_episodes import episode
from tiny_run import make_recipe, metrics, save_policy

from real_robot.operator.recorder import Recording
from vla_rl.algorithms.offpolicy.published import newest
from vla_rl.algorithms.offpolicy.replay import FACTS_FILE
from vla_rl.common.run_folder import RunFolder
from vla_rl.recipe.recipe import Recipe
from vla_rl.workflows import hil
from vla_rl.workflows.hil import run_hil
from vla_rl.workflows.hil_actor import PUBLISHED

HELPED, ALONE = ["policy"] * 4 + ["recovery"] * 6, ["policy"] * 8
OPTIONS = [
    *("hil.actor=recordings", "hil.evaluate=never", "hil.prior=none", "hil.warm_updates=0", "hil.publish_every=2"),
    *("hil.updates_per_episode=3", "hil.critic.hidden=16", "hil.critic.batch_size=8"),
]


def record(folder: Path, name: str, *episodes: tuple[int, list[str]], close: bool = False) -> Recording:
    made = Recording(folder / name, 10, "dummy")
    for index, sources in episodes:
        made.add(episode(index, sources, True), {"agentview": (32, 32)})
    if close:
        made.close()
    return made


def tiny(tmp_path: Path, episodes: int) -> Recipe:
    where = f"hil.recordings={tmp_path / 'recordings'}"
    return make_recipe(save_policy(tmp_path / "base"), "run=hil", *OPTIONS, where, f"hil.episodes={episodes}")


def taken(run: Path) -> list[dict[str, int]]:
    files = sorted(run.glob(f"replay/segment-*/{FACTS_FILE}"))
    return [json.loads(file.read_text())["notes"]["recordings"] for file in files]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All episodes are there from the first: who waits, waits forever."""

    def never(seconds: float) -> None:
        raise AssertionError("the learner waits for episodes that are there")

    monkeypatch.setattr(hil.time, "sleep", never)
    monkeypatch.setattr(hil, "AT_ONCE", 3)


def test_episodes_of_several_recordings_count_together(tmp_path: Path) -> None:
    """Each recording alone has fewer than the learner begins with."""
    folder, run = tmp_path / "recordings", tmp_path / "run"
    record(folder, "monday", (0, HELPED), close=True)
    record(folder, "tuesday", (1, ALONE))
    run_hil(tiny(tmp_path, 2), run, print)
    assert taken(run) == [{"monday": 1, "tuesday": 1}]
    last = metrics(run)[-1]
    assert last["rollout/episodes"] == 2 and last["step"] == 6 and last["replay/prior_decisions"] == 6
    assert last["person/minutes"] == pytest.approx(6 / 10 / 60), "at the recording's 10 Hz"


def test_killed_before_its_first_checkpoint_it_learns_from_what_it_had_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recipe = tmp_path / "run", tiny(tmp_path, 2)
    record(tmp_path / "recordings", "monday", (0, HELPED), (1, ALONE))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hil._Learner, "learn", killed)
        with pytest.raises(KeyboardInterrupt):
            run_hil(recipe, run, print)
    assert taken(run) == [{"monday": 2}] and not list(RunFolder(run).checkpoints.glob("*"))
    run_hil(recipe, run, print)
    assert taken(run) == [{"monday": 2}], "once"
    found = newest(run / PUBLISHED)
    assert found is not None and found.number == 6, "each episode has paid for its updates"


def test_a_backlog_is_published_as_it_is_learned_from(tmp_path: Path) -> None:
    """Episodes that came while the learner was down: the last policy is that of all of them, before any new one."""
    run, recipe = tmp_path / "run", tiny(tmp_path, 6)
    record(tmp_path / "recordings", "monday", *((index, ALONE) for index in range(6)))
    run_hil(recipe, run, print)
    assert taken(run) == [{"monday": 6}]
    rows = metrics(run)
    assert [row["step"] for row in rows] == [6, 12, 18], "one for each two episodes, of which it learned three times"
    assert [row.get("rollout/success_rate") for row in rows] == [1.0, None, None], "none is new later on"


def test_a_recording_in_the_place_of_another_is_told(tmp_path: Path) -> None:
    folder, run, said = tmp_path / "recordings", tmp_path / "run", []
    first = record(folder, "monday", (0, HELPED), (1, ALONE))
    run_hil(tiny(tmp_path, 2), run, said.append)
    first.staging.rename(tmp_path / "elsewhere")
    record(folder, "monday", (2, ALONE))
    record(folder, "tuesday", (3, ALONE))
    run_hil(tiny(tmp_path, 3), run, said.append)
    assert taken(run) == [{"monday": 2}, {"tuesday": 1}]
    [told] = [line for line in said if "another name" in line]
    assert told.startswith(f"{folder / 'monday'}: holds 1 episodes, and 2 of this name were taken up before")
