"""The protocols that plug-ins extend or implement: environments, policies, configs of world models and detectors.

- An environment (simulator, world model, robot): an `EnvConfig` that builds a `VecEnv`.
- A policy: a `vla_rl.policies.base.PolicyConfig` that builds a `Policy`.
- An algorithm: a `vla_rl.algorithms.base.AlgoConfig` that builds a `vla_rl.algorithms.learner.Learner`.
- A reward: a `vla_rl.rewards.base.RewardConfig` that builds a `RewardModel` (`env.reward`).
- A recipe's further sections with a `kind`: `world_model` (`WorldModelFitConfig`), `failure`
  (`FailureDetectionConfig`), `eval.plan` (`PlanningConfig`) and `algo.values` (`vla_rl.algorithms.base`).

Conformance tests run over each implementation (`tests/test_conformance.py`, `tests/test_policy_conformance.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from pydantic import Field, PositiveInt

from vla_rl.config import Config, Number
from vla_rl.types import ActionChunk, ActionPrefix, EnvSpec, EpisodeSpec, Keyframe, Observation, StepResult

if TYPE_CHECKING:
    from typing import Self

    import torch


class TrustError(ValueError):
    """A learned environment's trust is missing, unreadable or too low; the message says which figure and what to do."""


@runtime_checkable
class VecEnv(Protocol):
    """`num_envs` environments stepped together; each ends, and is reset, on its own.

    Methods take `env_ids`, the environments meant, in the order of the batch rows; None means all. A finished one may
    simply be left out of the next `step`, so no inference or simulation is spent on it. What a method returns is the
    caller's, who keeps it uncopied: no later call writes in it.

    Further abilities are protocols that callers ask for: `ProgressEnv`, `StatefulEnv`, `ImaginedEnv`.
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """Start one episode in each given environment. Returns their first observation (B rows).

        Raises:
            ValueError: unknown task or split, or an index outside the split.
        """
        ...

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """Execute a chunk, float32 (B, H, A) in the environment's units, in each given environment.

        Actions outside the bounds are clipped. NaN raises ValueError, and so does an environment whose episode is over.
        """
        ...

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """Return the full state of each given environment, for `EpisodeSpec.keyframe`."""
        ...

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """Return the scripted expert's next action, float32 (B, A), from privileged state.

        Raises:
            NotImplementedError: the environment has no expert for the task.
        """
        ...

    def close(self) -> None:
        """Release workers and renderers. May be called twice."""
        ...


@runtime_checkable
class ProgressEnv(VecEnv, Protocol):
    """An environment that says how far an episode is from success."""

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """Return about how many control steps the expert would need from here, float64 (B,); inf: it cannot finish.

        Raises:
            NotImplementedError: the simulator does not say.
        """
        ...


@runtime_checkable
class StatefulEnv(VecEnv, Protocol):
    """An environment whose episodes depend on more than their specs, such as noise drawn from one stream."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue exactly, JSON-able."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        ...


class Verdict(Config):
    """One requirement held against a trust report.

    Attributes:
        figure: its name. value: what was judged (a value or an end of its interval); NaN where not measured.
        bound: "above 1.2", "at most 0.1".
        passed: reached. refuses: not reached, and RL must not start.
        text: for people.
    """

    figure: str
    value: Number
    bound: str
    passed: bool
    refuses: bool
    text: str


class Admission(Config):
    """The decision on one world model.

    Attributes:
        report: the trust.json asked. verdicts: on every requirement; empty where there is no report.
        problem: what refuses; "" where nothing does.
        ignored: something refuses and `env.trust.ignore=true` overruled it. To be shown in red.
        warnings: requirements that only warn and were not reached.
        trust_horizon: control steps after which imagination should end, 0 where nothing holds; None: not measured.
    """

    report: str
    verdicts: tuple[Verdict, ...] = ()
    problem: str = ""
    ignored: bool = False
    warnings: tuple[str, ...] = ()
    trust_horizon: int | None = None

    @property
    def page(self) -> Path:
        """The trust page, which lies beside the report."""
        return Path(self.report).with_suffix(".html")


class TrustClip(Config):
    """An imagined-beside-real clip: its file, relative to the trust report, and how both ended."""

    file: str
    start: str
    instruction: str
    real: bool
    imagined: bool


@runtime_checkable
class ImaginedEnv(StatefulEnv, Protocol):
    """An environment whose episodes a world model imagines."""

    @property
    def admission(self) -> Admission | None:
        """What trust says of the world model; None where nobody asked."""
        ...

    @property
    def observed_every(self) -> int:
        """Control steps from one new image to the next."""
        ...

    def deal(self, specs: Sequence[EpisodeSpec], size: int = 1) -> list[EpisodeSpec]:
        """Say that `size` episodes begin at each of these next; returns them, with the `place` of the first of each.

        Wherever they are then run, and in which order, each draws what it would draw were all begun here, in this one.
        """
        ...


class EnvConfig(Config):
    """Base of every env section: the facts about an environment, and how to start it. Imports no simulator.

    Attributes:
        not_stepped: why it cannot be stepped, and what to do, for the user; empty where it can.
        is_imagined: episodes are a world model's, so that their outcomes are no evidence.
        is_simulator: an episode's spec gives its initial state exactly, and trying costs nothing; never a robot.
        shows_structure: its option `structure` shows what each pixel is part of (see `vla_rl.data.segmentation`).
        object_names: of the objects whose poses its option `objects` tells (see `vla_rl.data.objects`).
        perturb_axes: what `perturbed` can change.
        suites: of the benchmark, by name -> what papers call it; none where it has no suites.
        averaged_suites: those that papers average over, where that is not all.
        reset_tasks: reset task -> the task that it undoes, in the same scene (see `vla_rl.rollout.practice`).
    """

    is_imagined: ClassVar[bool] = False
    is_simulator: ClassVar[bool] = False
    shows_structure: ClassVar[bool] = False
    object_names: ClassVar[tuple[str, ...]] = ()
    perturb_axes: ClassVar[tuple[str, ...]] = ()
    reset_tasks: ClassVar[Mapping[str, str]] = {}
    suites: ClassVar[Mapping[str, str]] = {}
    averaged_suites: ClassVar[tuple[str, ...]] = ()
    not_stepped: ClassVar[str] = ""

    kind: str
    num_envs: PositiveInt = Field(default=8, description="Environments stepped together.")

    def env_spec(self) -> EnvSpec:
        """Return the facts about the environment, without starting a simulator where that is possible."""
        raise NotImplementedError(f"{type(self).__name__} must implement env_spec() -> EnvSpec")

    def perturbed(self, axis: str, level: int) -> EnvConfig:
        """The same environment with every episode perturbed along one of `perturb_axes`, at level 1, 2 or 3."""
        raise NotImplementedError(f"{type(self).__name__} has no perturbations")

    def in_suite(self, suite: str) -> EnvConfig:
        """The same environment with the tasks of another of its `suites`."""
        raise NotImplementedError(f"{type(self).__name__} has no suites")

    def without_expert(self) -> dict[str, str]:
        """Tasks, by name, for which no scripted expert is offered, and why; those of which it is known beforehand."""
        return {}

    def exact(self) -> EnvConfig:
        """The same environment without an approximation that training may make, a reward of its own among these."""
        return self

    def check_machine(self) -> None:
        """Raise an error for people where it is sure that this machine, as it is set up, cannot run the environment."""

    def build_elsewhere(self) -> VecEnv:
        """Of a world model: an `ImaginedEnv` that starts when first used, for a process that deals its episodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement build_elsewhere() for rollouts elsewhere")

    def why_not_executed(self, real: EnvConfig) -> str:
        """Of a world model: why its episodes' actions cannot be executed in `real`, from where they began, or ""."""
        return f"env.kind {self.kind!r} does not say that its episodes begin in a simulator"

    @property
    def most_flattery(self) -> float | None:
        """Of a world model: RL stops where its success surely exceeds that of the same actions by more; None: never."""
        return None

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> VecEnv:
        """Start the environment.

        Args:
            num_envs: in place of the section's own.
            record_frames: put each executed step's images and states into `StepResult.info`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build(num_envs, record_frames) -> VecEnv")


@dataclass(frozen=True)
class PolicyOutput:
    """What `Policy.evaluate` returns, with gradient.

    Attributes:
        log_prob: float32 (B, H, A), log-probability of each component of the chunk, at the temperature given.
        entropy: float32 (B, H, A), in nats.
        value: float32 (B,), the critic's estimate; None without a critic.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor | None = None


class Policy(Protocol):
    """A vision-language-action policy, which is also a `torch.nn.Module`: `class MyPolicy(nn.Module, Policy)`.

    What has a value here may be left out, and `act` alone is enough to be evaluated. Further abilities are protocols
    of their own, which callers ask for: `ContinuingPolicy`, `WatchingPolicy`.

    Attributes:
        chunk_size: H, actions of a chunk.
        action_dim: A.
        cameras: those that it reads.
        uses_state: whether it reads `Observation.state`.
        state_dim: S, where it reads the state; None: not known.
        image_size: (height, width) of the images that it takes; None: any.
        no_rl_reason: why RL cannot train it, and what to do, for the user; None where it can.
        has_one_likelihood: of a chunk, in the first component of `log_prob`; RL then takes one ratio a chunk.
        demonstration_size: actions that cloning learns at once, where those are not `chunk_size`.
        norm_stats: the statistics that actions are normalized by, in the policy's own form; None: not set yet.
        source: of a policy that acts elsewhere, what acts and what embeds: features kept of it are known by that.
        sharding_dtype: what FSDP gathers the weights of `sharding_units()` in: what they compute in; None: as they are.
        saves_sharded: its `save` takes sharded weights, and gathers each only while it writes it (`write_tensors`).
    """

    chunk_size: int
    action_dim: int
    cameras: tuple[str, ...]
    uses_state: bool
    state_dim: int | None = None
    image_size: tuple[int, int] | None = None
    no_rl_reason: str | None = None
    has_one_likelihood: bool = False
    demonstration_size: int | None = None
    norm_stats: object = None
    source: str | None = None
    sharding_dtype: torch.dtype | None = None
    saves_sharded: bool = False

    def prepare(self, obs: Observation) -> Observation:
        """Do once what depends on the images alone, such as a resize or a JPEG round trip. By default: nothing.

        What is returned is `is_prepared`, with the same state and instruction. Every other method takes it in place of
        `obs`, with the same results to the bit, and this one gives it back as it is.
        """
        return obs

    @abstractmethod
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment; `temperature=0` is greedy. No gradient."""
        ...

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Return log-probability, entropy and value of given chunks, with gradient. For RL."""
        raise NotImplementedError(f"{type(self).__name__} has no evaluate(), which RL needs")

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the behavior-cloning loss on actions float32 (B, H, A) in environment units, and metrics.

        Metrics are numbers, or tensors that hold one, on any device.
        `valid`: bool (B, H), False where a chunk runs past its episode's end.
        `keyframe`: float32 (B, 3), meters, where the end effector will be at the gripper's next change or the
        episode's end, NaN where unknown: the target of an auxiliary loss, for policies that have one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bc_loss(), which behavior cloning needs")

    def embed(self, obs: Observation) -> torch.Tensor:
        """Return features (B, D) for failure detection. No gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no embed(), which failure detection needs")

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and config (JSON) so that `load_policy(folder)` restores it."""
        raise NotImplementedError(f"{type(self).__name__} has no save(), which training needs")

    def set_norm_stats(
        self, action: Mapping[str, Any], state: Mapping[str, Any] | None = None, name: str = "dataset"
    ) -> None:
        """Set the training data's statistics of actions and states; called before cloning where there are none.

        Args:
            action: "mean", "std", "min", "max", "q01", "q10", "q90", "q99" and "mask", each (A,).
            state: the same, each (S,).
            name: of the dataset.
        """

    def sharding_units(self) -> list[torch.nn.Module]:
        """Return the modules that FSDP gathers one at a time, such as the layers; none: all at once."""
        return []

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        import torch

        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    if TYPE_CHECKING:  # What every torch.nn.Module has, as far as callers use it.
        training: bool = False

        def eval(self) -> Self:
            return self

        def train(self, mode: bool = True) -> Self:
            return self

        def modules(self) -> Iterator[torch.nn.Module]:
            return iter(())

        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
            return iter(())

        def named_parameters(
            self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, torch.nn.Parameter]]:
            return iter(())


@runtime_checkable
class ContinuingPolicy(Protocol):
    """A policy that continues actions under way: real-time chunking. For robots; RL draws chunks by `act`."""

    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        """Return a chunk per environment, greedy, that follows the prefix where it is frozen and leaves it smoothly."""
        ...


@runtime_checkable
class WatchingPolicy(Protocol):
    """A policy that remembers the episodes it is in, such as one that plans with a world model."""

    def watch(self, env_ids: Sequence[int], begins: Sequence[bool], tasks: Sequence[str]) -> None:
        """Note the environment of each row, whether its episode begins, and its task. Called before each `act`."""
        ...


class WorldModelFitConfig(Config):
    """Base of a recipe's `world_model` section: what a world model is fitted on, and how."""

    kind: str


class FailureDetectionConfig(Config):
    """Base of a recipe's `failure` section: which detectors of failure are fitted, and on which episodes."""

    kind: str


class PlanningPolicy(Policy, WatchingPolicy, Protocol):
    """A policy that plans at test time, around another one."""

    def latency(self) -> dict[str, float]:
        """Return milliseconds of the decisions so far, by statistic."""
        ...


class PlanningConfig(Config):
    """Base of the `eval.plan` section: how a policy plans at test time."""

    kind: str

    def build(self, policy: Policy, device: str = "cpu") -> PlanningPolicy:
        """Return the policy that plans.

        Raises:
            ValueError: it cannot plan for this policy.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build(policy, device) -> PlanningPolicy")

    def protocol(self) -> str:
        """Return what an evaluation's protocol says of the planning, in a few words."""
        raise NotImplementedError(f"{type(self).__name__} must implement protocol() -> str")
