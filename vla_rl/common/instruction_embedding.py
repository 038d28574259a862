"""Instruction embedding by hashed words, and FiLM convolutions.

Every word is looked up by its hash, so no vocabulary is stored and any word can be learned. A word has two rows in the
table and is their sum, so that two words are mixed up only where both rows are the same
(hash embeddings, Svenstrup et al. 2017, arXiv 1709.03933). A word that was never trained on is about nothing: small
noise around zero.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

NUM_ROWS = 1024
MAX_WORDS = 32  # Of an instruction; what follows is left out.
NUM_HASHES = 2
GROUPS = 8  # Of a group norm.


def split_words(instruction: str) -> list[str]:
    """Lower-case words and numbers in order, no punctuation, at most MAX_WORDS; one empty word where there is none."""
    return re.findall(r"[^\W_]+", instruction.lower())[:MAX_WORDS] or [""]


def word_pairs(words: Sequence[str]) -> list[str]:
    """Words, then neighboring words together, which tell "the red one on the blue one" from its reverse."""
    return [*words, *(f"{first} {second}" for first, second in pairwise(words))]


class WordEmbedding(nn.Module):
    """Vectors of an instruction's words.

    Args:
        width: W, of a vector.
        pairs: neighboring words together are words as well.

    Attributes:
        given: what `ids` are in place of those of the instruction; None but within a pass that is recorded.
    """

    def __init__(self, width: int, pairs: bool = False) -> None:
        super().__init__()
        self.pairs = pairs
        self.embed_rows = nn.Embedding(NUM_ROWS, width)
        nn.init.normal_(self.embed_rows.weight, std=0.1)
        self._known: dict[tuple[str, int, torch.device], torch.Tensor] = {}
        self._asked: tuple[tuple[str, ...], torch.Tensor] | None = None
        self.given: torch.Tensor | None = None

    def forward(self, instruction: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """B strings -> vectors (B, L, W), zero past an instruction's end, and bool (B, L), which of them are words."""
        ids = self.ids(tuple(instruction)) if self.given is None else self.given
        is_word = ids[..., 0] >= 0
        return self.embed_rows(ids.clamp_min(0)).sum(2) * is_word[..., None], is_word

    def ids(self, instruction: tuple[str, ...]) -> torch.Tensor:
        """Rows of the table, int64 (B, L, NUM_HASHES), -1 past the end; kept, as imagination asks for them again."""
        device = self.embed_rows.weight.device
        if self._asked is not None and self._asked[0] == instruction and self._asked[1].device == device:
            return self._asked[1]
        texts = {text: self._rows(text) for text in dict.fromkeys(instruction)}
        longest = max(map(len, texts.values()))
        for text, rows in texts.items():
            if (text, longest, device) not in self._known:  # Copied to the device once, not for each batch.
                padding = [(-1,) * NUM_HASHES] * (longest - len(rows))
                self._known[text, longest, device] = torch.tensor([*rows, *padding]).to(device)
        ids = torch.stack([self._known[text, longest, device] for text in instruction])
        self._asked = instruction, ids
        return ids

    def _rows(self, instruction: str) -> list[tuple[int, ...]]:
        words = split_words(instruction)
        pieces = word_pairs(words) if self.pairs else words
        return [tuple(zlib.crc32(f"{i} {piece}".encode()) % NUM_ROWS for i in range(NUM_HASHES)) for piece in pieces]


class FilmResidual(nn.Module):
    """Two convolutions whose channels the words scale and shift (FiLM, Perez et al. 2018, arXiv 1709.07871).

    (B, channels, h, w) in and out; channels a multiple of 8.
    """

    def __init__(self, channels: int, words_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, channels), nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.modulation = nn.Linear(words_width, 2 * channels)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """`words`: (B, words_width)."""
        scale, shift = self.modulation(words)[..., None, None].chunk(2, 1)
        inner = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(inner) * (1 + scale) + shift))
