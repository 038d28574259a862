"""ACT as a policy that RL can train: a Gaussian around the chunk that it regresses, and behavior cloning."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.interfaces import PolicyOutput
from vla_rl.policies.lerobot.flow import NoiseHead
from vla_rl.policies.lerobot.flow_sampling import LOG_2PI, log_density, normal
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.lerobot.policy import ACTION, LearningPolicy
from vla_rl.policies.token_draws import check_temperature
from vla_rl.types import ActionChunk, Observation


class LeRobotActPolicy(LearningPolicy):
    """LeRobot's ACT (Zhao et al. 2023, arXiv 2304.13705). It is deterministic; for RL its chunk is a Gaussian's mean.

    The standard deviation, in normalized units, is `sampling.std_floor`, or learned within `sampling.noise_bounds` from
    the decoder's hidden states (`method: flow_noise`), times the temperature. `ActionChunk.path` is float32 (B, H, A),
    the normalized actions drawn, and the log-probability (B, H, A) is of each. Temporal ensembling does nothing.
    """

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        self._needs_every_camera()
        self._hidden: Tensor | None = None
        core.model.action_head.register_forward_pre_hook(self._keep_hidden)
        self._add_critic(core.config.dim_model)
        learns, width = config.sampling.method == "flow_noise", core.config.dim_model
        self.noise_head = NoiseHead(width, self.action_dim, config.sampling.noise_bounds) if learns else None

    def _keep_hidden(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    # --- Policy -------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment; at temperature 0 ACT's own. See `Policy.act`.

        Raises:
            ValueError: no statistics yet, a camera is missing, wrong state size, or temperature < 0.
        """
        check_temperature(temperature, lowest=0.0)
        batch = self._batch(obs)
        mean, std, hidden = self._density(batch, temperature)
        value = self._value(hidden.mean(1), batch)
        critic = None if value is None else value.cpu().numpy()
        if temperature == 0:
            return ActionChunk(self._to_environment(mean), value=critic)
        path = mean + std * normal(mean.shape, generator, mean.device)
        log_prob = log_density(path, mean, std, self.config.sampling.log_prob_clamp)
        return ActionChunk(
            self._to_environment(path), path=path.cpu().numpy(), log_prob=log_prob.cpu().numpy(), value=critic
        )

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient. See `Policy.evaluate`.

        Raises:
            ValueError: the chunk has no path, or one of another size; temperature <= 0.
        """
        check_temperature(temperature, lowest=1e-6)
        wanted = (self.chunk_size, self.action_dim)
        if chunk.path is None or chunk.path.shape[1:] != wanted:
            found = None if chunk.path is None else chunk.path.shape
            raise ValueError(
                f"chunk.path: shape {found}; this policy can only evaluate chunks that carry (B, *{wanted})"
            )
        batch = self._batch(obs)
        mean, std, hidden = self._density(batch, temperature)
        path = torch.from_numpy(chunk.path).to(self.device)
        return PolicyOutput(
            log_prob=log_density(path, mean, std, self.config.sampling.log_prob_clamp),
            entropy=std.log() + 0.5 * (LOG_2PI + 1),
            value=self._value(hidden.mean(1), batch),
        )

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """LeRobot's loss on actions float32 (B, C, A): L1, and in training the divergence of its latent.

        Args:
            valid: bool (B, C or fewer), False where a chunk runs past its episode's end.
        """
        padded, counted = self._padded(actions, valid)
        batch = self._batch(obs, padded)
        batch["action_is_pad"] = ~torch.from_numpy(counted).to(batch[ACTION].device)
        with self._autocast():
            loss, parts = self.core.forward(batch)
        return loss, parts

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """The decoder's mean hidden state, and the normalized state, (B, D). See `Policy.embed`."""
        batch = self._batch(obs)
        return self._with_state(self._density(batch, 1.0)[2].mean(1), batch)

    # --- parts --------------------------------------------------------------------------------

    def _density(self, batch: dict[str, Any], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and standard deviation (B, H, A) of the executed actions, and hidden states (B, C, F), float32."""
        batch["observation.images"] = [batch[key] for key in self.core.config.image_features]
        with self._autocast():
            mean = self.core.model(batch)[0].float()
        assert self._hidden is not None, "LeRobot's last layer is action_head"
        hidden, self._hidden = self._hidden.float(), None
        std = (
            torch.full_like(mean, self.config.sampling.std_floor)
            if self.noise_head is None
            else self.noise_head(hidden)
        )
        return self._executed(mean), self._executed(std * temperature), hidden
