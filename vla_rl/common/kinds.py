"""What each `kind` of a recipe's section, and each kind of run, stands for: the one place that names other packages.

A file `methods/SECTION/KIND.py` of a package is a kind of that section too, by its `METHOD`, a config class: methods
that are not shown to gain stand there, and nothing else names them.
"""

from __future__ import annotations

from pathlib import Path

# section -> kind -> where its config class lives.
KINDS: dict[str, dict[str, str]] = {
    "env": {
        "tabletop": "sim.tabletop:TabletopConfig",
        "libero": "sim.libero:LiberoConfig",
        "robosuite": "sim.robosuite.env:RobosuiteConfig",
        "maniskill": "sim.maniskill:ManiSkillConfig",
        "metaworld": "sim.metaworld:MetaWorldConfig",
        "robotwin": "sim.robotwin:RoboTwinConfig",
        "gymnasium": "sim.gymnasium_env:GymnasiumConfig",
        "remote": "sim.remote:RemoteConfig",
        "robot": "real_robot.contract.env:RobotEnvConfig",
        "world_model": "world_model.env.config:WorldModelEnvConfig",
    },
    "world_model": {
        "latent_video": "world_model.fit.config:FitConfig",
    },
    "failure": {
        "conformal": "real_robot.failure.conformal:FailureConfig",
    },
    "transport": {
        "ros1": "real_robot.transports.ros1:Ros1Config",
        "ros2": "real_robot.transports.configs:Ros2Config",
        "rclpy": "real_robot.transports.rclpy_node:RclpyConfig",
        "rosbridge": "real_robot.transports.configs:RosbridgeConfig",
        "lerobot": "real_robot.transports.lerobot:LeRobotConfig",
    },
    "policy": {
        "openvla": "vla_rl.policies.openvla.config:OpenVLAConfig",
        "lerobot": "vla_rl.policies.lerobot.config:LeRobotConfig",
        "value_guided": "vla_rl.algorithms.offpolicy.value_guided_config:ValueGuidedConfig",
    },
    "algo": {
        "grpo": "vla_rl.algorithms.grpo:GRPOConfig",
        "rloo": "vla_rl.algorithms.grpo:RLOOConfig",
        "ppo": "vla_rl.algorithms.ppo:PPOConfig",
        "reinforce_pp": "vla_rl.algorithms.reinforce_pp:ReinforcePPConfig",
    },
    "offline": {
        "cloning": "vla_rl.algorithms.offpolicy.logged:CloningConfig",
        "filtered": "vla_rl.algorithms.offpolicy.logged:FilteredConfig",
        "advantage_weighted": "vla_rl.algorithms.offpolicy.logged:AdvantageWeightedConfig",
        "best_of_n": "vla_rl.algorithms.offpolicy.logged:BestOfNConfig",
    },
    "dynamics": {
        "transformer": "world_model.model.dynamics:TransformerConfig",
        "wan": "world_model.model.wan:WanConfig",
    },
    "clip_source": {},
    "values": {
        "world_model": "world_model.env.action_values:WorldModelValuesConfig",
    },
    "env.reward": {
        "learned": "vla_rl.rewards.kinds:LearnedRewardConfig",
        "simulator": "vla_rl.rewards.kinds:SimulatorRewardConfig",
    },
    "rollout": {
        "local": "vla_rl.rollout.source:LocalRolloutConfig",
        "ray": "vla_rl.rollout.actors.rollouts:RayRolloutConfig",
    },
    "plan": {
        "best_of_n": "world_model.env.planning:PlanConfig",
    },
}

# kind of run -> where the class of its recipes lives.
RUNS: dict[str, str] = {
    "eval": "vla_rl.recipe.recipe:Recipe",
    "sft": "vla_rl.recipe.runs:SFTRecipe",
    "train": "vla_rl.recipe.recipe:TrainRecipe",
    "fit": "vla_rl.recipe.runs:FitRecipe",
    "loop": "vla_rl.recipe.runs:LoopRecipe",
    "offline": "vla_rl.recipe.runs:OfflineRecipe",
    "online": "vla_rl.recipe.runs:OnlineRecipe",
    "hil": "vla_rl.recipe.runs:HilRecipe",
    "rac": "vla_rl.recipe.runs:RacRecipe",
    "reward": "vla_rl.recipe.runs:RewardRecipe",
    "failure": "vla_rl.recipe.runs:FailureRecipe",
    "hub": "vla_rl.recipe.runs:HubRecipe",
}


# section -> the class that whatever it holds extends.
BASES: dict[str, str] = {
    "env": "vla_rl.interfaces:EnvConfig",
    "world_model": "vla_rl.interfaces:WorldModelFitConfig",
    "failure": "vla_rl.interfaces:FailureDetectionConfig",
    "policy": "vla_rl.policies.base:PolicyConfig",
    "algo": "vla_rl.algorithms.base:AlgoConfig",
    "offline": "vla_rl.algorithms.offpolicy.offline:OfflineConfig",
    "values": "vla_rl.algorithms.base:ActionValuesConfig",
    "plan": "vla_rl.interfaces:PlanningConfig",
    "env.reward": "vla_rl.rewards.base:RewardConfig",
    "rollout": "vla_rl.rollout.source:RolloutConfig",
    "transport": "real_robot.transports.base:TransportConfig",
    "dynamics": "world_model.interfaces:DynamicsConfig",
    "clip_source": "world_model.data.clips:ClipSourceConfig",
}


# Those that the tables above name.
OUR_PACKAGES = sorted({target.partition(".")[0] for kinds in KINDS.values() for target in kinds.values()})
for _package in OUR_PACKAGES:
    _methods = Path(__file__).resolve().parents[2] / _package / "methods"
    for _file in sorted(_methods.rglob("*.py")):
        _section, _kind = ".".join(_file.relative_to(_methods).parts[:-1]), _file.stem
        KINDS[_section][_kind] = f"{_package}.methods.{_section}.{_kind}:METHOD"
# Where a section names none.
DEFAULT_KINDS = {"plan": "best_of_n", "offline": "best_of_n", "rollout": "local", "dynamics": "transformer"}
# Options that are such a section under another name; `OPTION=KIND` is short for `OPTION.kind=KIND` there too.
SECTION_OF = {
    "real_env": "env",
    "env.first_frames": "env",
    "real_env.reward": "env.reward",
    "eval.plan": "plan",
    "collect.plan": "plan",
    "algo.values": "values",
    "offline.algo": "algo",
    "world_model.model.dynamics": "dynamics",
    "world_model.clip_source": "clip_source",
}
