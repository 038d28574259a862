"""On-policy distillation: a student is pulled towards a teacher on the chunks that the student itself draws.

The teacher may be larger: of it only the likelihoods of the student's tokens are asked. Rewards have no part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from pydantic import Field

from vla_rl.algorithms.base import AlgoConfig, episode_batch
from vla_rl.algorithms.batch import Batch, Evaluate, gather_observations, shuffle_advantages
from vla_rl.algorithms.learner import Learner
from vla_rl.algorithms.losses import entropy_mean, tensor
from vla_rl.algorithms.options import LearnerOptions
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.policies.load import load_policy
from vla_rl.types import Episode

if TYPE_CHECKING:
    from collections.abc import Sequence


class DistillConfig(AlgoConfig):
    """On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543), by the reverse KL of each token."""

    takes_stale_chunks: ClassVar[bool] = False

    kind: Literal["distill"] = "distill"
    teacher: str = Field(
        description="The teacher: a policy's folder, or pretrained:NAME. Its tokens mean the same actions as the "
        "student's; its sizes may differ."
    )

    @property
    def skips_zero_advantage(self) -> bool:
        return False

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a batch of all decisions; the learner adds the teacher's log-probabilities."""
        every = np.ones(len(episodes))
        return episode_batch(self, episodes, every, every > 0, evaluate, world)

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (log pi - log pi_teacher)^2 / 2, a token's mean by `weight`; see `AlgoOptions.loss`.

        Its gradient at the policy that drew the tokens, (log pi - log pi_teacher) grad log pi, is that of
        KL(pi || pi_teacher) of each token after those before it. (k3, as in `kl_coef`, has the gradient of the forward
        KL there.) Its minimum is the teacher whoever drew the tokens, so that later minibatches need no ratio.
        """
        assert batch.reference_log_prob is not None, "DistillLearner.prepare() fills it"
        log_prob = out.log_prob.float()
        weights = tensor(weight, log_prob)
        gap = log_prob - tensor(batch.reference_log_prob[rows], log_prob)
        loss = (weights * gap.square().mean(-1)).sum() / 2
        metrics = {"reverse_kl": (weights * gap.mean(-1)).sum(), "entropy": entropy_mean(out.entropy.float(), weights)}
        return loss, metrics | {"loss/policy": loss, "weight": weights.sum()}

    def build(self, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]) -> DistillLearner:
        """Make the learner of `policy` and load the teacher; `seed` is that of minibatch order and of the control.

        Raises:
            ConfigError: the teacher's tokens are not the student's.
        """
        teacher = load_policy(self.teacher, next(iter(policy.parameters())).device)
        check_same_tokens(policy, teacher)
        return DistillLearner(self, policy, seed, **options, teacher=teacher.eval())


@dataclass(eq=False)
class DistillLearner(Learner):
    """A learner with a teacher. With control=shuffled_rewards its log-probabilities are dealt to other decisions."""

    teacher: Policy = field(kw_only=True)

    def prepare(self, episodes: Sequence[Episode]) -> Batch:
        """See `Learner.prepare`.

        Raises:
            ConfigError: the chunks were not drawn as tokens.
        """
        batch = super().prepare(episodes)
        if batch.chunks.tokens is None:
            raise ConfigError(
                "algo.kind: 'distill' compares likelihoods of action tokens, but this policy's chunks have none (a "
                "flow, or a continuous head); clone the teacher's episodes: collect.source=policy, then `vla-rl sft`"
            )
        found = self._teacher_log_prob(batch)
        if self.control == "shuffled_rewards":
            found = shuffle_advantages(found, np.random.default_rng([self.seed, self.iteration]))
        batch.reference_log_prob = found
        return batch

    @torch.no_grad()
    def _teacher_log_prob(self, batch: Batch) -> np.ndarray:
        """Return float32 (N, H, A), from what was seen: what the student prepared of it is the student's own."""
        seen, size = [replace(e, inputs=None) for e in batch.episodes], self.config.micro_batch_size
        found = [np.zeros((0, *batch.valid.shape[1:], batch.chunks.actions.shape[-1]), np.float32)]
        for start in range(0, batch.size, size):
            rows = np.arange(start, min(start + size, batch.size))
            obs = gather_observations(seen, batch.episode[rows], batch.chunk[rows])
            out = self.teacher.evaluate(obs, batch.chunks.select(rows), self.temperature)
            found.append(out.log_prob.float().cpu().numpy())
        return np.concatenate(found)


def check_same_tokens(student: Policy, teacher: Policy) -> None:
    """Raise ConfigError unless a token is the same action to both policies."""
    if student.has_one_likelihood or teacher.has_one_likelihood:
        raise ConfigError("algo.kind: 'distill' takes a likelihood of each token; a policy with one a chunk has none")
    for name, own, theirs in zip(
        _meaning(student), _meaning(student).values(), _meaning(teacher).values(), strict=True
    ):
        if own != theirs:
            raise ConfigError(
                f"algo.teacher: its {name}: {theirs}, the student's: {own}. A token must be the same action to both: "
                "make the student by `vla-rl sft` with the teacher's chunk_size and action_bins, and both with "
                "sft.action_scale=environment or from the same data"
            )


def _meaning(policy: Policy) -> dict[str, Any]:
    """What a token stands for."""
    stats = getattr(policy.norm_stats, "action", None)
    return {
        "chunk_size": policy.chunk_size,
        "action_dim": policy.action_dim,
        "action_bins": getattr(getattr(policy, "architecture", None), "action_bins", None),
        "decoder's gripper": getattr(getattr(policy, "config", None), "gripper", None),
        "action statistics": None if stats is None else stats.to_json(),
    }


METHOD = DistillConfig
