"""A small word tokenizer for policies trained from scratch, saved with them as tokenizer.json.

OpenVLA's prompt is "In: What action should the robot take to {instruction}?\\nOut:". Its constant
parts are one token each here, so that a tiny model does not spend its time on them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

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
