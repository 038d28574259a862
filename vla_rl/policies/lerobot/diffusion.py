"""Diffusion Policy as a policy that RL can train: DPPO's likelihood of its denoising steps, and behavior cloning."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.interfaces import PolicyOutput
from vla_rl.policies.lerobot.flow_sampling import LOG_2PI, log_density, normal, random_step
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.lerobot.policy import ACTION, STATE, LearningPolicy
from vla_rl.policies.token_draws import check_temperature
from vla_rl.types import ActionChunk, Observation


class LeRobotDiffusionPolicy(LearningPolicy):
    """LeRobot's Diffusion Policy (Chi et al. 2023, arXiv 2303.04137), which learns by DPPO (arXiv 2409.00588).

    Each denoising step is a Gaussian: the posterior of DDPM, or DDIM's with eta = 1, with a standard deviation of at
    least `sampling.std_floor`. At temperature 0 it is LeRobot's own sampler, whose noise comes from the generator.

    `ActionChunk.path` is float32 (B, P, C, A + 1): P points with all C actions of the horizon, and in the last column
    the training step that each was denoised to, -1 for actions; P is 2, a step drawn at random, or K + 1 with `joint`.
    The log-probability (B, H, A) is of the actions that are executed, in those steps.
    """

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        self._needs_every_camera()
        if config.sampling.method != "flow_sde":
            raise ConfigError("policy.sampling.method: got 'flow_noise', which is for flow policies; leave it out")
        self.num_steps: int = config.sampling.num_steps or core.diffusion.num_inference_steps
        self.history: int = core.config.n_obs_steps
        encoder = core.diffusion.unet.down_modules[0][0].cond_encoder[1]
        self._add_critic(encoder.in_features - core.config.diffusion_step_embed_dim)
        self._set_steps()

    def _set_steps(self) -> None:
        """The training steps that are denoised from and to, int64 (K + 1,), and the products of 1 - beta."""
        scheduler = self.core.diffusion.noise_scheduler
        scheduler.set_timesteps(self.num_steps)
        self.steps = torch.cat([scheduler.timesteps.cpu(), torch.tensor([-1])])
        self.products: Tensor = scheduler.alphas_cumprod.cpu()

    @property
    def planned(self) -> int:
        return self.core.config.horizon - self.core.config.n_obs_steps + 1

    # --- Policy -------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment. See `Policy.act`.

        Raises:
            ValueError: no statistics yet, a camera is missing, wrong state size, or temperature < 0.
        """
        check_temperature(temperature, lowest=0.0)
        batch, rows = self._batch(obs), obs.batch_size
        source = torch.Generator().manual_seed(0) if generator is None and temperature == 0 else generator
        with self._autocast():
            seen = self._seen(batch)
        x = normal((rows, self.core.config.horizon, self.action_dim), source, self.device)
        chosen = None if temperature == 0 or self.config.sampling.joint else self._choose(rows, generator)
        points, total = [x], torch.zeros_like(x)
        before, after = x, x
        for k in range(self.num_steps):
            mean, std = self._step(seen, x, *self._levels(k, rows), temperature)
            drawn = mean + std * normal(x.shape, source, x.device) if bool((std > 0).any()) else mean
            if temperature > 0:
                log_prob = log_density(drawn, mean, std, self.config.sampling.log_prob_clamp)
                here = torch.ones(rows, dtype=torch.bool) if chosen is None else chosen == k
                here = here[:, None, None].to(x.device)
                before, after = torch.where(here, x, before), torch.where(here, drawn, after)
                total = total + torch.where(here, log_prob, 0.0)
            x = drawn
            points.append(x)
        value = self._value(seen, batch)
        actions = self._to_environment(self._executed(x))
        critic = None if value is None else value.cpu().numpy()
        if temperature == 0:
            return ActionChunk(actions, value=critic)
        levels = self.steps.expand(rows, -1)
        if chosen is not None:
            points, levels = [before, after], torch.stack([self.steps[chosen], self.steps[chosen + 1]], 1)
        column = levels.to(x)[:, :, None, None].expand(-1, -1, x.shape[1], 1)
        path = torch.cat([torch.stack(points, 1), column], -1)
        return ActionChunk(actions, path=path.cpu().numpy(), log_prob=self._executed(total).cpu().numpy(), value=critic)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient. See `Policy.evaluate`.

        Raises:
            ValueError: the chunk has no path, or one of another sampler; temperature <= 0.
        """
        check_temperature(temperature, lowest=1e-6)
        path = torch.from_numpy(self._check_path(chunk.path)).to(self.device)
        batch = self._batch(obs)
        with self._autocast():
            seen = self._seen(batch)
        points, levels = path[..., :-1], path[:, :, 0, -1].round().long().cpu()
        total, entropy = torch.zeros_like(points[:, 0]), torch.zeros_like(points[:, 0])
        for k in range(points.shape[1] - 1):
            mean, std = self._step(seen, points[:, k], levels[:, k], levels[:, k + 1], temperature)
            total = total + log_density(points[:, k + 1], mean, std, self.config.sampling.log_prob_clamp)
            entropy = entropy + std.log() + 0.5 * (LOG_2PI + 1)
        return PolicyOutput(self._executed(total), self._executed(entropy), self._value(seen, batch))

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """LeRobot's denoising loss on actions float32 (B, C, A); fewer than C leave the rest out of the loss.

        Actions before the present, which LeRobot clones where it reads a history, are unknown and left out. In
        evaluation mode noise and steps depend on the actions alone, so that validation losses can be compared.

        Args:
            valid: bool (B, C or fewer), False where a chunk runs past its episode's end.
        """
        padded, counted = self._padded(actions, valid)
        past = self.history - 1
        batch = self._batch(obs, np.concatenate([np.repeat(padded[:, :1], past, 1), padded], 1))
        counted = np.concatenate([np.zeros((len(counted), past), bool), counted], 1)
        source = None if self.training else torch.Generator().manual_seed(zlib.crc32(actions.tobytes()))
        clean, model = batch[ACTION].float(), self.core.diffusion
        noise = normal(clean.shape, source, clean.device)
        most = model.noise_scheduler.config.num_train_timesteps
        steps = torch.randint(0, most, (len(clean),), generator=source).to(clean.device)
        with self._autocast():
            seen = self._seen(batch)
            guess = model.unet(model.noise_scheduler.add_noise(clean, noise, steps), steps, global_cond=seen)
        target = noise if self.core.config.prediction_type == "epsilon" else clean
        losses = ((guess.float() - target) ** 2).mean(-1)
        weight = torch.from_numpy(counted).to(losses)
        loss = (losses * weight).sum() / weight.sum().clamp_min(1.0)
        return loss, {"denoising_loss": loss.detach()}

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """What the denoiser is conditioned on, and the normalized state, (B, D). See `Policy.embed`."""
        batch = self._batch(obs)
        with self._autocast():
            return self._with_state(self._seen(batch), batch).float()

    # --- steering by the starting noise -------------------------------------------------------

    @property
    def noise_shape(self) -> tuple[int, int]:
        """See `NoiseSteeredPolicy`.

        Raises:
            ConfigError: its sampler adds noise in every step.
        """
        if self.core.config.noise_scheduler_type != "DDIM":
            raise ConfigError(
                "online.method: got 'noise', and this diffusion policy's sampler adds noise in each of its steps, "
                "beside the one that it starts from. Set policy.options.noise_scheduler_type=DDIM, or "
                "online.method=best_of_n"
            )
        return self.core.config.horizon, self.action_dim

    @torch.no_grad()
    def steer(self, obs: Observation, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, np.ndarray]:
        """What DDIM makes of noise that is chosen. See `NoiseSteeredPolicy`."""
        batch, (steps, size) = self._batch(obs), self.noise_shape
        with self._autocast():
            seen = self._seen(batch)
        features, chunks = self._with_state(seen, batch).float(), []
        for chosen in choose(features).to(self.device).unbind(1):
            x = chosen.expand(-1, steps, size)
            for k in range(self.num_steps):
                x, _ = self._step(seen, x, *self._levels(k, obs.batch_size), 0.0)
            chunks.append(self._to_environment(self._executed(x)))
        return features, np.stack(chunks, 1)

    # --- parts --------------------------------------------------------------------------------

    def _seen(self, batch: dict[str, Any]) -> Tensor:
        """What the denoiser is conditioned on, (B, F); the present observation stands for its history too."""
        images = [batch[key] for key in self.core.config.image_features]
        repeated = {STATE: batch[STATE][:, None].expand(-1, self.history, -1)}
        if images:
            stacked = torch.stack(images, 1)[:, None]
            repeated["observation.images"] = stacked.expand(-1, self.history, -1, -1, -1, -1)
        return self.core.diffusion._prepare_global_conditioning(repeated)

    def _step(
        self, seen: Tensor, x: Tensor, step: Tensor, next_step: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (B, C, A) of denoising x from training steps int64 (B,) to the next ones.

        DDPM: the posterior q(x' | x, x0) (Ho et al. 2020, arXiv 2006.11239, eq. 6 and 7). DDIM: eq. 12 and 16 of Song
        et al. 2020, arXiv 2010.02502, with eta = 1. At temperature 0 what LeRobot's scheduler does: DDPM's own noise,
        DDIM's none.
        """
        scheduler = self.core.diffusion.noise_scheduler.config
        with self._autocast():
            output = self.core.diffusion.unet(x, step.to(x.device), global_cond=seen).float()
        now = self.products[step].to(x)[:, None, None]
        then = torch.where(next_step >= 0, self.products[next_step.clamp_min(0)], 1.0).to(x)[:, None, None]
        is_noise = scheduler.prediction_type == "epsilon"
        clean = (x - (1 - now).sqrt() * output) / now.sqrt() if is_noise else output
        noise = output if is_noise else (x - now.sqrt() * clean) / (1 - now).sqrt()
        if scheduler.clip_sample:
            clean = clean.clamp(-scheduler.clip_sample_range, scheduler.clip_sample_range)
        own = ((1 - then) / (1 - now) * (1 - now / then)).clamp_min(0.0).sqrt()
        if self.core.config.noise_scheduler_type == "DDPM":
            beta = 1 - now / then
            mean = (then.sqrt() * beta * clean + (now / then).sqrt() * (1 - then) * x) / (1 - now)
            std = own
        else:
            std = own if temperature > 0 else torch.zeros_like(own)
            mean = then.sqrt() * clean + (1 - then - std**2).clamp_min(0.0).sqrt() * noise
        if temperature > 0:
            std = (std * temperature).clamp_min(self.config.sampling.std_floor)
        return mean, std.expand_as(x)

    def _levels(self, k: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.steps[k].expand(rows), self.steps[k + 1].expand(rows)

    def _choose(self, rows: int, generator: torch.Generator | None) -> Tensor:
        return random_step(self.num_steps, rows, generator).cpu()

    def _executed(self, x: Tensor) -> Tensor:
        first = self.history - 1
        return x[:, first : first + self.chunk_size]

    def _check_path(self, path: np.ndarray | None) -> np.ndarray:
        if path is None:
            raise ValueError("chunk.path: None; this policy can only evaluate chunks that carry a denoising path")
        wanted = (
            self.num_steps + 1 if self.config.sampling.joint else 2,
            self.core.config.horizon,
            self.action_dim + 1,
        )
        if path.ndim != 4 or path.shape[1:] != wanted:
            raise ValueError(
                f"chunk.path has shape {path.shape}, this policy's is (B, {', '.join(map(str, wanted))}); "
                "it was drawn with other policy.sampling options"
            )
        return path
