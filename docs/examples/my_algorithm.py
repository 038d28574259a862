"""An algorithm of your own: one file, named in a recipe as `algo: {kind: "my_algorithm:SelfImitationConfig"}`.

The learner keeps minibatches, processes, bad steps and checkpoints. An algorithm says two things: which decisions of a
rollout count with what advantage (`make_batch`), and what is minimized (`loss`; `SurrogateConfig` has the clipped one).
"""

import numpy as np

from vla_rl.algorithms.base import AlgoConfig, episode_batch
from vla_rl.algorithms.batch import shuffle_advantages
from vla_rl.algorithms.losses import entropy_mean, tensor


class SelfImitationConfig(AlgoConfig):
    """Self-imitation: the policy clones its own successes, the more the rarer success was."""

    kind: str = "my_algorithm:SelfImitationConfig"

    def make_batch(self, episodes, evaluate, shuffle, world):
        """Weigh each successful episode by the share that failed; failures are left out.

        Args:
            episodes: this process's. evaluate: gives log-probabilities without gradient. world: all processes.
            shuffle: for the negative control: whose success it was is permuted.
        """
        success, own = world.all_gather_rows(np.array([float(e.success) for e in episodes]))
        if shuffle is not None:
            success = shuffle_advantages(success, shuffle)
        advantage = (success * (1 - success.mean()))[own]  # (E,)
        return episode_batch(self, episodes, advantage, advantage > 0, evaluate, world)

    def loss(self, batch, rows, weight, out, *, num_rows, only_critic):
        """Minus the advantage-weighted log-probability of what was done.

        Args:
            rows: int (B,), decisions of the batch. weight: (B, H), of each action, 1 in sum over the minibatch.
            out: the policy's `PolicyOutput` for these decisions: log_prob and entropy (B, H, A), with gradient.
        """
        weights = tensor(weight, out.log_prob)
        advantage = tensor(batch.advantage[rows], out.log_prob)  # (B, H)
        loss = -(weights * advantage * out.log_prob.mean(-1)).sum()
        entropy = entropy_mean(out.entropy, weights)
        return loss, {"loss/policy": loss, "entropy": entropy, "weight": weights.sum()}
