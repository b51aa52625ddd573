"""Streamed text equals decoding at once, shows no broken characters, and ends before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from infer.text.detokenize import REPLACEMENT, AnswerText, Detokenizer, decode, first_stop, held_length, token_bytes
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.get_vocab()["<|im_end|>"]


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_make_the_text_and_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids_of(text)]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text  # all of it is out before the flush
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_tokens_stream_to_what_decoding_at_once_gives(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    streamed = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    assert streamed == decode(TOKENIZER, tokens)


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in ids_of("né€")] == ["n", "", "é", "", "", "€"]


def test_special_tokens_are_not_shown_and_do_not_split_characters() -> None:
    first, second = ids_of("é")
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in (first, END, second, END)] == ["", "", "é", ""]
    assert detokenizer.flush() == ""


def test_bytes_that_stay_incomplete_come_with_the_flush() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids_of("é")[0]) == ""
    assert detokenizer.flush() == REPLACEMENT


def plainly_stopped(text: str, stop: list[str]) -> tuple[str, int, bool]:
    """Character by character: the text before the stop string that is complete first, and the characters read until
    then.
    """
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))], end, True
    return text, len(text), False


@given(st.text("ab.", max_size=24), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_stop_strings_end_text_and_count_at_the_same_token(text: str, stop: list[str]) -> None:
    answer, shown = AnswerText(TOKENIZER, stop), ""
    expected, count, stopped = plainly_stopped(text, stop)
    for token in ids_of(text):
        shown += answer.push(token)
        assert expected.startswith(shown)  # nothing is shown that has to be taken back
        if answer.stopped:
            break
    shown += answer.finish()
    assert (shown, answer.text) == (expected, expected)
    assert (answer.num_tokens, answer.stopped) == (count, stopped)


def test_a_stop_string_may_end_in_the_bytes_that_a_flush_gives() -> None:
    answer = AnswerText(TOKENIZER, [f"x{REPLACEMENT}"])
    assert "".join(map(answer.push, [*ids_of("ax"), ids_of("é")[0]])) == "a"
    assert answer.finish() == ""
    assert answer.stopped


@pytest.mark.parametrize(
    ("text", "stop", "start"),
    [
        ("abc", ["c"], 2),
        ("abc", ["bc", "c"], 1),
        ("xyz12", ["xyz12", "yz"], 1),
        ("abc", ["d"], None),
        ("abc", [], None),
    ],
)
def test_first_stop(text: str, stop: list[str], start: int | None) -> None:
    assert first_stop(text, stop) == start


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("a. EN", ["END"], 2), ("a. EN", ["ENDE", "NO"], 2), ("END", ["END"], 0), ("", ["END"], 0), ("abc", [], 0)],
)
def test_held_length(text: str, stop: list[str], length: int) -> None:
    assert held_length(text, stop) == length


def test_the_bytes_of_single_tokens_make_the_text() -> None:
    text = "naïve 😀 <\x00>\n"
    assert b"".join(token_bytes(TOKENIZER, token) for token in ids_of(text)) == text.encode()
    assert token_bytes(TOKENIZER, END) == b"<|im_end|>"
    alphabet = [token for token in range(len(TOKENIZER)) if token not in TOKENIZER.all_special_ids]
    assert {token_bytes(TOKENIZER, token) for token in alphabet} == {bytes([byte]) for byte in range(256)}


def test_the_bytes_of_single_tokens_where_a_decoder_strips_spaces() -> None:
    """As in Llama-2: U+2581 is a space, bytes are named, and the first space of a text is dropped."""
    vocab = {"<unk>": 0, "\u2581the": 1, "the": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert [token_bytes(fast, token) for token in (1, 2, 3, 4)] == [b" the", b"the", b"\xc3", b"\xa9"]
