"""FAST's tokenizer of action chunks (Pertsch et al. 2025, arXiv 2501.09747): its files, and a tiny one.

A chunk's cosine transform over time is rounded, flattened and compressed by byte pair encoding. The tokenizer's folder
on the hub brings code of its own, which LeRobot runs. Here the same folder is read as data alone, by the copy of that
class that LeRobot ships with MolmoAct2.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

VOCABULARY = 192  # Of the tiny tokenizer.
_MODULES = ("lerobot.policies.pi0_fast.modeling_pi0_fast", "lerobot.processor.tokenizer_processor")
_SCALE = 20.0  # Of the tiny one, at most: rounds to a 20th.


class FolderTokenizers:
    """Stands in for transformers' AutoProcessor and AutoTokenizer in LeRobot: reads folders and runs no code."""

    def __init__(self, read: Any) -> None:
        self._read = read

    def from_pretrained(self, name: str, trust_remote_code: bool = False, **options: Any) -> Any:
        """The tokenizer in a folder, or of that name on the hub."""
        return self._read(name, **options)


@contextmanager
def read_as_data() -> Iterator[None]:
    """Inside the block LeRobot's pi0-FAST and its processors read both tokenizers without running a folder's code.

    Changes names in LeRobot's modules for as long, so no other thread may build one meanwhile.
    """
    ours = {
        "AutoProcessor": FolderTokenizers(UniversalActionProcessor.from_pretrained_local),
        "AutoTokenizer": FolderTokenizers(AutoTokenizer.from_pretrained),
    }
    modules = [importlib.import_module(name) for name in _MODULES]
    before = [(module, name, getattr(module, name)) for module in modules for name in ours]
    for module, name, _ in before:
        setattr(module, name, ours[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def write(tokenizer: Any, folder: Path) -> None:
    """Write a FAST tokenizer as its folder on the hub is, without code."""
    tokenizer.bpe_tokenizer.save_pretrained(folder)
    names = ("scale", "vocab_size", "min_token", "action_dim", "time_horizon")
    config = {name: getattr(tokenizer, name) for name in names}
    (folder / "processor_config.json").write_text(json.dumps(config, indent=2))


def tiny_fast_tokenizer(chunk_size: int, action_dim: int) -> Any:
    """A FAST tokenizer for actions between -1 and 1, fitted to made-up smooth chunks; the same every time.

    Its coefficients are single bytes, so that every sequence of its tokens is a chunk.
    """
    reach = 1.25 * chunk_size**0.5  # Of the mean's coefficient, with room for what exceeds the quantiles.
    largest = min(int(_SCALE * reach), 63)  # A byte that is a character by itself: 127 of them.
    rng = np.random.default_rng(0)
    shape = (1024, chunk_size, action_dim)
    chunks = rng.integers(-largest, largest + 1, shape) * (rng.random((1024, 1, action_dim)) < 0.6)
    chunks[:, 1:] *= rng.random((1024, chunk_size - 1, action_dim)) < 0.1
    tokenizer, split = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [split.pre_tokenize_str(chr(code))[0][0] for code in range(2 * largest + 1)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    texts = ("".join(map(chr, chunk.flatten() + largest)) for chunk in chunks)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return UniversalActionProcessor(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False),
        scale=largest / reach,
        vocab_size=VOCABULARY,
        min_token=-largest,
        time_horizon=chunk_size,
        action_dim=action_dim,
    )
