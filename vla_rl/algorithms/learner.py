"""The RL learner: one class for every algorithm, from episodes to an updated policy; its config has what differs.

learner = config.build(policy, seed=0, temperature=1.6)
batch = learner.prepare(episodes)     # advantages, masks, old log-probabilities, values
metrics = learner.update(batch)       # epochs x minibatches of the loss
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.batch import NOTHING_TO_COMPARE, Batch, Pool, gather_observations, shard, with_inputs
from vla_rl.algorithms.losses import minibatch_weights
from vla_rl.algorithms.options import AlgoOptions, Control
from vla_rl.algorithms.stale import decouple, has_stale
from vla_rl.common.distributed.fsdp import like, swap_weights
from vla_rl.common.distributed.process_group import ALONE, ProcessGroup, reduce_metrics
from vla_rl.common.progress import Stopwatch
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import usable_episodes
from vla_rl.training.checkpoint import flatten_optimizer, restore_optimizer
from vla_rl.training.optimizers import build_optimizers, clip_gradients, is_critic, read_scalars
from vla_rl.training.trainer import BadSteps, TrainingDivergedError, warmup_factor
from vla_rl.types import ActionChunk, Episode

NO_CRITIC = (
    "algo.kind {!r} needs a critic, but the policy has no trainable 'value_head' parameters. Set "
    "policy.value_head=true, or use grpo, rloo or reinforce_pp, which need none."
)
NO_ANCHOR = (
    "algo.bc_coef is above 0, but no demonstrations are given to anchor to: name a dataset in sft.datasets, or set "
    "algo.bc_coef=0"
)
ExtraLoss = Callable[[], tuple[torch.Tensor, Mapping[str, Any]]]

# Streams of the random generator, so that minibatch order and control never share numbers.
_ORDER, _CONTROL = 1, 2


@dataclass(eq=False)
class Learner:
    """RL learner of a policy, by the algorithm of its `config`; options as `LearnerOptions` has them.

    Attributes:
        iteration: updates done.
        num_good_steps: optimizer steps made.
        stopwatch: counts the seconds of "forward_backward" and "optimizer". The host waits for a GPU once a step, when
            it reads the step's numbers ("forward_backward"), and so for the optimizer's kernels with the next step's.
    """

    config: AlgoOptions
    policy: Policy
    seed: int = 0
    _: KW_ONLY
    temperature: float = 1.0
    control: Control = "none"
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    world: ProcessGroup = ALONE

    iteration = num_good_steps = _num_critic_steps = 0  # The last: good, and of the critic alone.

    def __post_init__(self) -> None:
        config, policy = self.config, self.policy
        if self.temperature <= 0:
            raise ValueError(f"temperature: got {self.temperature}, must be above 0: RL learns from sampled actions")
        if reason := policy.no_rl_reason:
            raise ValueError(f"RL cannot train this policy: {reason}")
        config.check_policy(policy)
        self._bad_steps = BadSteps(config.max_bad_steps)
        self._parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self._critic_parameters = [p for n, p in self._parameters.items() if is_critic(n)]
        self._policy_parameters = [p for n, p in self._parameters.items() if not is_critic(n)]
        if config.uses_critic and not self._critic_parameters:
            raise ValueError(NO_CRITIC.format(config.kind))
        self.optimizers = build_optimizers(config.optim, self._parameters, config.critic_lr)
        self._full_lr = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._reference = {n: p.detach().clone() for n, p in self._parameters.items()} if config.has_reference else None
        self._last_good = KeptWeights([self.world.local(p.detach()) for p in self._parameters.values()])

    @property
    def num_bad_steps(self) -> int:
        """Steps skipped for a NaN or infinite loss or gradient, in all."""
        return self._bad_steps.total

    # --- from episodes to a batch -----------------------------------------------------------

    def prepare(self, episodes: Sequence[Episode]) -> Batch:
        """Compute advantages, masks and old log-probabilities of a rollout made with the policy as it is now.

        Chunks whose `version` is below `iteration` were drawn by an earlier one (see `stale.py`). Lost episodes are
        left out. With several processes each gives its own, in whole groups.

        Raises:
            ValueError: nothing usable, no groups to compare, no log-probabilities, or chunks of a later version.
        """
        usable = with_inputs(self.policy, usable_episodes(episodes))
        shuffle = self._generator(_CONTROL) if self.control == "shuffled_rewards" else None
        has_versions = any(e.chunks.version is not None for e in usable)  # In every process, or in none.
        is_stale = has_versions and has_stale(usable, self.iteration, self.config, self.world)
        with self.world.unsharded(self.policy):
            batch = self.config.make_batch(usable, self._evaluate, shuffle, self.world)
            if is_stale:
                batch = decouple(batch, self.iteration, self.config, self.world)
        batch.chunks = replace(batch.chunks, version=None)  # What it meant is in the batch.
        if self._reference is not None:
            with self._swapped_with_reference(), self.world.unsharded(self.policy):
                batch.reference_log_prob, _ = self._evaluate(batch.episodes, batch.episode, batch.chunk, batch.chunks)
        active, _ = self.world.all_gather_rows(batch.active)
        if self.config.compares_episodes and not active.any():
            self._check_groups(episodes)
        share = float(active.mean()) if len(active) else 0.0
        batch.metrics |= {"advantage/decisions": float(len(active)), "advantage/active": share}
        return batch

    def _check_groups(self, episodes: Sequence[Episode]) -> None:
        """Refuse groups that are all of one episode, lost ones counted; one that lost the others teaches nothing."""
        groups, _ = self.world.all_gather_rows(np.array([e.group for e in episodes], np.int64))
        if len(np.unique(groups)) == len(groups):
            raise ValueError(NOTHING_TO_COMPARE.format(self.config.kind, len(groups)))

    @torch.no_grad()
    def _evaluate(
        self, episodes: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray, chunks: ActionChunk
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return log_prob float32 (N, H, A) and value float32 (N,) or None, without gradient."""
        self.policy.eval()
        if not len(episode):
            return np.zeros(chunks.actions.shape, np.float32), None
        log_probs, values, size = list[torch.Tensor](), list[torch.Tensor](), self.config.micro_batch_size
        with self.stopwatch.measure("forward_backward"):
            for rows in np.split(np.arange(len(episode)), range(size, len(episode), size)):
                obs = gather_observations(episodes, episode[rows], chunk[rows])
                out = self.policy.evaluate(obs, chunks.select(rows), self.temperature)
                log_probs.append(out.log_prob.float())
                values += [] if out.value is None else [out.value.float()]
            return torch.cat(log_probs).cpu().numpy(), torch.cat(values).cpu().numpy() if values else None

    # --- from a batch to better weights ------------------------------------------------------

    def update(self, batch: Batch, extra_loss: ExtraLoss | None = None) -> dict[str, float]:
        """Make epochs of minibatch steps on a batch from `prepare`; return metrics, the same in every process.

        Args:
            extra_loss: draws demonstrations and gives (loss, metrics), as `policy.bc_loss` does; called once per step,
                weighted by `bc_coef`. With several processes: this one's share.

        Raises:
            ValueError: `bc_coef` is set but there is no `extra_loss`.
            TrainingDivergedError: `max_bad_steps` steps in a row were skipped, or a weight became NaN or infinite.
        """
        if self.config.bc_coef > 0 and extra_loss is None:
            raise ValueError(NO_ANCHOR)
        self.policy.eval()  # Dropout would make the ratio differ from 1 before the first step.
        if self._bad_steps.streak == 0:
            self._last_good.keep()
        totals: defaultdict[str, list[float]] = defaultdict(list)
        num_steps, generator, pool = 0, self._generator(_ORDER), Pool.of(batch, self.world)
        num_parts = self._num_minibatches(pool.size)
        for _ in range(self.config.epochs if pool.size else 0):
            parts = np.array_split(generator.permutation(pool.size), num_parts)
            weights = minibatch_weights(pool.valid, pool.episode, parts, self.config)
            for rows, weight in zip(parts, weights, strict=True):
                metrics = self._step(batch, pool, rows, weight, extra_loss)
                num_steps += bool(metrics)
                for name, value in metrics.items():
                    totals[name].append(value)
        self._check_weights()
        self.iteration += 1
        made = {name: float((np.max if name.endswith("_max") else np.mean)(values)) for name, values in totals.items()}
        counts = {"update/num_steps": float(num_steps), "update/num_bad_steps": float(self.num_bad_steps)}
        return batch.metrics | made | counts

    def _num_minibatches(self, num_decisions: int) -> int:
        return max(1, round(num_decisions / self.config.minibatch_size))

    def num_steps(self, batch: Batch) -> int:
        """Return the optimizer steps that `update` makes on a batch, unless some are skipped."""
        size = sum(self.world.gather(batch.size))
        return self.config.epochs * self._num_minibatches(size) if size else 0

    def _step(
        self, batch: Batch, pool: Pool, rows: np.ndarray, weight: np.ndarray, extra_loss: ExtraLoss | None
    ) -> dict[str, float]:
        """Step once on the pool's decisions `rows`, int (B,), by `weight`, float64 (B, H); {} if it was skipped."""
        config = self.config
        used = np.flatnonzero(pool.active[rows]) if config.skips_zero_advantage else np.arange(len(rows))
        if not len(used) and config.bc_coef == 0:
            return {}
        self._zero_grad()
        losses, found = list[torch.Tensor](), list[dict[str, torch.Tensor]]()
        alone = (used, batch, rows[used])
        ours, held, where = alone if self.world.size == 1 else shard(self.policy, batch, pool, rows, used, self.world)
        for start in range(0, len(ours), config.micro_batch_size):
            part = slice(start, start + config.micro_batch_size)
            own = where[part]
            with self.stopwatch.measure("forward_backward"):
                out = self.policy.evaluate(held.observations(own), held.chunks.select(own), self.temperature)
                loss, metrics = config.loss(
                    held, own, weight[ours[part]], out, num_rows=len(rows), only_critic=self._trains_only_critic
                )
                loss.backward()
                losses.append(loss.detach())
                found.append({name: value.detach() for name, value in metrics.items()})
        if self.world.is_sharded:
            self._keep_step(batch, len(used), len(losses))
        if config.bc_coef > 0 and extra_loss is not None:
            losses.append(self._anchor(extra_loss, found))
        return self._apply(losses, found)

    def _anchor(self, extra_loss: ExtraLoss, found: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Add the demonstrations' gradient, and their loss to the metrics found; return it."""
        with self.stopwatch.measure("forward_backward"):
            loss, _ = extra_loss()
            (self.config.bc_coef * loss).backward()
        found.append({"loss/bc": loss.detach()})
        return loss.detach()

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _keep_step(self, batch: Batch, num_used: int, num_passes: int) -> None:
        """Make passes that add nothing, where others have more: all processes gather weights together."""
        largest = math.ceil(num_used / self.world.size)
        times = math.ceil(largest / self.config.micro_batch_size) - num_passes
        episode = batch.episodes[0]
        obs = gather_observations([episode], np.zeros(1, np.int64), np.zeros(1, np.int64))
        for _ in range(times):
            with self.stopwatch.measure("forward_backward"):
                out = self.policy.evaluate(obs, episode.chunks.select([0]), self.temperature)
                # Of the parameters that the loss reaches, none may be left out: their gradients are reduced together.
                parts = [] if self._trains_only_critic else [out.log_prob, out.entropy]
                if self.config.uses_critic:
                    assert out.value is not None, "a policy with a critic gives values"
                    parts.append(out.value)
                (0.0 * torch.stack([part.float().sum() for part in parts]).sum()).backward()

    @property
    def _trains_only_critic(self) -> bool:
        return self.config.trains_only_critic(self.iteration)

    def _apply(self, losses: Sequence[torch.Tensor], found: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Clip, check and apply the gradients that have been accumulated; return the step's metrics.

        Args:
            losses: scalars that must be finite. found: each micro-batch's metrics, scalars.
        """
        with self.stopwatch.measure("forward_backward"):
            self.world.all_reduce_gradients([*self._policy_parameters, *self._critic_parameters])
            norms = self._clip()
            # The host waits for the device here and nowhere else: all that a step is judged and reported by.
            scalars = read_scalars([*losses, *norms.values(), *(v for metrics in found for v in metrics.values())])
        is_finite = all(math.isfinite(next(scalars)) for _ in losses)
        sizes = {name: next(scalars) for name in norms}
        sums: defaultdict[str, float] = defaultdict(float)
        for metrics in found:
            _add(sums, {name: next(scalars) for name in metrics})
        reports = self.world.gather({"is_finite": is_finite, "sums": dict(sums)})
        if not all(report["is_finite"] for report in reports):
            return self._skip_bad("loss")
        if not all(math.isfinite(size) for size in sizes.values()):
            return self._skip_bad("gradient")
        with self.stopwatch.measure("optimizer"):
            self._set_lr()
            for optimizer in self.optimizers:
                optimizer.step()
        self.num_good_steps += 1
        self._num_critic_steps += self._trains_only_critic
        self._bad_steps.end_streak()
        return _named(reduce_metrics([report["sums"] for report in reports]) | sizes)

    def _clip(self) -> dict[str, torch.Tensor]:
        """Clip the policy's and the critic's gradients, each by its norm; return the norms before."""
        if self._trains_only_critic:
            for parameter in self._policy_parameters:
                parameter.grad = None
        limit = self.config.optim.grad_clip or math.inf
        norms = {"grad_norm/policy": clip_gradients(self._policy_parameters, limit)}
        if self.config.uses_critic:
            norms["grad_norm/critic"] = clip_gradients(self._critic_parameters, limit)
        return norms

    def _set_lr(self) -> None:
        """Warm up linearly over `warmup_steps` steps, the policy's counted from when it begins to learn, and decay."""
        for optimizer, rates in zip(self.optimizers, self._full_lr, strict=True):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                of_critic = any(group["params"][0] is p for p in self._critic_parameters)
                steps = self.num_good_steps - (0 if of_critic else self._num_critic_steps)
                warmup = warmup_factor(steps, self.config.optim.warmup_steps)
                group["lr"] = lr * self.config.lr_share(self.iteration) * warmup

    def _skip_bad(self, what: str) -> dict[str, float]:
        """Drop a step with a NaN or infinite loss or gradient; give up after too many in a row."""
        self._zero_grad()
        if self._bad_steps.add():
            self._last_good.restore()
            raise TrainingDivergedError(
                f"{self._bad_steps.streak} steps in a row had a NaN or infinite {what}, in "
                f"iteration {self.iteration}. The last good weights were restored. Try a "
                f"smaller algo.optim.lr (now {self.config.optim.lr:g}), a smaller algo.optim.grad_clip, or "
                "policy.precision=fp32."
            )
        return {}

    def _check_weights(self) -> None:
        """Undo the update and stop the run if a weight overflowed, as finite gradients can still make it."""
        parts = [torch.isfinite(self.world.local(p.detach())).all() for p in self._parameters.values()]
        if not all(self.world.gather(bool(torch.stack(parts).all()))):
            self._last_good.restore()
            raise TrainingDivergedError(
                f"an update made weights NaN or infinite, in iteration {self.iteration}. The last good weights were "
                f"restored. Try a smaller algo.optim.lr (now {self.config.optim.lr:g}), or policy.precision=fp32."
            )

    # --- weights, randomness, time -----------------------------------------------------------

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.iteration, stream])

    @contextmanager
    def _swapped_with_reference(self) -> Iterator[None]:
        """Give the policy the reference's weights inside the block. With LoRA these are the adapters alone."""
        assert self._reference is not None, "there is one when the config has_reference"
        swap_weights(self._parameters, self._reference)
        try:
            yield
        finally:
            swap_weights(self._parameters, self._reference)

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what a checkpoint needs besides the policy's weights: flat tensors, and a JSON-able rest.

        Where the policy is sharded, so are the tensors.
        """
        tensors: dict[str, torch.Tensor] = {}
        optimizers = []
        for index, optimizer in enumerate(self.optimizers):
            flat, rest = flatten_optimizer(optimizer, f"optimizer.{index}")
            tensors |= flat
            optimizers.append(rest)
        tensors |= {f"reference.{n}": t for n, t in (self._reference or {}).items()}
        state = {
            "iteration": self.iteration,
            "num_good_steps": self.num_good_steps,
            "num_bad_steps": self.num_bad_steps,
            "num_critic_steps": self._num_critic_steps,
            "bad_streak": self._bad_steps.streak,
            "optimizers": optimizers,
        }
        return tensors, state

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`, after the policy's own weights were loaded.

        Raises:
            ValueError: the checkpoint was made with another optimizer or without the reference weights.
        """
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"algo.optim.name: the checkpoint holds {len(state['optimizers'])} optimizers, this run needs "
                f"{len(self.optimizers)}; resume with the algo.optim.name that the run began with."
            )
        if self._reference is not None:
            missing = [n for n in self._reference if f"reference.{n}" not in tensors]
            if missing:
                raise ValueError(
                    f"algo.kl_coef: above 0, but the checkpoint holds no reference weights for {missing[:3]}; "
                    "resume with the algo.kl_coef that the run began with."
                )
            self._reference = {n: like(tensors[f"reference.{n}"].to(t.device), t) for n, t in self._reference.items()}
        for index, (optimizer, rest) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            restore_optimizer(optimizer, tensors, rest, f"optimizer.{index}")
        self.iteration = int(state["iteration"])
        self.num_good_steps = int(state["num_good_steps"])
        self._bad_steps.total, self._bad_steps.streak = int(state["num_bad_steps"]), int(state["bad_streak"])
        self._num_critic_steps = int(state.get("num_critic_steps", 0))  # Older checkpoints have none.
        self._last_good.keep()


@dataclass(eq=False)
class KeptWeights:
    """A copy of weights in the host's memory, to go back to. A GPU's are copied meanwhile, into pinned memory.

    `weights`: this process's part of them; memory is taken by the first `keep`.
    """

    weights: Sequence[torch.Tensor]
    _kept: list[torch.Tensor] = field(default_factory=list, init=False)

    def keep(self) -> None:
        """Copy the weights as they are. The host waits for nothing: what changes them comes later in their stream."""
        self._kept = self._kept or [torch.empty_like(w, device="cpu", pin_memory=not w.is_cpu) for w in self.weights]
        for kept, weight in zip(self._kept, self.weights, strict=True):
            kept.copy_(weight, non_blocking=True)

    def restore(self) -> None:
        """Give the weights the values of the last `keep`."""
        for kept, weight in zip(self._kept, self.weights, strict=True):
            weight.copy_(kept, non_blocking=True)


def _add(sums: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add a micro-batch's metrics to its minibatch's; of what is named a maximum, the larger stays."""
    for name, number in metrics.items():
        sums[name] = max(sums.get(name, number), number) if name.endswith("_max") else sums[name] + number


def _named(sums: dict[str, float]) -> dict[str, float]:
    """Return a minibatch's metrics under their full names, averaged where they are sums over what was computed."""
    total = sums.pop("weight", 0.0)
    if total > 0:  # Averages over what was computed; losses stay sums over the minibatch.
        for name in sums:
            if "/" not in name and not name.endswith("_max"):
                sums[name] /= total
        if "ratio_squared" in sums:
            sums["ratio_std"] = math.sqrt(max(sums.pop("ratio_squared") - sums["ratio"] ** 2, 0.0))
        if "importance_squared" in sums:  # Kish's: of how many equal weights' worth all are, as a share of all.
            sums["effective_sample_share"] = sums["importance"] ** 2 / sums.pop("importance_squared")
    return {name if "/" in name else f"update/{name}": value for name, value in sums.items()}
