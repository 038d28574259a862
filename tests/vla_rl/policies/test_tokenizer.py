"""The word tokenizer: prompt layout, unknown words, saving."""

import pytest

from vla_rl.policies.openvla.tokenizer import ANSWER, ASK, BOS, ROBOT_WORDS, WordTokenizer, split_words

SIZE = 512


def test_prompt_begins_with_bos_and_ends_with_the_answer_token():
    tokenizer = WordTokenizer.for_instructions([], SIZE)
    ids = tokenizer.encode_prompt("Pick up the red block.")
    assert ids[:2] == (BOS, ASK)
    assert ids[-1] == ANSWER
    assert len(ids) == 3 + 5
    assert ids == tokenizer.encode_prompt("pick up the  RED block"), "case and punctuation do not matter"
    assert ids != tokenizer.encode_prompt("pick up the blue block")


def test_words_given_at_build_time_get_their_own_ids():
    tokenizer = WordTokenizer.for_instructions(["frobnicate the widget"], SIZE)
    assert {"frobnicate", "widget"} <= set(tokenizer.words)
    known = set(ROBOT_WORDS) | {"frobnicate", "widget"}
    ids = {word: tokenizer.encode_prompt(word)[2] for word in known}
    assert len(set(ids.values())) == len(known)


def test_unknown_words_fall_into_hash_buckets_below_the_action_ids():
    tokenizer = WordTokenizer.for_instructions([], SIZE)
    ids = [tokenizer.encode_prompt(f"zyx{i}")[2] for i in range(200)]
    assert len(set(ids)) > 100
    assert min(ids) >= SIZE - tokenizer.num_buckets and max(ids) < SIZE
    assert WordTokenizer(["a"], 6).encode_prompt("unknown")[2] == 0, "without buckets: <unk>"


def test_saved_and_read_back(tmp_path):
    tokenizer = WordTokenizer.for_instructions(["open the frobnicator"], SIZE)
    tokenizer.write(tmp_path)
    again = WordTokenizer.read(tmp_path)
    for text in ("open the frobnicator", "an unheard word"):
        assert again.encode_prompt(text) == tokenizer.encode_prompt(text)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json: not found"):
        WordTokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        WordTokenizer.read(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        WordTokenizer(ROBOT_WORDS, 20)


def test_split_words():
    assert split_words("Put the cup_2 on top, please!") == ["put", "the", "cup", "2", "on", "top", "please"]
