"""OpenVLA's tokenizers: of the prompt, Llama-2's or a small one of words, and of actions.

OpenVLA's prompt is "In: What action should the robot take to {instruction}?\\nOut:". Its constant
parts are one token each here, so that a tiny model does not spend its time on them.

OpenVLA's action tokenizer: each action dimension is one of 256 uniform bins, each bin a token.

The bins are the last `num_bins` ids of the (un-padded) vocabulary of size V. With edges
`linspace(-1, 1, 256)`, an action a becomes token id `V - digitize(a)`: +1 the lowest id of the
range, -1 the highest. There are 255 centers for 256 ids, so the two lowest ids decode alike.

What is logged is the action, of which there is no telling which token drew it: +1 is written as token 0, 0 and 1 decode
to .996, and .996 is written as 1; all tokens of one sign open or close a gripper; float32 may round neighbors to one
number. So the likelihood of a logged action is that of all its tokens together (`targets`). That holds for whoever
acted (this policy, another one, a person), where tokens kept in datasets would serve only the policy that drew them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

TOKENIZER_FILE = "tokenizer.json"
UNK, BOS, EOS, ASK, ANSWER = range(5)
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "in: what action should the robot take to", "? out:")

# Words of tabletop manipulation instructions (our tabletop, LIBERO, robosuite, RoboTwin).
_WORDS = """
a again alphabet and around arm at away back basket bbq beer behind between bell big bin black block blocks
blue book bottle bottom bowl box bread bring brown burger butter button cabinet caddy can cardboard carton
center chocolate clean close closed coffee compartment cookie cookies corner cream cube cup cups desk dish
door down drawer drop dressing edge end far first flat flip fork front fries from glass goal grasp gray green
grip ground hammer handle hand hang heat hold hot in insert inside into it jar ketchup kettle knife lamp
laptop large left lid lift light long maker middle milk microwave mixer moka mouse move mug near next object
of off on one onto open or orange other out over pan peg phone pick pink pitcher place plate pot pour press
pudding pull purple push put rack ramekin red release remote right ring robot roller rotate round salad sauce
scan scanner second shelf shoe short side slide small soup spatula spoon square stack stand stapler stick stir
stove sweep switch table take tall target tea the them then third thread to tomato top towards toward towel
toy tray triangle turn two under until up upright use white wide wine wipe wooden with yellow zone
"""
ROBOT_WORDS = tuple(_WORDS.split())


class WordTokenizer:
    """Lower-case words to ids: special tokens, known words, then hash buckets for all others.

    The ids end below `vocab_size`, where the action tokens begin.
    """

    bos_token_id = BOS
    eos_token_id = EOS

    def __init__(self, words: Iterable[str], size: int):
        """`size`: ids in all, special tokens and hash buckets included.

        Raises:
            ValueError: more words than ids.
        """
        self.words = tuple(dict.fromkeys(words))
        self.size = size
        self._ids = {word: len(SPECIAL_TOKENS) + i for i, word in enumerate(self.words)}
        self._first_bucket = len(SPECIAL_TOKENS) + len(self.words)
        self.num_buckets = size - self._first_bucket
        if self.num_buckets < 0:
            raise ValueError(f"tokenizer: {len(self.words)} words do not fit into {size} ids")
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def for_instructions(cls, instructions: Iterable[str], size: int) -> WordTokenizer:
        """A tokenizer that knows the robot words and every word of these instructions."""
        own = sorted({word for text in instructions for word in split_words(text)} - set(ROBOT_WORDS))
        return cls((*ROBOT_WORDS, *own), size)

    def encode_prompt(self, instruction: str) -> tuple[int, ...]:
        """Ids of the whole prompt for an instruction: BOS, the question, the words, "? out:"."""
        ids = self._cache.get(instruction)
        if ids is None:
            ids = (BOS, ASK, *(self._word_id(word) for word in split_words(instruction)), ANSWER)
            self._cache[instruction] = ids
        return ids

    def _word_id(self, word: str) -> int:
        if word in self._ids:
            return self._ids[word]
        return self._first_bucket + zlib.crc32(word.encode()) % self.num_buckets if self.num_buckets else UNK

    def write(self, folder: Path) -> None:
        """Write tokenizer.json."""
        (folder / TOKENIZER_FILE).write_text(json.dumps({"kind": "words", "size": self.size, "words": self.words}))

    @classmethod
    def read(cls, folder: Path) -> WordTokenizer:
        """The tokenizer in a policy folder.

        Raises:
            ValueError: the file is missing or not a word tokenizer.
        """
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise ValueError(f"{file}: not found. Copy the policy folder again, with all of its files.")
        try:
            values = json.loads(file.read_text())
            return cls(values["words"], values["size"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a tokenizer saved by this package ({error!r}).") from error


def split_words(text: str) -> list[str]:
    """Lower-case words and numbers of a text, punctuation dropped."""
    return re.findall(r"[a-z0-9]+", text.lower())


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


class ActionTokenizer:
    """Between normalized actions in [-1, 1] and action tokens.

    An action token is the index of its id among the action ids, in vocabulary order: 0 is id
    V - num_bins (action +1) and num_bins - 1 is id V - 1 (action -1). It is the index into
    logits that were computed for the action ids alone.
    """

    def __init__(self, num_bins: int = 256):
        if num_bins < 3:
            raise ValueError(f"action_bins: got {num_bins}, needs at least 3")
        self.num_bins = num_bins
        self.edges = np.linspace(-1.0, 1.0, num_bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2.0

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Tokens int64 of normalized actions, any shape; values outside [-1, 1] are clipped.

        Raises:
            ValueError: an action is NaN.
        """
        if np.isnan(actions).any():
            raise ValueError("actions contain NaN; check the dataset and its statistics")
        digits = np.digitize(np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0), self.edges)
        return self.num_bins - digits.astype(np.int64)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Normalized actions float64 (bin centers) of tokens, any shape."""
        digits = self.num_bins - np.asarray(tokens, dtype=np.int64)
        return self.centers[np.clip(digits - 1, 0, self.num_bins - 2)]

    def targets(self, actions: np.ndarray, to_env: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Logged actions as tokens, int64 (..., A), and which tokens are the same action, bool (..., A, num_bins).

        A policy that reads its tokens so far is given these, 0 where 0 or 1 was drawn, as of actions at the upper
        quantile: its likelihood is exact but for what it would make of the other one.

        Args:
            actions: normalized, (..., A). to_env: such actions in the environment's units.
        """
        tokens = self.encode(actions)
        tokens[tokens == 1] = 0
        dims = np.arange(tokens.shape[-1])
        every = to_env(self.decode(np.arange(self.num_bins)[:, None].repeat(len(dims), 1))).T
        return tokens, every[dims] == every[dims, tokens][..., None]
