"""`vla-rl doctor --dataset`: nothing is found in a clean dataset, and each planted fault is, by its own check."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.common.tables import Check
from vla_rl.data.health import check_datasets, check_instructions, check_recorded
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, encode_png, write_shard
from vla_rl.data.recorded import read

SIZE, LENGTH, EACH = 32, 40, 8
TASKS = ("push the red block", "lift the blue block")
Change = Callable[[list[RecordedEpisode]], list[RecordedEpisode]]


def episode(number: int) -> RecordedEpisode:
    """A dot that goes where the actions send it; the two instructions have other colors and gripper habits."""
    task = number % 2
    rng = np.random.default_rng(number)
    length = LENGTH + int(rng.integers(-5, 5))
    steps = np.cumsum(rng.normal(size=(length, 3)), 0)
    actions = np.zeros((length, 4), np.float32)
    actions[:, :3] = 0.6 * np.sin(steps / 3)
    actions[:, 3] = np.where(np.arange(length) > length // 2, 1.0, -1.0) if task else -1.0
    position = np.cumsum(actions[:, :3], 0) - actions[:, :3]
    state = np.concatenate([0.05 * position, actions[:, 3:]], 1).astype(np.float32)
    images = [picture(place, task) for place in position]
    return RecordedEpisode(
        task=TASKS[task].replace(" ", "_"),
        split="train",
        index=number,
        instruction=TASKS[task],
        png={"agentview": [encode_png(image) for image in images]},
        state=state,
        actions=actions,
        executed_actions=actions,
        reward=np.eye(length, dtype=np.float32)[-1],
        success=True,
        control_source=["expert"] * length,
        policy_version="expert",
        final_png={"agentview": encode_png(images[-1])},
        final_state=state[-1],
    )


def picture(place: np.ndarray, task: int) -> np.ndarray:
    image = np.full((SIZE, SIZE, 3), 90, np.uint8)
    image[:6, :, 0 if task == 0 else 2] = 250
    x, y = (int(SIZE / 2 + 3 * value) % (SIZE - 3) for value in place[:2])
    image[y : y + 3, x : x + 3] = 255
    image[-4:] = (150 + 100 * np.sin(place)).astype(np.uint8)  # so that each small move shows
    return image


def write(folder: Path, change: Change = lambda episodes: episodes) -> Path:
    episodes = change([episode(number) for number in range(2 * EACH)])
    features = dataset_features(["agentview"], (SIZE, SIZE), 4, ["x", "y", "z", "gripper"])
    write_shard(folder / "staging" / "shard_00000", episodes, [], features)
    assemble(folder / "staging", folder / "dataset", fps=20, features=features, robot="toy", notes={})
    return folder / "dataset"


def faults(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status not in ("ok", "unknown")}


def changed(*numbers: int, by: Callable[[RecordedEpisode], RecordedEpisode]) -> Change:
    return lambda episodes: [by(one) if number in numbers else one for number, one in enumerate(episodes)]


def everywhere(by: Callable[[RecordedEpisode], RecordedEpisode]) -> Change:
    return lambda episodes: [by(one) for one in episodes]


def shifted(frames: int) -> Callable[[RecordedEpisode], RecordedEpisode]:
    """Actions recorded so many frames before (negative: after) the motion that they make."""
    return lambda one: replace(one, actions=np.roll(one.actions, -frames, 0))


def with_actions(change: Callable[[np.ndarray], None]) -> Callable[[RecordedEpisode], RecordedEpisode]:
    def by(one: RecordedEpisode) -> RecordedEpisode:
        actions = one.actions.copy()
        change(actions)
        return replace(one, actions=actions)

    return by


def cut_short(one: RecordedEpisode) -> RecordedEpisode:
    kept = slice(0, 8)
    return replace(
        one,
        png={"agentview": one.png["agentview"][kept]},
        state=one.state[kept],
        actions=one.actions[kept],
        executed_actions=one.executed_actions[kept],
        reward=one.reward[kept],
        control_source=one.control_source[kept],
    )


def frozen(one: RecordedEpisode) -> RecordedEpisode:
    frames = one.png["agentview"]
    return replace(one, png={"agentview": [*frames[:10], *[frames[10]] * (len(frames) - 10)]})


def black(one: RecordedEpisode) -> RecordedEpisode:
    return replace(one, png={"agentview": [encode_png(np.zeros((SIZE, SIZE, 3), np.uint8))] * one.length})


def outlier(actions: np.ndarray) -> None:
    actions[3, 1] = 60.0


def cut_off(actions: np.ndarray) -> None:
    actions[:, 0] = np.clip(actions[:, 0] * 50, -1, 1)


def dead(actions: np.ndarray) -> None:
    actions[:, 3] = -1.0


FAULTS: dict[str, tuple[Change, str, str]] = {
    "duplicate": (lambda episodes: [*episodes, episodes[3]], "duplicates", "earlier episode: episode 16"),
    "truncated": (changed(5, by=cut_short), "lengths", "usual length for the instruction: episode 5"),
    "outlier": (changed(2, by=with_actions(outlier)), "actions", "dimension 1 (y) has 1 values more than ten times"),
    "cut off": (everywhere(with_actions(cut_off)), "actions", "dimension 0 (x) stands at its limits in"),
    "dead gripper": (everywhere(with_actions(dead)), "gripper", "never opens or closes"),
    "late motion": (everywhere(shifted(6)), "action and motion", "moves 300 ms after the action"),
    "motion first": (everywhere(shifted(-2)), "action and motion", "has moved 2 frames before the action"),
    "frozen camera": (
        changed(1, 4, by=frozen),
        "cameras",
        "agentview stands still while the arm moves in episodes 1, 4",
    ),
    "black camera": (changed(7, by=black), "cameras", "agentview is black in episode 7"),
    "swapped instruction": (
        changed(6, by=lambda one: replace(one, instruction=TASKS[1])),
        "pictures and instruction",
        "one other instruction: episode 6",
    ),
    "spelled otherwise": (
        changed(0, by=lambda one: replace(one, instruction="Push  the red block.")),
        "instructions",
        "spelled in several ways: 'Push  the red block.', 'push the red block'",
    ),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clean"))


def test_a_clean_dataset_has_no_fault_and_every_check_could_tell(clean: Path) -> None:
    checks = check_datasets([clean])
    assert not faults(checks)
    assert len(checks) == 11
    assert {check.status for check in checks} == {"ok"}
    (lag,) = [check for check in checks if check.name == "action and motion"]
    assert lag.found.startswith("the arm moves 0 ms after the action")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_by_its_check_alone(fault: str, tmp_path: Path) -> None:
    change, name, found = FAULTS[fault]
    checks = faults(check_datasets([write(tmp_path, change)]))
    assert list(checks) == [name]
    assert found in checks[name].found
    assert checks[name].fix


def test_what_cannot_be_told_is_not_ok(tmp_path: Path) -> None:
    data = read(write(tmp_path, lambda episodes: episodes[:3]))
    few = replace(data, state=data.state[:, :0], grippers=())
    unknown = [check.name for check in check_recorded(few) if check.status == "unknown"]
    assert unknown == ["lengths", "gripper", "action and motion", "cameras", "pictures and instruction"]
    assert not faults(check_recorded(few))


def test_gaps_in_time_and_numbers_that_are_none(clean: Path) -> None:
    data = read(clean)
    late = data.time.copy()
    late[data.starts[4] + 7 : data.starts[5]] += 0.2
    assert "episode 4" in faults(check_recorded(replace(data, time=late)))["time"].found
    state = data.state.copy()
    state[data.starts[2] + 1, 0] = np.nan
    found = faults(check_recorded(replace(data, state=state)))
    assert "episode 2" in found["numbers"].found and list(found) == ["numbers"]


def test_drift_between_datasets(clean: Path, tmp_path: Path) -> None:
    def in_degrees(one: RecordedEpisode) -> RecordedEpisode:
        return replace(one, state=one.state * np.array([57.3, 1, 1, 1], np.float32))

    (tmp_path / "same").mkdir()
    same = write(tmp_path / "same", lambda episodes: episodes[:12])
    assert not faults(check_datasets([clean, same]))
    other = write(tmp_path, everywhere(in_degrees))
    (drift,) = faults(check_datasets([clean, other])).values()
    assert drift.name == "dataset against dataset" and "state 0: ranges over" in drift.found


def test_the_command_says_it_and_exits_with_1(tmp_path: Path) -> None:
    dataset = write(tmp_path, changed(7, by=black))
    done = CliRunner().invoke(app, ["doctor", "--dataset", str(dataset), "--json"])
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert [check["name"] for check in answer["checks"] if check["status"] == "wrong"] == ["cameras"]
    both = CliRunner().invoke(app, ["doctor", "tabletop_grpo", "--dataset", str(dataset)])
    assert both.exit_code == 2 and "got tabletop_grpo and --dataset" in both.stderr


def test_many_episodes_are_compared_in_little_memory(tmp_path):
    data, times = read(write(tmp_path)), 10
    several = {"starts": np.tile(data.starts, times), "lengths": np.tile(data.lengths, times)}
    several["looked_at"] = np.arange(times * len(data.lengths))
    many = replace(data, instruction=data.instruction * times, **several, first=np.tile(data.first, (times, 1)))
    many = replace(many, last=np.tile(data.last, (times, 1)))
    tracemalloc.start()
    check_instructions(many)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * (many.first.nbytes + many.last.nbytes), f"{peak / 2**20:.0f} MiB"
