"""One update of each kind on a fixed batch, for `test_distributed.py`: alone, or as one of several processes.

torchrun --nproc-per-node 2 tests/vla_rl/together.py POLICY DATASET OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from planted_values import PlantedValuesConfig
from safetensors.torch import save_file
from test_memory import peak_by_the_allocator
from tiny_run import make_recipe

from sim.dummy import DummyConfig
from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.common.distributed.fsdp import local, whole
from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.distributed.tensor_files import trained_weights
from vla_rl.interfaces import VecEnv
from vla_rl.methods.algo.dr_grpo import DRGRPOConfig
from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.runner import collect
from vla_rl.training.bc_trainer import BCTrainer, open_bc_dataset
from vla_rl.training.config import SFTConfig
from vla_rl.training.memory import _chunk, _observation, _unit_statistics
from vla_rl.types import Episode, EpisodeSpec

ENV = DummyConfig(num_envs=4, tasks=("reach_red",), horizon=8)
GROUPS, GROUP_SIZE = 5, 4  # Five groups in two processes: three and two.
SMALL = {"minibatch_size": 14, "micro_batch_size": 3, "epochs": 2, "optim": {"lr": 1e-3}}
MEMORY_OPTIONS = {"precision": "fp32"}
MEMORY_BATCH = 2
SPEC = fake_env_spec()
ALGOS: dict[str, AlgoConfig] = {
    "grpo": GRPOConfig(**SMALL, kl_coef=0.1, loss_reduction="trajectory_mean", filter_groups=False),
    "grpo_filtered": GRPOConfig(**SMALL),
    "grpo_lora": GRPOConfig(**SMALL, kl_coef=0.1),
    "grpo_smolvla": GRPOConfig(**SMALL, kl_coef=0.1),
    "dr_grpo": DRGRPOConfig(**SMALL, values=PlantedValuesConfig(), candidates=2, coefficients=(0.5, 0.5)),
    "reinforce_pp": ReinforcePPConfig(**SMALL, loss_reduction="trajectory_mean"),
    "ppo": PPOConfig(**SMALL, entropy_coef=0.01),
    "ppo_shuffled": PPOConfig(**SMALL, critic_warmup=1),
}

OPTIONS = {
    "grpo_lora": ("policy.lora={rank: 4}", "policy.trainable=lora"),
    "ppo": ("policy.value_head=true", "policy.gradient_checkpointing=true"),
    "ppo_shuffled": ("policy.value_head=true",),
    "grpo_smolvla": ("policy.kind=lerobot",),
}
FOLDERS = {"grpo_smolvla": "smolvla"}  # Of the policy, beside the other one's, which the rest has.


def save_smolvla(folder: Path) -> Path:
    """A fresh tiny SmolVLA, saved."""
    config = LeRobotConfig(type="smolvla", preset="tiny", image_size=32, chunk_size=4, cameras=("agentview",))
    policy: Any = config.build(ENV.env_spec(), "cpu", 0)
    statistics = {"mean": [0.0], "std": [1.0], "min": [-1.0], "max": [1.0], "q01": [-1.0], "q99": [1.0]}
    policy.set_norm_stats({k: v * 7 for k, v in statistics.items()}, {k: v * 8 for k, v in statistics.items()})
    policy.save(folder)
    return folder


def make_policy(folder: Path, *options: str) -> Any:
    recipe = make_recipe(folder, *options, f"policy.path={folder}")  # Another kind would begin without one.
    config: Any = recipe.policy
    return config.build(ENV.env_spec(), "cpu", 0)


def roll_out(policy: Any) -> list[Episode]:
    """The same episodes in every process; success is set by hand, so that some groups are informative and some not."""
    env: VecEnv = ENV.build()
    specs = [EpisodeSpec("reach_red", "train", i) for i in range(GROUPS) for _ in range(GROUP_SIZE)]
    groups = [i for i in range(GROUPS) for _ in range(GROUP_SIZE)]
    episodes = collect(policy, env, specs, seed=1, groups=groups)
    env.close()
    for number, episode in enumerate(episodes):
        # The last process's groups: none informative, so that under GRPO it has nothing of its own to learn from.
        wins = episode.group < 3 and number % GROUP_SIZE < 1 + episode.group % 2
        episode.success = wins
        if episode.group >= 3:  # Ended by themselves: this process has no last value to estimate under PPO.
            last = int(episode.num_steps[-1]) - 1
            episode.terminated[-1, last], episode.truncated[-1, last] = True, False
        episode.reward[:] = 0
        episode.reward[-1, 0] = float(wins)
    return episodes


def reinforce(name: str, folder: Path, world: ProcessGroup) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights, optimizer state and metrics after two updates."""
    config = ALGOS[name]
    policy = make_policy(folder.with_name(FOLDERS.get(name, folder.name)), *OPTIONS.get(name, ()))
    episodes = roll_out(policy)
    world.distribute(policy)
    learner = config.build(policy, 0, control="shuffled_rewards" if "shuffled" in name else "none", world=world)
    share = range(GROUPS)[world.share(GROUPS)]
    own = [e for e in episodes if e.group in share]
    metrics: dict[str, float] = {}
    for _ in range(2):
        metrics = learner.update(learner.prepare(own))
    return whole_on_main(trained_weights(policy) | learner.state()[0], world), metrics


def whole_on_main(tensors: dict[str, torch.Tensor], world: ProcessGroup) -> dict[str, torch.Tensor]:
    """The tensors, gathered in process 0; nothing in the others."""
    with world.gathers(tensors.values()):
        return {name: whole(tensor) for name, tensor in tensors.items()} if world.is_main else {}


def clone(dataset: Path, folder: Path, world: ProcessGroup) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights, optimizer state, average and metrics after two steps of behavior cloning."""
    policy = make_policy(folder)
    config = SFTConfig(
        datasets=[str(dataset)], batch_size=7, grad_accumulation=2, ema_decay=0.5, optim={"warmup_steps": 0}
    )
    world.distribute(policy)
    cloning = BCTrainer(policy, config, world=world)
    data = open_bc_dataset(config, policy, ENV.env_spec())
    metrics: dict[str, float] = {}
    for step in range(2):
        metrics = cloning.step(data.batch(config.batch_size, 0, step))
    return whole_on_main(trained_weights(policy) | cloning.trainer.state()[0], world), metrics


def memory(world: ProcessGroup) -> dict[str, int]:
    """Bytes that this process holds of a policy and its optimizer, and the most that a step and acting take beside."""
    policy = OpenVLAConfig(**MEMORY_OPTIONS).build(SPEC)
    policy.norm_stats = _unit_statistics(policy, SPEC)
    world.distribute(policy)
    obs, chunk = _observation(policy, SPEC, MEMORY_BATCH), _chunk(policy, MEMORY_BATCH)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step() -> None:
        out = policy.evaluate(obs, chunk)
        (out.log_prob.sum() + out.entropy.sum()).backward()

    def act() -> None:
        with world.unsharded(policy):
            policy.act(obs)

    def held(tensors: Iterable[torch.Tensor]) -> int:
        return sum(local(t).numel() * t.element_size() for t in tensors)

    def least(call: Callable[[], None]) -> int:
        return min(peak_by_the_allocator(call) for _ in range(3))  # Gloo keeps a buffer longer now and then.

    step()
    optimizer.step()
    return {
        "weights": held(policy.parameters()),
        "gradients": held(p.grad for p in trained if p.grad is not None),
        "optim": {"name": held(t for entries in optimizer.state.values() for t in entries.values() if t.ndim)},
        "step": least(step),
        "rollout": least(act),
    }


def run(
    name: str, folder: Path, dataset: Path, world: ProcessGroup
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    return clone(dataset, folder, world) if name == "sft" else reinforce(name, folder, world)


def main(folder: Path, dataset: Path, output: Path) -> None:
    torch.set_num_threads(1)
    with launched_group(make_recipe(folder)) as world:
        for strategy in ("ddp", "fsdp"):
            for name in (*ALGOS, "sft"):
                tensors, metrics = run(name, folder, dataset, replace(world, strategy=strategy))
                if world.is_main:
                    target = output / f"{strategy}-{name}"
                    target.mkdir(parents=True)
                    save_file({n: t.detach().clone() for n, t in tensors.items()}, target / "tensors.safetensors")
                    (target / "metrics.json").write_text(json.dumps(metrics))
        found = world.gather(memory(replace(world, strategy="fsdp")))
        if world.is_main:
            (output / "memory.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
