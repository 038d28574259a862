"""Doubly robust GRPO: a model's action values as an unbiased control variate of the real episodes' gradient.

At each decision K more chunks are drawn from the policy and valued by a model, Q. With c and d of at most 1 the
gradient is, A being GRPO's advantage and m the mean of the K values,

    c mean_k (Q_k - mean of the others' Q) grad log p(a_k)
    + (A - c (Q(executed) - m) - d (m - mean reward of the group's others)) grad log p(executed)

What c and d multiply is 0 on average whatever Q is, so a wrong Q costs variance alone. c takes off what the model knows
of this chunk's luck: a control variate (Jiang & Li 2016, arXiv 1511.03722; Q-Prop, Gu et al. 2017, arXiv 1611.02247);
d what it knows of the luck before: a critic's baseline. Two conditions: Q knows nothing of the episode's own outcome,
and c and d come from earlier batches. c = d = 0 is GRPO. Not "Dr. GRPO", which is `normalize_std: false`.

A batch is GRPO's, whose decisions make minibatches and weights. The chunks that nobody executed are further rows, each
in the minibatch of its decision and with its decision's weight, which no sum of weights counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Unpack

import numpy as np
import torch
from pydantic import Field, SerializeAsAny

from vla_rl.algorithms.base import ActionValuesConfig, LearnerOptions
from vla_rl.algorithms.batch import Batch, Pool, gather_observations, rows_by_group
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.learner import ExtraLoss, Learner
from vla_rl.algorithms.losses import Metrics, policy_loss, surrogate_loss, tensor
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import component
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.rollout.runner import derived_seed
from vla_rl.types import ActionChunk, Episode

_MEMORY = 0.8  # How much an iteration counts for c and d, compared with the next one.
_CANDIDATES = 3  # A stream of random numbers, beside the learner's order of minibatches and control.


Share = Annotated[float, Field(ge=0, le=1)]


class DRGRPOConfig(GRPOConfig):
    """Doubly robust GRPO, for real episodes: a model's action values as a control variate, which adds no bias."""

    takes_stale_chunks: ClassVar[bool] = False

    kind: Literal["dr_grpo"] = "dr_grpo"
    normalize_std: bool = Field(default=False, description="Divide by the group's standard deviation, as in grpo.")
    filter_groups: Literal[False] = Field(
        default=False,
        description="Always false: a group whose episodes all got the same reward still tells what the values missed.",
    )
    loss_reduction: Literal["token_mean"] = Field(
        default="token_mean",
        description="Always token_mean: an episode's own weight hangs on its length, so on what was drawn in it, and "
        "what the values take off would no longer be 0 on average.",
    )
    values: Annotated[SerializeAsAny[ActionValuesConfig], component("values")] = Field(
        description="What values action chunks before they are executed: a world model, or a class of your own."
    )
    candidates: int = Field(default=4, ge=2, description="K, the action chunks drawn beside the executed one.")
    coefficients: tuple[Share, Share] | None = Field(
        default=None,
        description="c, how much of what the values say of the executed chunk is taken off, and d, how far the "
        "baseline moves from the group's rewards to the values of the state. null: 0 in the first iteration, then what "
        "would have left the least variance in the earlier ones.",
    )

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the clipped surrogate of all rows; regularizers and metrics are of the executed chunks alone."""
        return surrogate_with_candidates(self, batch, rows, weight, out)

    def build(self, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]) -> DRLearner:
        """Make the learner of `policy`; `seed` is also that of the chunks drawn beside the executed ones."""
        return DRLearner(self, policy, seed, **options)


@dataclass(frozen=True)
class Correction:
    """What the values say of N decisions, for c = d = 1.

    Attributes:
        executed: float64 (N,), of the chunk that was executed: to take off its advantage.
        candidates: float64 (N, K), the advantages of the chunks drawn beside it, 1/K included.
        state: float64 (N,), of the state, beyond the group: to take off the executed chunk's advantage.
    """

    executed: np.ndarray
    candidates: np.ndarray
    state: np.ndarray

    @staticmethod
    def of(executed: np.ndarray, candidates: np.ndarray, others: np.ndarray) -> Correction:
        """Make it from values, so that no chunk is part of its own baseline.

        Args:
            executed: float (N,). candidates: float (N, K). others: float (N,), mean reward of the group's others.
        """
        mean = candidates.mean(1, keepdims=True)  # A candidate's baseline is the mean of the others, its factor 1/K.
        own = (candidates - mean) / (candidates.shape[1] - 1)
        return Correction(executed - mean[:, 0], own, mean[:, 0] - others)


class Coefficients(NamedTuple):
    """c, of the chunks' values, and d, of the states'."""

    chunk: float
    state: float


class CoefficientFit(NamedTuple):
    """Sums over earlier decisions from which c and d follow: those that minimize the mean square of what is left.

    Attributes:
        by_chunk, by_state: of the advantage times `Correction.executed`, and times `Correction.state`.
        chunk, state: of their squares; of the candidates' advantages too, which are the price of c.
        both: of one times the other.
    """

    by_chunk: float = 0.0
    by_state: float = 0.0
    chunk: float = 0.0
    state: float = 0.0
    both: float = 0.0

    @staticmethod
    def of(advantage: np.ndarray, correction: Correction) -> CoefficientFit:
        """Make the sums of decisions whose advantages are float (N,)."""
        x, z = correction.executed, correction.state
        price = (correction.candidates**2).sum()
        sums = (advantage * x).sum(), (advantage * z).sum(), (x**2).sum() + price, (z**2).sum(), (x * z).sum()
        return CoefficientFit(*map(float, sums))

    def over(self, world: ProcessGroup) -> CoefficientFit:
        """Return the sums over all processes' decisions; called by all together."""
        return CoefficientFit(*(sum(column) for column in zip(*world.gather(list(self)), strict=True)))

    def then(self, later: CoefficientFit, memory: float) -> CoefficientFit:
        """Return the sums with a later batch's added; the earlier count `memory` times."""
        return CoefficientFit(*(memory * a + b for a, b in zip(self, later, strict=True)))

    def coefficients(self, otherwise: Coefficients) -> Coefficients:
        """Return c and d, each from 0 to 1; `otherwise` where there is nothing to tell them from."""
        if self.chunk <= 0 and self.state <= 0:
            return otherwise
        c = d = 0.0
        for _ in range(100):  # One after the other: it converges to the least square within the bounds.
            c = min(max((self.by_chunk - self.both * d) / self.chunk, 0.0), 1.0) if self.chunk > 0 else 0.0
            d = min(max((self.by_state - self.both * c) / self.state, 0.0), 1.0) if self.state > 0 else 0.0
        return Coefficients(c, d)

    def left(self, square: float, at: Coefficients) -> float:
        """Return the sum of squares that is left at these coefficients of advantages whose sum of squares is given."""
        c, d = at
        taken = 2 * (c * self.by_chunk + d * self.by_state - c * d * self.both)
        return square - taken + c**2 * self.chunk + d**2 * self.state


@dataclass
class DRBatch(Batch):
    """A batch whose rows may be of chunks that nobody executed.

    Attributes:
        decision: int64 (N,), the row of the executed chunk of the same decision, as the batch was made.
        is_added: bool (N,), rows of other chunks, which no sum of weights counts.
        whole: for a batch of executed chunks: the same with rows added for others; None where there are none.
        fit: what these decisions tell of the coefficient, for later batches.
    """

    decision: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    is_added: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    whole: DRBatch | None = None
    fit: CoefficientFit = field(default_factory=CoefficientFit)


class DRLearner(Learner):
    """A policy's improvement by doubly robust GRPO.

    Attributes:
        coefficients: c and d of the next batch.
    """

    config: DRGRPOConfig

    def __init__(self, config: DRGRPOConfig, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]):
        super().__init__(config, policy, seed, **options)
        self._fit = CoefficientFit()
        self._whole_pool: WholePool | None = None
        asks = config.coefficients is None or any(config.coefficients)
        self.values = config.values.build(policy, str(policy.device)) if asks else None

    @property
    def coefficients(self) -> Coefficients:
        given = self.config.coefficients
        return self._fit.coefficients(Coefficients(0.0, 0.0)) if given is None else Coefficients(*given)

    # --- from episodes to a batch -----------------------------------------------------------

    def prepare(self, episodes: Sequence[Episode]) -> DRBatch:
        """Compute GRPO's batch, and what the values add to it.

        Raises:
            ValueError: as `Learner.prepare` does; or the values have a wrong shape or are not finite.
        """
        made = super().prepare(episodes)
        none = np.zeros(made.size, bool)
        known = {f.name: getattr(made, f.name) for f in fields(Batch)}
        batch = DRBatch(**known, decision=np.arange(made.size), is_added=none)
        batch.metrics |= {f"control_variate/{name}": value for name, value in self.coefficients._asdict().items()}
        if self.values is None:
            return batch
        with self.world.unsharded(self.policy):
            candidates = self.candidates(batch)
            correction = self.correction(batch, candidates)
            advantage = decision_advantages(batch)
            batch.fit = CoefficientFit.of(advantage, correction).over(self.world)
            square = sum(self.world.gather(float((advantage**2).sum())))
            left = batch.fit.left(square, self.coefficients)
            batch.metrics["control_variate/squared_advantage"] = left / square if square > 0 else 1.0
            if any(self.coefficients):
                self._add_rows(batch, candidates, correction)
        return batch

    @torch.no_grad()
    def candidates(self, batch: DRBatch) -> ActionChunk:
        """Draw K chunks at each decision, (N K) in all. Each episode's are drawn alone, from a seed of its own, so that
        they are the same whatever processes share the episodes."""
        self.policy.eval()
        count, drawn = self.config.candidates, list[ActionChunk]()
        numbers = _numbers_in_group(batch.episodes)
        for episode in np.unique(batch.episode):
            rows = np.flatnonzero(batch.episode == episode)
            obs = self.policy.prepare(gather_observations(batch.episodes, batch.episode[rows], batch.chunk[rows]))
            group = batch.episodes[episode].group
            seed = derived_seed(self.seed, self.iteration, _CANDIDATES, group, int(numbers[episode]))
            generator = torch.Generator().manual_seed(seed)
            drawn.append(
                self.policy.act(obs.select(np.repeat(np.arange(len(rows)), count)), generator, self.temperature)
            )
        return ActionChunk.concatenate(drawn)

    def correction(self, batch: DRBatch, candidates: ActionChunk) -> Correction:
        """Have the executed chunks and the candidates valued."""
        assert self.values is not None, "asked only where there are values"
        shape = (batch.size, self.config.candidates)
        others = candidates.actions.reshape(*shape, *candidates.actions.shape[1:])
        actions = np.concatenate([batch.chunks.actions[:, None], others], 1)
        found = np.asarray(self.values.of(batch.episodes, batch.episode, batch.chunk, actions), np.float64)
        if found.shape != actions.shape[:2] or not np.isfinite(found).all():
            raise ValueError(
                f"algo.values: {type(self.values).__name__} gave values of shape {found.shape} for {actions.shape[:2]} "
                f"chunks, {int((~np.isfinite(found)).sum())} of them not finite; needed is a finite number for each"
            )
        correction = Correction.of(found[:, 0], found[:, 1:], _reward_of_others(batch.episodes)[batch.episode])
        counts = np.any(batch.valid, 1)  # Decisions after the first success have no part in the gradient.
        has_others = np.isfinite(correction.state)
        state = np.where(counts & has_others, correction.state, 0.0)
        return Correction(correction.executed * counts, correction.candidates * counts[:, None], state)

    def _add_rows(self, batch: DRBatch, candidates: ActionChunk, correction: Correction) -> None:
        """Make `batch.whole`: what is taken off executed chunks' advantages goes into their own rows.

        Of a chunk cut short the chunk's part goes into a row more, of all actions, as the values are of whole chunks.
        """
        count, size, (c, d) = self.config.candidates, batch.size, self.coefficients
        executed, drawn = c * correction.executed, c * correction.candidates
        is_whole = batch.valid.all(1)
        off = executed * is_whole + d * correction.state
        advantage = batch.advantage - (off[:, None] * batch.valid).astype(np.float32)
        cut = np.flatnonzero(~is_whole & (executed != 0))
        more = np.concatenate([cut, np.repeat(np.arange(size), count)])
        chunks = ActionChunk.concatenate([batch.chunks.select(cut), candidates])
        extra = np.concatenate([-executed[cut], drawn.reshape(-1)])[:, None].astype(np.float32)
        used = np.flatnonzero(extra[:, 0])
        more, chunks, extra = more[used], chunks.select(used), extra[used]
        old, _ = self._evaluate(batch.episodes, batch.episode[more], batch.chunk[more], chunks)
        if self.config.skips_zero_advantage:
            batch.old_log_prob = self._completed(batch, off != 0)
        decision, reference = np.concatenate([np.arange(size), more]), batch.reference_log_prob
        batch.whole = DRBatch(
            episodes=batch.episodes,
            episode=batch.episode[decision],
            chunk=batch.chunk[decision],
            chunks=ActionChunk.concatenate([batch.chunks, chunks]),
            valid=np.concatenate([batch.valid, np.ones((len(more), batch.valid.shape[1]), bool)]),
            advantage=np.concatenate([advantage, np.broadcast_to(extra, (len(more), advantage.shape[1]))]),
            old_log_prob=np.concatenate([batch.old_log_prob, old]),
            reference_log_prob=None if reference is None else np.concatenate([reference, old]),
            decision=decision,
            is_added=np.arange(len(decision)) >= size,
        )

    def _completed(self, batch: DRBatch, needed: np.ndarray) -> np.ndarray:
        """Return old log-probabilities also of decisions that GRPO gives no advantage to; `needed`: bool (N,)."""
        rows, result = np.flatnonzero(needed & ~batch.active), batch.old_log_prob.copy()
        result[rows], _ = self._evaluate(
            batch.episodes, batch.episode[rows], batch.chunk[rows], batch.chunks.select(rows)
        )
        return result

    # --- from a batch to better weights ------------------------------------------------------

    def update(self, batch: Batch, extra_loss: ExtraLoss | None = None) -> dict[str, float]:
        """Make the update as `Learner.update` does; then let the batch count for later coefficients."""
        assert isinstance(batch, DRBatch), "a batch from prepare()"
        self._whole_pool = None if batch.whole is None else WholePool.of(batch.whole, self.world)
        metrics = super().update(batch, extra_loss)
        self._whole_pool = None
        self._fit = self._fit.then(batch.fit, _MEMORY)
        return metrics

    def _step(
        self, batch: Batch, pool: Pool, rows: np.ndarray, weight: np.ndarray, extra_loss: ExtraLoss | None
    ) -> dict[str, float]:
        """Step on the decisions `rows` and on all that was added to them."""
        whole = self._whole_pool
        if whole is None:
            return super()._step(batch, pool, rows, weight, extra_loss)
        rows, weight = whole.of_decisions(rows, weight, per_chunk=self.config.counts_chunks)
        return super()._step(whole.batch, whole.pool, rows, weight, extra_loss)

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, state = super().state()
        return tensors, state | {"coefficient_fit": list(self._fit)}

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`. A run of another algorithm has no coefficient yet."""
        super().load_state(tensors, state)
        self._fit = CoefficientFit(*state.get("coefficient_fit", ()))


@dataclass(frozen=True)
class WholePool:
    """All processes' rows, and which decision each belongs to.

    Attributes:
        batch: this process's rows. pool: everyone's, M.
        decision: int64 (M,), number of the decision among everyone's. is_added: bool (M,), as in `DRBatch`.
    """

    batch: DRBatch
    pool: Pool
    decision: np.ndarray
    is_added: np.ndarray

    @staticmethod
    def of(whole: DRBatch, world: ProcessGroup) -> WholePool:
        """Gather all processes' rows; called by all together."""
        _, own = world.all_gather_rows(np.flatnonzero(~whole.is_added))
        decision, _ = world.all_gather_rows(whole.decision + own.start)
        return WholePool(whole, Pool.of(whole, world), decision, world.all_gather_rows(whole.is_added)[0])

    def of_decisions(self, rows: np.ndarray, weight: np.ndarray, per_chunk: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of decisions, the executed chunks' first, and their weights.

        A row added weighs as much as its decision's own, by action or, `per_chunk`, in sum.

        Args:
            rows: int (B,), numbers of decisions. weight: float64 (B, H), of their own rows.
        """
        executed = np.flatnonzero(~self.is_added)
        place = np.full(len(executed), -1)
        place[rows] = np.arange(len(rows))
        added = np.flatnonzero(self.is_added & (place[self.decision] >= 0))
        own, valid = weight[place[self.decision[added]]], self.pool.valid[added]
        if per_chunk:
            extra = own.sum(1, keepdims=True) * valid / valid.sum(1, keepdims=True)
        else:
            extra = own.max(1, keepdims=True) * valid
        return np.concatenate([executed[rows], added]), np.concatenate([weight, extra])


def surrogate_with_candidates(
    config: DRGRPOConfig, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput
) -> tuple[torch.Tensor, Metrics]:
    """Return `surrogate_loss` of executed chunks plus only the policy loss of rows added; see `AlgoOptions.loss`."""
    assert isinstance(batch, DRBatch), "a batch from prepare()"
    added = np.flatnonzero(batch.is_added[rows])
    if not len(added):
        return surrogate_loss(config, batch, rows, weight, out)
    log_prob = out.log_prob.float()
    loss, _ = policy_loss(
        config,
        log_prob[added],
        tensor(batch.old_log_prob[rows[added]], log_prob),
        tensor(batch.advantage[rows[added]], log_prob),
        tensor(weight[added], log_prob),
    )
    metrics: Metrics = {"loss/candidates": loss}
    own = np.flatnonzero(~batch.is_added[rows])
    if not len(own):
        return loss, metrics
    executed = PolicyOutput(out.log_prob[own], out.entropy[own])
    main, of_executed = surrogate_loss(config, batch, rows[own], weight[own], executed)
    return main + loss, of_executed | metrics


def decision_advantages(batch: Batch) -> np.ndarray:
    """Return each decision's advantage, float64 (N,): that of its actions that count; 0 where none does."""
    first = batch.advantage[np.arange(batch.size), batch.valid.argmax(1)]
    return np.where(batch.valid.any(1), first, 0.0).astype(np.float64)


def _reward_of_others(episodes: Sequence[Episode]) -> np.ndarray:
    """Return the mean reward of the other episodes of each one's group, float64 (E,); NaN where it is alone."""
    rewards, result = np.array([e.total_reward for e in episodes]), np.full(len(episodes), np.nan)
    for rows in rows_by_group(np.array([e.group for e in episodes])):
        if len(rows) > 1:
            result[rows] = (rewards[rows].sum() - rewards[rows]) / (len(rows) - 1)
    return result


def _numbers_in_group(episodes: Sequence[Episode]) -> np.ndarray:
    """Return which of its group each episode is, int64 (E,)."""
    numbers = np.zeros(len(episodes), np.int64)
    for rows in rows_by_group(np.array([e.group for e in episodes])):
        numbers[rows] = np.arange(len(rows))
    return numbers


METHOD = DRGRPOConfig
