"""Metric writers: JSONL that survives NaN, kills and resumes; TensorBoard; Weights & Biases offline."""

import json
import math
import struct

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from tiny_run import save_small_policy, small_recipe

from vla_rl.common.run_folder import read_metrics
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationMeta
from vla_rl.training.metrics import LogConfig, MetricLogger
from vla_rl.workflows.evaluate_policy import evaluate

QUIET = LogConfig(tensorboard=False, console=False)


def test_one_json_object_per_line_flushed_at_once(tmp_path):
    logger = MetricLogger(tmp_path / "run", QUIET)
    logger.log(0, {"train/success": np.float32(0.5), "loss/policy": torch.tensor(-0.25), "train/episodes": 64})
    # Read before closing: a kill now loses nothing.
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 0, "train/success": 0.5, "loss/policy": -0.25, "train/episodes": 64}
    ]
    logger.close()
    logger.close()


def test_nan_and_infinity_are_valid_json_and_read_as_nan(tmp_path):
    with MetricLogger(tmp_path, QUIET) as logger:
        logger.log(0, {"a": math.nan, "b": -math.inf, "c": 1.0})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 0, "a": None, "b": None, "c": 1.0}
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"]) and math.isnan(row["b"]) and row["c"] == 1.0


@pytest.mark.parametrize("value", ["high", None, [1.0, 2.0], torch.zeros(3)])
def test_what_is_no_number_is_named(tmp_path, value):
    with MetricLogger(tmp_path, QUIET) as logger, pytest.raises(ValueError, match="loss/policy"):
        logger.log(0, {"loss/policy": value})


def test_resume_forgets_later_steps_and_a_cut_line(tmp_path):
    with MetricLogger(tmp_path, QUIET) as logger:
        for step in range(6):
            logger.log(step, {"x": step})
            logger.log(step, {"y": 10 * step})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "x": 0.1')  # Killed in the middle of a write.
    assert len(read_metrics(path)) == 12
    with MetricLogger(tmp_path, QUIET, resume_step=3) as logger:
        logger.log(4, {"x": 44})
    assert [row["step"] for row in read_metrics(path)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert read_metrics(path)[-1] == {"step": 4, "x": 44}
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"], "nothing temporary is left"


def test_a_corrupt_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_tensorboard_holds_the_scalars_and_a_resume_replaces_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LogConfig(tensorboard=True, console=False)
    with MetricLogger(tmp_path, config) as logger:
        for step in range(4):
            logger.log(step, {"train/success": step / 10})
    with MetricLogger(tmp_path, config, resume_step=1) as logger:
        logger.log(2, {"train/success": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/success")]
    assert scalars == [(0, 0.0), (1, pytest.approx(0.1)), (2, pytest.approx(0.9))]


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """Keeps Weights & Biases from writing into the home folder."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def wandb_records(folder):
    """The records of an offline run's file: LevelDB's log format (blocks of 32 KiB), behind a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, place, part, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := -place % 32768) < 7 and left:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # Whole, or the last of several parts.
            records.append(Record.FromString(part))
            part = b""
    return records


@pytest.fixture
def evaluation() -> Evaluation:
    meta = EvaluationMeta(
        name="base", env="dummy", split="eval", seed=0, temperatures={"greedy": 0.0}, horizon={"push": 8},
        cameras=("agentview",), image_size=(32, 32), num_envs=1, protocol="by hand", config={}, created="now",
        wall_seconds=1.0,
    )  # fmt: skip
    episodes = [
        EpisodeRecord(mode="greedy", task="push", split="eval", index=i, sample=0, success=i == 0, steps=3, lost=False)
        for i in range(2)
    ]
    return Evaluation(meta=meta, episodes=tuple(episodes))


def history(run):
    """The rows of an offline run, each name -> JSON."""
    return [{i.key or "/".join(i.nested_key): i.value_json for i in r.history.item} for r in wandb_records(run)]


def test_wandb_offline_writes_a_run_to_sync(tmp_path, wandb_home, evaluation):
    import wandb

    config = LogConfig(
        wandb="offline",
        project="lab",
        entity="team",
        group="seeds",
        tags=("first", "lora"),
        tensorboard=False,
        console=False,
    )
    video = tmp_path / "base__push__greedy__eval-0000__success.mp4"
    imageio.mimwrite(video, np.zeros((3, 32, 32, 3), np.uint8), fps=5)
    with MetricLogger(tmp_path, config, run_config={"seed": 7}) as logger:
        logger.log_evaluation(0, evaluation, [video])
        logger.log(0, {"train/success": 0.25})
        logger.log(1, {"train/success": 0.5})
    wandb.teardown()  # Its service writes in the background; this waits for it.
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    content = file.read_bytes()
    for word in (b"train/success", b"seed", b"lab", b"team", b"seeds", b"first", b"lora"):
        assert word in content
    assert (tmp_path / "wandb_id.txt").read_text() in run.name
    (copied,) = (run / "files" / "media" / "videos").rglob("*.mp4")
    assert copied.read_bytes() == video.read_bytes()
    (shown,) = [row for row in history(run) if f"videos/{video.stem}/_type" in row]
    assert json.loads(shown[f"videos/{video.stem}/_type"]) == "video-file" and shown["step"] == "0"
    low, high = evaluation.rate("greedy").interval
    wanted = {"": 0.5, "_low": low, "_high": high, "_n": 2, "/push": 0.5}
    assert {end: json.loads(shown[f"evaluation/base/greedy{end}"]) for end in wanted} == pytest.approx(wanted)


def test_an_evaluation_alone_is_shown_too(tmp_path, wandb_home):
    import wandb

    recipe = small_recipe(save_small_policy(tmp_path / "policy"), "log.wandb=offline", "eval.videos=1")
    (tmp_path / "eval").mkdir()
    found = evaluate(recipe, tmp_path / "eval")
    wandb.teardown()
    (run,) = (tmp_path / "eval" / "wandb").glob("offline-run-*")
    (shown,) = [row for row in history(run) if "evaluation/policy/sampled" in row]
    assert json.loads(shown["evaluation/policy/sampled"]) == found.rate("sampled").rate
    videos = sorted(path.name for path in (tmp_path / "eval" / "videos").glob("*.mp4"))
    assert videos and len([key for key in shown if key.endswith("/_type")]) == len(videos)


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path, wandb_home):
    import wandb

    config = LogConfig(wandb="offline", tensorboard=False, console=False)
    for steps, resume_step in (((0, 1), None), ((2, 3), 1)):
        with MetricLogger(tmp_path, config, resume_step=resume_step) as logger:
            for step in steps:
                logger.log(step, {"train/success": step / 10})
        wandb.teardown()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    runs = [next(r.run for r in wandb_records(f) if r.WhichOneof("record_type") == "run") for f in folders]
    assert len(runs) == 2 and {run.run_id for run in runs} == {(tmp_path / "wandb_id.txt").read_text()}
    assert all(run.resume for run in runs)  # `wandb sync` appends to what is there of that id.


def test_console_prints_the_chosen_metrics(tmp_path, capsys):
    with MetricLogger(tmp_path, LogConfig(tensorboard=False)) as logger:
        logger.log(12, {"train/success": 0.4375, "loss/policy": -0.0123, "time/rollout": 3.0})
        logger.log(13, {"time/rollout": 3.0})
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.split() == ["step", "12", "train/success", "0.4375", "loss/policy", "-0.0123"]
