"""Behavior cloning: it learns, resumes to the bit, survives NaN, Ctrl-C and SIGKILL."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from vla_rl.common.distributed.tensor_files import CheckpointError
from vla_rl.data.config import DatasetError
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.training import bc_trainer
from vla_rl.training.bc_loop import train_bc
from vla_rl.training.bc_trainer import BCTrainer, open_bc_dataset
from vla_rl.training.checkpoint import list_checkpoints, load_checkpoint
from vla_rl.training.config import SFTConfig
from vla_rl.training.trainer import TrainingDivergedError
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

ENV = DummyConfig(num_envs=4, image_size=32)
AUGMENT = {"shift": 2, "brightness": 0.1, "contrast": 0.1}


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "demos"
    collect_dataset(ENV, CollectConfig(dataset=str(path), episodes_per_task=20))
    return path


def make_policy(seed: int = 0, **options):
    values = {"image_size": 32, "chunk_size": 2, "precision": "fp32", "keyframe_loss_weight": 0.1, **options}
    return OpenVLAConfig.model_validate(values).build(ENV.env_spec(), seed=seed)


def options(demos: Path, **values) -> SFTConfig:
    defaults = {
        "datasets": str(demos),
        "steps": 6,
        "batch_size": 4,
        "optim": {"warmup_steps": 2},
        "log_every": 1,
        "save_every": 3,
    }
    values["optim"] = defaults["optim"] | values.get("optim", {})
    return SFTConfig.model_validate(defaults | values)


class Log:
    """Keeps what is logged, and can stop the run there."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.steps = stop_at, {}

    def __call__(self, step: int, metrics: dict) -> None:
        self.steps[step] = metrics
        if step == self.stop_at:
            raise _Stop

    @property
    def losses(self) -> dict[int, float]:
        return {step: metrics["loss"] for step, metrics in self.steps.items()}


class _Stop(Exception):
    pass


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass
class Finished:
    """A run of the default options with seed 5, for tests that go on from it or compare with it.

    Attributes:
        folder: the run's, with all checkpoints; copy it before anything is changed in it.
    """

    folder: Path
    losses: dict[int, float]
    weights: dict[str, torch.Tensor]

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.folder, folder))


@pytest.fixture(scope="module")
def finished(demos, tmp_path_factory) -> Finished:
    folder, policy, log = tmp_path_factory.mktemp("sft") / "run", make_policy(), Log()
    train_bc(policy, options(demos, keep_checkpoints=5), folder, log, seed=5, progress=False)
    return Finished(folder, log.losses, weights(policy))


def test_datasets_of_other_instructions_than_the_environments_are_told_once(demos, tmp_path):
    spec, log = ENV.env_spec(), Log()
    other = replace(spec, tasks=dict.fromkeys(spec.tasks, "fold the towel"))
    two = [{"path": str(demos)}, {"path": str(shutil.copytree(demos, tmp_path / "copy"))}]
    with pytest.warns(UserWarning, match="no instruction in") as caught:
        train_bc(make_policy(), options(demos, datasets=two, steps=1), tmp_path, log, env_spec=other, progress=False)
    (text,) = [str(one.message) for one in caught if "no instruction in" in str(one.message)]
    assert str(demos) in text and str(tmp_path / "copy") in text and "'fold the towel'" in text
    assert all(repr(instruction) in text for instruction in list(spec.tasks.values())[:3])
    first, *_ = spec.tasks
    some_known = replace(spec, tasks=other.tasks | {first: f" {spec.tasks[first].upper()}."})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="datasets: no instruction")
        for known in (spec, some_known, None):
            open_bc_dataset(options(demos), make_policy(), known)


def test_it_learns_and_the_result_loads(demos, tmp_path):
    policy, log = make_policy(), Log()
    config = options(
        demos, steps=30, batch_size=8, optim={"lr": 3e-3, "warmup_steps": 3}, validation_fraction=0.1, save_every=30
    )
    result = train_bc(policy, config, tmp_path, log, env_spec=ENV.env_spec(), progress=False)
    first, last = log.steps[1], log.steps[30]
    late = [log.steps[step]["action_l1"] for step in range(16, 31)]  # Of one batch of eight it goes up and down.
    assert last["bc_loss"] < 0.5 * first["bc_loss"] and np.mean(late) < 0.8 * first["action_l1"]
    assert last["validation/bc_loss"] < 0.7 * first["bc_loss"]
    assert result["episodes"] == 36 and result["num_bad_steps"] == 0 and result["loss"] == last["loss"]
    loaded = load_policy(result["policy"])
    assert same(weights(loaded), weights(policy))
    stats = loaded.norm_stats
    assert stats.action.mask.tolist() == [True] * 6 + [False] and stats.name == "demos"


def check_cut_at_4(demos: Path, folder: Path, extra: dict, whole: dict[int, float]) -> dict[str, torch.Tensor]:
    """Check what a run logs that breaks off after the checkpoint of step 3, and goes on; its weights."""
    config = options(demos, **extra)
    cut, rest = Log(stop_at=4), Log()
    with pytest.raises(_Stop):
        train_bc(make_policy(), config, folder, cut, seed=5, progress=False)
    torch.manual_seed(123)  # Global random state must not matter.
    policy = make_policy()
    for parameter in policy.trainable_parameters():  # Nor the weights before the checkpoint was loaded.
        parameter.data.add_(1.0)
    train_bc(policy, config, folder, rest, seed=5, progress=False)
    assert list(rest.losses) == [4, 5, 6]
    assert {**cut.losses, **rest.losses} == whole
    return weights(policy)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(demos, finished, tmp_path):
    assert same(check_cut_at_4(demos, tmp_path, {}, finished.losses), finished.weights)
    written = (folder / "policy/model.safetensors" for folder in (tmp_path, finished.folder))
    assert len({file.read_bytes() for file in written}) == 1


def test_a_resumed_run_with_all_that_has_state_equals_an_uninterrupted_one_to_the_bit(demos, tmp_path):
    extra = {
        "optim": {"name": "muon", "weight_decay": 0.1},
        "ema_decay": 0.9,
        "augment": AUGMENT,
        "grad_accumulation": 2,
    }
    policy, whole = make_policy(), Log()
    train_bc(policy, options(demos, **extra), tmp_path / "whole", whole, seed=5, progress=False)
    assert same(check_cut_at_4(demos, tmp_path / "cut", extra, whole.losses), weights(policy))
    written = (tmp_path / name / "policy/model.safetensors" for name in ("whole", "cut"))
    assert len({file.read_bytes() for file in written}) == 1


def test_what_a_resumed_run_logs_is_of_all_steps_since_the_last_log(demos, tmp_path):
    """A checkpoint between two logs: the mean was of the steps after it alone."""
    config = options(demos, log_every=2)
    whole, cut, rest = Log(), Log(stop_at=4), Log()
    train_bc(make_policy(), config, tmp_path / "whole", whole, seed=5, progress=False)
    with pytest.raises(_Stop):
        train_bc(make_policy(), config, tmp_path / "cut", cut, seed=5, progress=False)
    train_bc(make_policy(), config, tmp_path / "cut", rest, seed=5, progress=False)
    assert list(rest.losses) == [4, 6]
    assert {**cut.losses, **rest.losses} == whole.losses


def test_another_seed_draws_otherwise(demos, finished, tmp_path):
    for seed in (5, 6):  # Of the same weights: nothing was learned before the first step.
        log = Log()
        train_bc(make_policy(), options(demos, steps=1), tmp_path / str(seed), log, seed=seed, progress=False)
        assert (log.losses[1] == finished.losses[1]) == (seed == 5)


def test_resuming_with_other_options_is_refused(demos, finished, tmp_path):
    folder = finished.copy(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"made with other options \(sft.optim.lr: there 0.0003, now 0.001\)"):
        train_bc(make_policy(), options(demos, optim={"lr": 1e-3}), folder, Log(), seed=5, progress=False)
    result = train_bc(make_policy(), options(demos, log_every=2), folder, Log(), seed=5, progress=False)
    assert result["steps"] == 6


def test_more_steps_at_a_constant_rate_equal_as_many_at_once_and_those_of_a_cosine_are_refused(
    demos, finished, tmp_path
):
    results = {}
    for name, steps in (("short", (2,)), ("grown", (2, 4)), ("whole", (4,))):
        for num in steps:
            config = options(demos, final_lr_fraction=1.0, steps=num)
            train_bc(make_policy(), config, tmp_path / name, Log(), seed=5, progress=False)
        results[name] = (tmp_path / name / "policy/model.safetensors").read_bytes()
    assert results["grown"] == results["whole"] != results["short"]
    cosine = finished.copy(tmp_path / "cosine")
    with pytest.raises(CheckpointError, match=r"made with other options \(sft.steps: there 6, now 9\)"):
        train_bc(make_policy(), options(demos, steps=9), cosine, Log(), seed=5, progress=False)


def test_checkpoints_hold_no_frozen_weights_and_only_the_last_are_kept(demos, tmp_path):
    policy = make_policy(trainable="frozen_vision")
    before = weights(policy)
    train_bc(policy, options(demos, save_every=1, keep_checkpoints=2), tmp_path, Log(), progress=False)
    kept = list_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in kept] == ["step_00000005", "step_00000006"]
    tensors, state = load_checkpoint(kept[-1])
    assert state["counters"]["num_steps"] == 6
    assert not any(name.startswith("policy.network.vision_backbone.") for name in tensors)
    changed = {name for name, tensor in weights(policy).items() if not torch.equal(tensor, before[name])}
    assert changed and not any("vision_backbone" in name for name in changed)


def test_learning_rate_warms_up_and_follows_a_cosine(demos, tmp_path):
    log = Log()
    config = options(demos, steps=10, optim={"warmup_steps": 2, "lr": 1e-3}, final_lr_fraction=0.1)
    train_bc(make_policy(), config, tmp_path, log, progress=False)
    rates = [log.steps[step]["lr"] for step in range(1, 11)]
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert rates[6] == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))  # Half-way down: step 6 of 2..10.
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)


def test_accumulated_gradients_equal_the_whole_batch(demos):
    data = open_bc_dataset(options(demos), make_policy(), ENV.env_spec())
    part = data.parts[0]
    whole_chunks = part.rows[part.rows + 1 < part.ends[part.rows]][:6]  # All actions valid: equal weights.
    results = []
    for accumulation in (1, 3):
        policy = make_policy()
        policy.set_norm_stats({"q01": -np.ones(7), "q99": np.ones(7)}, {"q01": -np.ones(8), "q99": np.ones(8)})
        cloning = BCTrainer(policy, options(demos, grad_accumulation=accumulation, optim={"warmup_steps": 0}))
        results.append((cloning.step(part.batch(whole_chunks, 2)), weights(policy)))
    (one, a), (three, b) = results
    assert one["loss"] == pytest.approx(three["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(three["grad_norm"], rel=1e-4)
    assert all(torch.allclose(a[name], b[name], atol=2e-4) for name in a)


def test_averaged_weights_by_hand(demos, tmp_path):
    policy = make_policy()
    data = open_bc_dataset(options(demos), policy, ENV.env_spec())
    policy.set_norm_stats({"q01": -np.ones(7), "q99": np.ones(7)}, {"q01": -np.ones(8), "q99": np.ones(8)})
    cloning = BCTrainer(policy, options(demos, ema_decay=0.15))
    name = next(iter(cloning.trainer.parameters))
    expected = cloning.trainer.parameters[name].detach().clone()
    for step in range(3):
        cloning.step(data.batch(4, 0, step))
        decay = min(0.15, (2 + step) / (11 + step))
        expected = decay * expected + (1 - decay) * cloning.trainer.parameters[name].detach()
    assert torch.allclose(cloning.trainer.ema[name], expected, atol=1e-7)
    own = cloning.trainer.parameters[name].detach().clone()
    averaged = cloning.trainer.ema[name].clone()
    with cloning.averaged_weights():
        assert torch.equal(policy.get_parameter(name), averaged)
    assert torch.equal(cloning.trainer.ema[name], averaged)
    assert torch.equal(policy.get_parameter(name), own)


def test_bf16_through_accelerate(demos, finished, tmp_path):
    log = Log()
    train_bc(make_policy(), options(demos, precision="bf16", steps=1), tmp_path, log, seed=5, progress=False)
    assert log.losses[1] == pytest.approx(finished.losses[1], rel=0.05) and log.losses[1] != finished.losses[1]


def test_statistics_of_a_pretrained_policy_are_kept(demos, tmp_path):
    policy = make_policy()
    policy.set_norm_stats({"q01": -np.ones(7), "q99": np.ones(7)}, {"q01": -np.ones(8), "q99": np.ones(8)}, name="old")
    train_bc(policy, options(demos, steps=1), tmp_path, Log(), progress=False)
    assert policy.norm_stats.name == "old" and policy.norm_stats.action.q99.tolist() == [1] * 7


# --- what goes wrong -----------------------------------------------------------------------------


def poison(policy, bad_calls, kind: str = "loss") -> None:
    """Make the loss, or its gradient, NaN in the given calls."""
    real, calls = policy.bc_loss, []

    def bc_loss(*args, **kwargs):
        loss, metrics = real(*args, **kwargs)
        calls.append(1)
        if len(calls) in bad_calls:
            if kind == "loss":
                loss = loss * math.nan
            else:
                loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, metrics

    policy.bc_loss = bc_loss


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_with_nan_is_skipped_and_counted(demos, kind):
    policy = make_policy()
    data = open_bc_dataset(options(demos), policy, ENV.env_spec())
    policy.set_norm_stats({"q01": -np.ones(7), "q99": np.ones(7)}, {"q01": -np.ones(8), "q99": np.ones(8)})
    cloning = BCTrainer(policy, options(demos))
    poison(policy, {2}, kind)
    cloning.step(data.batch(4, 0, 0))
    before = weights(policy)
    assert cloning.step(data.batch(4, 0, 1)) == {"bad_step": 1.0}
    assert same(weights(policy), before) and cloning.trainer.num_bad_steps == 1
    assert cloning.step(data.batch(4, 0, 2))["loss"] > 0 and not same(weights(policy), before)


def test_too_many_bad_steps_stop_the_run_with_the_last_good_state_kept(demos, tmp_path, monkeypatch):
    monkeypatch.setattr(SFTConfig, "max_bad_steps", 3)
    policy, log = make_policy(), Log()
    poison(policy, {2, 4, 5, 6})
    with pytest.raises(
        TrainingDivergedError, match=r"3 steps in a row, to step 6.*smaller sft.optim.lr.*Saved as .*step_00000006"
    ):
        train_bc(policy, options(demos, steps=9), tmp_path, log, progress=False)
    tensors, state = load_checkpoint(tmp_path / "checkpoints" / "step_00000006")
    assert state["counters"]["num_bad_steps"] == 4
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())
    assert log.steps[3]["num_bad_steps"] == 1


def test_ctrl_c_saves_and_the_run_goes_on(demos, finished, tmp_path):
    class Interrupt(Log):
        def __call__(self, step, metrics):
            super().__call__(step, metrics)
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    cut, rest = Interrupt(), Log()
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step 2; saved"):
        train_bc(make_policy(), options(demos), tmp_path / "cut", cut, seed=5, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (tmp_path / "cut" / "checkpoints" / "step_00000002").is_dir()
    train_bc(make_policy(), options(demos), tmp_path / "cut", rest, seed=5, progress=False)
    assert {**cut.losses, **rest.losses} == finished.losses


def test_datasets_that_do_not_fit(demos, tmp_path):
    wrist_spec = ENV.model_copy(update={"cameras": ("wrist",)}).env_spec()
    wrist_policy = OpenVLAConfig(image_size=32, cameras=("wrist",)).build(wrist_spec)
    with pytest.raises(DatasetError, match=r"policy needs \['wrist'\]; missing \['wrist'\]"):
        train_bc(wrist_policy, options(demos), tmp_path, Log(), progress=False)
    with pytest.raises(DatasetError, match="recorded at 10 fps, the environment is controlled at 20 Hz"):
        train_bc(make_policy(), options(demos), tmp_path, Log(), env_spec=replace(ENV.env_spec(), control_hz=20.0))
    with pytest.raises(DatasetError, match="dataset not found"):
        train_bc(make_policy(), options(tmp_path / "none"), tmp_path, Log(), progress=False)


def test_a_corrupt_checkpoint_is_skipped(demos, finished, tmp_path):
    folder = finished.copy(tmp_path / "run")
    newest = list_checkpoints(folder / "checkpoints")[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    again = Log()
    with pytest.warns(UserWarning, match="skipping a broken checkpoint"):
        train_bc(make_policy(), options(demos, keep_checkpoints=5), folder, again, seed=5, progress=False)
    assert again.losses == {step: finished.losses[step] for step in (4, 5, 6)}


RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_sft import make_policy, options
from vla_rl.training.bc_loop import train_bc
folder = Path(sys.argv[2])
folder.mkdir(exist_ok=True)
with open(folder / "losses.jsonl", "a") as file:
    def log(step, metrics):
        file.write(json.dumps([step, metrics["loss"]]) + "\\n")
        file.flush()
    train_bc(make_policy(), options(Path(sys.argv[1]), steps=40, save_every=2), folder, log, seed=1, progress=False)
"""


@pytest.mark.slow
def test_sigkill_at_random_moments(demos, tmp_path):
    here = str(Path(__file__).resolve().parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    rng = np.random.default_rng(0)

    def start(folder: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", RUN, str(demos), str(folder), here], env=env)

    def losses(folder: Path) -> list[tuple[int, float]]:
        import json

        lines = (folder / "losses.jsonl").read_text().splitlines() if (folder / "losses.jsonl").exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    assert start(tmp_path / "whole").wait() == 0
    kills = 0
    for _ in range(3):
        process, before = start(tmp_path / "cut"), len(losses(tmp_path / "cut"))
        while process.poll() is None and len(losses(tmp_path / "cut")) < before + 7:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.3)))
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert kills == 3
    assert start(tmp_path / "cut").wait() == 0
    whole = dict(losses(tmp_path / "whole"))
    assert set(losses(tmp_path / "cut")) == set(whole.items()) and len(whole) == 40  # Repeated steps too.
    assert (tmp_path / "cut/policy/model.safetensors").read_bytes() == (
        tmp_path / "whole/policy/model.safetensors"
    ).read_bytes()
    shutil.rmtree(tmp_path / "cut")


def test_accelerate_may_change_precision_within_a_process():
    device = torch.device("cpu")
    assert bc_trainer._accelerator("bf16", device).mixed_precision == "bf16"
    assert bc_trainer._accelerator("no", device).mixed_precision == "no"
