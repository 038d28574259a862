"""OpenVLA's prompt as ids of Llama-2's tokenizer, from the files beside a published checkpoint."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

BOS_ID = 1
# What "Out: " ends in; OpenVLA appends it to the prompt, since training saw it before the action tokens.
EMPTY_ID = 29871
_FILES = ("tokenizer.json", "tokenizer.model")


class PromptTokenizer(Protocol):
    """What a policy needs of a tokenizer."""

    def encode_prompt(self, instruction: str) -> tuple[int, ...]:
        """Ids of the whole prompt for an instruction, BOS first."""
        ...


def prompt_text(instruction: str) -> str:
    """The question that OpenVLA was trained to answer."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


class LlamaTokenizer:
    """Prompts by the tokenizer in a checkpoint's folder.

    Opened at the first prompt, so that a checkpoint can be read, merged and saved without one.
    """

    def __init__(self, folder: Path, vocab_size: int):
        """`vocab_size`: ids that the network knows, padding excluded."""
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.encode_prompt = lru_cache(maxsize=4096)(self._encode_prompt)
        self._tokenizer = None

    def _encode_prompt(self, instruction: str) -> tuple[int, ...]:
        """Ids of BOS, the prompt and 29871.

        Raises:
            ValueError: no tokenizer in the folder, or its ids are not the network's.
        """
        if self._tokenizer is None:
            self._tokenizer = _open(self.folder)
        ids = self._tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids
        ids = (BOS_ID, *ids, EMPTY_ID)
        if max(ids) >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: the tokenizer gives id {max(ids)}, but the network has {self.vocab_size}; they do not "
                "belong together. Copy the tokenizer that came with these weights."
            )
        return ids


def _open(folder: Path):
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = (
                " There is a tokenizer.model: turn it into a tokenizer.json with "
                "transformers.LlamaTokenizerFast.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        raise ValueError(
            f"{file}: not found, so instructions cannot be turned into tokens.{hint} Copy Llama-2's tokenizer files "
            "there; they come with the checkpoint."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception.
        raise ValueError(f"{file}: not a tokenizer that the tokenizers library reads ({error}).") from error
