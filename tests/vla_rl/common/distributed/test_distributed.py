"""Training in several processes: the same updates as one process, with ddp and fsdp, and what a run of it writes.

Real processes, over gloo on the CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import TIME_LIMIT, launch
from safetensors.torch import load_file
from tiny_run import make_recipe, metrics, save_policy
from together import ALGOS, ENV, FOLDERS, MEMORY_BATCH, MEMORY_OPTIONS, SPEC, run, save_smolvla
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

from vla_rl.cli import app as cli
from vla_rl.common.distributed import launched as outlines
from vla_rl.common.distributed.launched import LaunchedGroup, check
from vla_rl.common.distributed.process_group import ALONE
from vla_rl.common.distributed.tensor_files import trained_weights
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.methods.policy.advantage_conditioned import AdvantageConditionedPolicy, ContinuingConditionedPolicy
from vla_rl.policies.lerobot.act import LeRobotActPolicy
from vla_rl.policies.lerobot.diffusion import LeRobotDiffusionPolicy
from vla_rl.policies.lerobot.fast import LeRobotFastPolicy
from vla_rl.policies.lerobot.flow import ContinuingFlowPolicy, LeRobotFlowPolicy
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.success import rollout_metrics
from vla_rl.training.checkpoint import load_checkpoint
from vla_rl.training.memory import measure, per_process, skeleton, without_values
from vla_rl.training.train import train
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Keyframe, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

POLICY_CLASSES = (
    OpenVLAPolicy,
    LeRobotFlowPolicy,
    ContinuingFlowPolicy,
    LeRobotFastPolicy,
    LeRobotDiffusionPolicy,
    LeRobotActPolicy,
    AdvantageConditionedPolicy,
    ContinuingConditionedPolicy,
)
HERE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(4 * TIME_LIMIT)  # A backstop: `launch` ends what hangs.


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    save_smolvla(folder / FOLDERS["grpo_smolvla"])
    return save_policy(folder / "base")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("distributed") / "demos"
    collect_dataset(ENV, CollectConfig(dataset=str(path), episodes_per_task=4))
    return path


@pytest.fixture(scope="module")
def together(policy, dataset, tmp_path_factory) -> Path:
    """What two processes made of one update of each kind."""
    output = tmp_path_factory.mktemp("together")
    result = launch(str(HERE / "together.py"), str(policy), str(dataset), str(output))
    assert result.returncode == 0, result.stderr[-4000:]
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGOS, "sft"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_update_of_one(together, policy, dataset, strategy, name):
    folder = together / f"{strategy}-{name}"
    tensors, metrics = load_file(folder / "tensors.safetensors"), json.loads((folder / "metrics.json").read_text())
    expected, expected_metrics = run(name, policy, dataset, ALONE)
    start = trained_weights(load_policy(policy.with_name(FOLDERS.get(name, policy.name))))
    known = {n: t for n, t in start.items() if n in expected}
    assert name == "grpo_lora" or any((expected[n] - t).abs().max() > 1e-4 for n, t in known.items()), "nothing learned"
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        # Weights are compared by how far they moved; Adam makes much of rounding where a gradient is almost zero, as
        # that of a key's bias, which moves all scores alike.
        moved = value - start.get(key, torch.zeros_like(value))
        assert (tensors[key] - value).norm() <= 0.01 * moved.norm() + 2e-6, key
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key


@pytest.mark.slow
def test_the_memory_of_each_process_is_as_estimated(together):
    found = json.loads((together / "memory.json").read_text())
    mean = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
    fake = skeleton(OpenVLAConfig(**MEMORY_OPTIONS), SPEC, "cpu")
    with without_values(fake):
        whole = measure(fake, SPEC, batch_size=MEMORY_BATCH, rollout_batch=MEMORY_BATCH)
    estimate = per_process(whole, fake, len(found))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(estimate, part) == pytest.approx(mean[part], rel=0.01), part
    step = estimate.activations + estimate.logits + estimate.working + estimate.gathered
    for name, value in (("step", step), ("rollout", estimate.rollout)):
        seen = min(each[name] for each in found)  # Over gloo some keep a buffer longer than others.
        assert value == pytest.approx(seen, rel=0.15), f"{name}: estimated {value / 1e6:.2f} MB, {seen / 1e6:.2f} seen"


RUN = ("parallel=fsdp", "train.iterations=3", "train.keep_checkpoints=5", "train.evaluate=after", "algo.kl_coef=0.01")


def train_together(recipe: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return launch("vla_rl", "train", str(recipe), "--output", str(folder), *options, module=True)


@pytest.fixture(scope="module")
def recipe(policy, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("distributed") / "recipe.yaml"
    path.write_text(dump_yaml(make_recipe(policy, *RUN)))
    return path


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    """The folder of a run of two processes with fsdp."""
    folder = tmp_path_factory.mktemp("distributed") / "run"
    result = train_together(recipe, folder)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("report: ") == 1, "one process speaks"
    return folder


def cut_back(folder: Path, target: Path) -> Path:
    """A copy of a run without its last checkpoint and its result."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "checkpoints" / "step_00000003")
    shutil.rmtree(target / "policy")
    return target


def result_of(folder: Path) -> bytes:
    return (folder / "policy" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_by_two_to_the_bit(finished, recipe, tmp_path):
    again = cut_back(finished, tmp_path / "run")
    result = train_together(recipe, again, "--resume")
    assert result.returncode == 0, result.stderr[-4000:]
    assert result_of(again) == result_of(finished)
    assert metrics(again) == metrics(finished)


@pytest.mark.slow
def test_one_process_goes_on_with_a_run_of_two_and_two_with_its(finished, recipe, tmp_path):
    assert (finished / "evaluations" / "final.json").is_file() and (finished / "report.html").is_file()
    assert [row["step"] for row in metrics(finished)] == [1, 2, 3]
    assert metrics(finished)[0]["train/episodes"] == 16, "the episodes of both processes"
    assert metrics(finished)[0]["rollout/num_processes"] == 2
    alone = cut_back(finished, tmp_path / "run")
    train(load_recipe(recipe), alone, resume=True)
    assert [row["step"] for row in metrics(alone)] == [1, 2, 3]
    assert metrics(alone)[:2] == metrics(finished)[:2]
    files = [load_checkpoint(folder / "checkpoints" / "step_00000003")[0] for folder in (finished, alone)]
    layouts = [{name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in files]
    assert layouts[0] == layouts[1]
    expected = result_of(alone)
    shutil.rmtree(alone / "policy")
    result = train_together(recipe, alone, "--resume")  # Nothing is left to do but to write the policy.
    assert result.returncode == 0, result.stderr[-4000:]
    assert result_of(alone) == expected


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run(recipe, tmp_path):
    # The state with this index comes to the second process, in the second iteration.
    options = ("sampling.train_states=null", "sampling.first_state=7", "env.fault=die", "env.fault_index=14")
    result = train_together(recipe, tmp_path / "run", *options)
    assert result.returncode != 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "policy").exists()


# --- without other processes ------------------------------------------------------------------


@pytest.mark.parametrize(("num", "size"), [(5, 2), (4, 4), (7, 3), (2, 5)])
def test_shares_are_even_and_cover_everything(num, size):
    shares = [range(num)[LaunchedGroup(rank, size).share(num)] for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def make_episode(spec: EpisodeSpec) -> Episode:
    obs = Observation({}, np.zeros((2, 8), np.float32), ["reach"] * 2)
    terminated = np.array([[False, False], [True, False]])
    return Episode(
        spec=spec,
        obs=obs,
        chunks=ActionChunk(np.zeros((2, 2, 7), np.float32)),
        reward=terminated.astype(np.float32),
        terminated=terminated,
        truncated=np.zeros((2, 2), bool),
        num_steps=np.array([2, 1]),
        success=True,
        final_obs=obs.select([1]),
        group=3,
        info={"imagined": np.array([0.5, 1.0])},
    )


def test_outlines_keep_what_statistics_need():
    specs = [
        EpisodeSpec("reach_red", "train", 7),
        EpisodeSpec("reach_red", keyframe=Keyframe("dummy", "reach_red", 1, {})),
    ]
    for spec in specs:
        whole = make_episode(spec)
        copy = outlines._episode(json.loads(json.dumps(outlines._outline(whole))))
        assert copy.spec == whole.spec and (copy.spec.keyframe is None) == (whole.spec.keyframe is None)
        for name in ("num_chunks", "length", "total_reward", "success", "group", "lost"):
            assert getattr(copy, name) == getattr(whole, name), name
        assert (copy.info["imagined"] == whole.info["imagined"]).all()
        lone = rollout_metrics([whole])
        assert rollout_metrics([copy]) == lone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.groups=2"], "train.groups: got 2 for 4 processes"),
        (["parallel=fsdp", "algo.optim.name=muon"], "algo.optim.name: got 'muon', but with parallel=fsdp"),
        (["parallel=fsdp", "algo.optim.name=adamw_8bit"], "algo.optim.name: got 'adamw_8bit', but with parallel=fsdp"),
        (["device=cuda:1"], "device: got 'cuda:1', but each of 4 processes"),
        (["sft={datasets: nowhere, batch_size: 3}"], "sft.batch_size: got 3 for 4 processes"),
        (["sft={datasets: nowhere, optim: {name: muon}}", "parallel=fsdp"], "sft.optim.name: got 'muon'"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(policy, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(make_recipe(policy, *options), 4)


def test_other_commands_are_refused_under_a_launcher(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.app, ["list", "recipes"])
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert "list: runs in one process, and a launcher started 2" in result.output


@pytest.mark.parametrize("policy_class", POLICY_CLASSES, ids=lambda each: each.__name__)
def test_every_policy_can_be_sharded(policy_class):
    """FSDP changes the class of what it shards, which Python refuses where a Protocol is the first base."""
    sharded = type(f"FSDP{policy_class.__name__}", (FSDPModule, policy_class), {})
    policy = policy_class.__new__(policy_class)
    object.__setattr__(policy, "__class__", sharded)
    assert isinstance(policy, FSDPModule)
