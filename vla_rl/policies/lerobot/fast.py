"""pi0-FAST as a policy that RL can train: action tokens drawn one after the other, with the likelihood of the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.interfaces import PolicyOutput
from vla_rl.policies import lora
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.policies.lerobot.networks import TOKEN_MASK, TOKENS, attention_of_valid, let_pi_run, mean_of_valid
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.lerobot.policy import LearningPolicy
from vla_rl.policies.token_draws import check_temperature, draw, guided, uniforms
from vla_rl.types import ActionChunk, Observation

_REPLACEMENT = "\ufffd"  # What bytes decode to that are no character.


@dataclass
class _Reading:
    """Hidden states (B, n, F), where the next token is predicted, and how to go on from them.

    Attributes:
        features: float32 (B, F), mean of what was seen. valid: bool (B, P). cache: keys and values of each layer.
    """

    hidden: Tensor
    features: Tensor
    valid: Tensor
    cache: Any


class FastNetwork:
    """The network of a LeRobot pi0-FAST (Pertsch et al. 2025, arXiv 2501.09747), `core`.

    A chunk is written as "Action: ", FAST's tokens from the end of the vocabulary backwards, and "|". The first is
    given, and only the rest is drawn: FAST's tokens are numbered from 0, `end` is "|".

    Attributes:
        end: number of the token that ends a chunk, which is how many FAST has.
    """

    expert = language = "model.paligemma_with_expert.paligemma.model.language_model."

    def __init__(self, core: Any) -> None:
        let_pi_run()
        self.core, self.model = core, core.model
        self.towers = self.model.paligemma_with_expert
        words, self.end = core._paligemma_tokenizer, len(core.action_tokenizer.bpe_tokenizer)
        last = words.vocab_size - 1 - core.config.fast_skip_tokens
        bar = words.convert_tokens_to_ids("|")
        if last - self.end < -1 or bar is None:
            raise ConfigError(
                f"policy.tokenizer: has {words.vocab_size} tokens, too few for policy.action_tokenizer's {self.end}"
            )
        self.bos: int = words.bos_token_id
        self.start: list[int] = words.encode("Action: ", add_special_tokens=False)
        self.ids = torch.tensor([*range(last, last - self.end, -1), bar])

    @property
    def feature_size(self) -> int:
        return self.towers.paligemma.config.text_config.hidden_size

    def read(self, batch: dict[str, Any], tokens: Tensor | None, use_cache: bool = False) -> _Reading:
        """Read a preprocessed batch, "Action: " and tokens int64 (B, n - 1), -1 behind their end; None: none.

        The masks are those with which LeRobot acts. (It trains with ones that hide the token before "Action: " from the
        instruction.)
        """
        images, image_masks = self.core._preprocess_images(batch)
        rows, device = len(batch[TOKENS]), batch[TOKENS].device
        bos = torch.full((rows, 1), self.bos, device=device)
        given = torch.tensor(self.start, device=device).expand(rows, -1)
        present = torch.ones_like(given, dtype=torch.bool)
        if tokens is not None:
            given = torch.cat([given, self._words(tokens)], 1)
            present = torch.cat([present, tokens >= 0], 1)
        words = torch.cat([batch[TOKENS], bos], 1)
        mask = torch.cat([batch[TOKEN_MASK].bool(), torch.ones_like(bos, dtype=torch.bool)], 1)
        embeddings, valid, attention, *_ = self.model.embed_prefix_fast(
            images, image_masks, words, mask, given, present
        )
        seen = embeddings.shape[1] - given.shape[1]
        hidden, cache = self._forward(embeddings, attention, valid.cumsum(1) - 1, None, use_cache)
        features = mean_of_valid(hidden[:, :seen], valid[:, :seen])
        return _Reading(hidden[:, seen + len(self.start) - 1 :], features, valid, cache)

    def go_on(self, reading: _Reading, tokens: Tensor) -> _Reading:
        """Read one more token (B, 1)."""
        valid = F.pad(reading.valid, (0, 1), value=True)
        embeddings = self.towers.embed_language_tokens(self._words(tokens))
        position = valid.sum(1, keepdim=True) - 1
        hidden, cache = self._forward(embeddings, valid[:, None], position, reading.cache, True)
        return _Reading(hidden, reading.features, valid, cache)

    def _forward(
        self, embeddings: Tensor, attention: Tensor, position: Tensor, cache: Any, use_cache: bool
    ) -> tuple[Tensor, Any]:
        embeddings = embeddings.to(self.towers.paligemma.lm_head.weight.dtype)
        (hidden, _), cache = self.towers.forward(
            attention_mask=attention_of_valid(attention, embeddings.dtype),
            position_ids=position,
            past_key_values=cache,
            inputs_embeds=[embeddings, None],
            use_cache=use_cache,
        )
        return hidden, cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 (B, n, end + 1) of FAST's tokens and the end, from hidden states (B, n, F)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.towers.paligemma.lm_head.weight[self.ids.to(hidden.device)].float())

    def _words(self, tokens: Tensor) -> Tensor:
        """FAST's tokens (B, n) as PaliGemma's; those behind the end as any."""
        return self.ids.to(tokens.device)[tokens]

    def actions(self, tokens: Tensor) -> Tensor:
        """Normalized actions float32 (B, C, A) of tokens (B, n), by LeRobot's rule: too few coefficients are filled
        with 0, too many are left out. A chunk with bytes that are no character is all 0.
        """
        core, rows = self.core, []
        bpe, size = core.action_tokenizer.bpe_tokenizer, core.config.chunk_size
        for drawn in tokens.tolist():
            row = [token for token in drawn if 0 <= token < self.end]
            rows.append([] if _REPLACEMENT in bpe.decode(row) else row)
        decoded = core.decode_actions_with_fast(rows, size, core.config.output_features["action"].shape[0])
        return torch.from_numpy(decoded).float().to(tokens.device)


class LeRobotFastPolicy(LearningPolicy, GuidablePolicy):
    """LeRobot's pi0-FAST. All tokens of a chunk decide all of its actions, so a chunk has one likelihood.

    `ActionChunk.tokens` is int64 (B, N), FAST's tokens, then `network.end`, then -1. The log-probability (B, H, A) is
    that of the whole chunk, in its first component, which is executed whatever happens; the others are 0. So
    `algo.ratio_level` belongs at `chunk`. The entropy (B, H, A) is the mean of the tokens', the same everywhere.
    """

    resizes_images = False
    has_one_likelihood = True

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        self.network = FastNetwork(core)
        self._add_critic(self.network.feature_size)
        self.num_tokens: int = core.config.max_decoding_steps - len(self.network.start)

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """See `GuidablePolicy.act`."""
        return GuidablePolicy.act(self, obs, generator, temperature)

    @torch.no_grad()
    @lora.acts_merged
    def act_guided(
        self,
        obs: Observation,
        plain: Sequence[Observation],
        weight: float,
        generator: torch.Generator | None,
        temperature: float,
    ) -> ActionChunk:
        """See `GuidablePolicy`."""
        check_temperature(temperature, lowest=0.0)
        batch, rows, end = self._batch(obs), obs.batch_size, self.network.end
        numbers = uniforms((self.num_tokens, rows, 1), generator, self.device, dim=1) if temperature > 0 else None
        tokens = torch.full((rows, self.num_tokens), -1, device=self.device)
        log_prob = torch.zeros(rows, device=self.device)
        open_rows = torch.ones(rows, dtype=torch.bool, device=self.device)
        with self._autocast():
            batches = [batch, *(self._batch(each) for each in plain)]
            readings = [self.network.read(each, None, use_cache=True) for each in batches]
            features = readings[0].features
            for n in range(self.num_tokens):
                logits = guided([self.network.logits(reading.hidden) for reading in readings], weight)
                drawn = draw(logits, temperature, None, None if numbers is None else numbers[n])
                if temperature > 0:
                    each = torch.log_softmax(logits / temperature, -1).gather(-1, drawn[..., None])
                    log_prob += torch.where(open_rows, each[:, 0, 0], 0.0)
                tokens[:, n] = torch.where(open_rows, drawn[:, 0], -1)
                open_rows &= drawn[:, 0] != end
                if n + 1 == self.num_tokens or not bool(open_rows.any()):
                    break
                readings = [self.network.go_on(reading, drawn) for reading in readings]
        value = self._value(features, batch)
        actions = self.network.actions(tokens)
        return ActionChunk(
            actions=self._to_environment(self._executed(actions)),
            tokens=tokens.cpu().numpy(),
            log_prob=None if temperature == 0 else self._of_chunk(log_prob).cpu().numpy(),
            value=None if value is None else value.cpu().numpy(),
        )

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient. See `Policy.evaluate`.

        Raises:
            ValueError: the chunk has no tokens, or ones of another shape; temperature <= 0.
        """
        check_temperature(temperature, lowest=1e-6)
        tokens = torch.from_numpy(self._check_tokens(chunk.tokens)).to(self.device)
        tokens = tokens[:, : int((tokens >= 0).sum(1).max())]
        lora.forget_merged(self)
        batch, counted = self._batch(obs), tokens >= 0
        with self._autocast():
            reading = self.network.read(batch, tokens[:, :-1])
        log_probs = torch.log_softmax(self.network.logits(reading.hidden) / temperature, -1)
        each = log_probs.gather(-1, tokens.clamp_min(0)[..., None]).squeeze(-1)
        entropy = (-(log_probs.exp() * log_probs).sum(-1) * counted).sum(1) / counted.sum(1)
        shape = (len(tokens), self.chunk_size, self.action_dim)
        return PolicyOutput(
            log_prob=self._of_chunk((each * counted).sum(1)),
            entropy=entropy[:, None, None].expand(shape),
            value=self._value(reading.features, batch),
        )

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """LeRobot's cross-entropy of a chunk's tokens; actions float32 (B, C, A). See `Policy.bc_loss`.

        A token stands for no single action, so actions past an episode's end are not left out, but replaced by the last
        one before it.

        Args:
            valid: bool (B, C or fewer), False where a chunk runs past its episode's end.
        """
        padded, counted = self._padded(actions, valid)
        last = np.maximum(counted.sum(1) - 1, 0)
        step = np.minimum(np.arange(padded.shape[1]), last[:, None])
        batch = self._batch(obs, np.take_along_axis(padded, step[..., None], 1))
        lora.forget_merged(self)
        with self._autocast():
            loss, _ = self.core.forward(batch)
        return loss, {"token_loss": loss.detach()}

    @torch.no_grad()
    def embed(self, obs: Observation) -> Tensor:
        """Mean vision-language features and the normalized state, (B, D). See `Policy.embed`."""
        batch = self._batch(obs)
        with self._autocast():
            reading = self.network.read(batch, None)
        return self._with_state(reading.features, batch)

    def _of_chunk(self, x: Tensor) -> Tensor:
        """(B,) as (B, H, A): in the first component, 0 elsewhere."""
        rest = self.chunk_size * self.action_dim - 1
        return F.pad(x[:, None], (0, rest)).view(len(x), self.chunk_size, self.action_dim)

    def _check_tokens(self, tokens: np.ndarray | None) -> np.ndarray:
        if tokens is None:
            raise ValueError("chunk.tokens: None; this policy can only evaluate chunks that carry action tokens")
        if tokens.ndim != 2 or tokens.shape[1] != self.num_tokens or tokens.max(initial=0) > self.network.end:
            raise ValueError(
                f"chunk.tokens: shape {tokens.shape} with tokens up to {tokens.max(initial=0)}; this policy's are (B, "
                f"{self.num_tokens}), up to {self.network.end}"
            )
        return tokens
