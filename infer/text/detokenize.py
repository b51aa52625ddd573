"""Incremental detokenisation: UTF-8 safe, without special tokens, and cut at stop strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of `token_ids` without special tokens: the one-shot twin of `Detokenizer`."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of one token, leading space included; they need not be whole characters. A special token gives its
    name.
    """
    one = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    two = tokenizer.decode([token_id, token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if REPLACEMENT not in two:
        return two[len(one) :].encode()  # some decoders drop the space of the first token they are given
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(match[1])
    table = _byte_level_alphabet()
    return bytes(table[char] for char in piece) if all(char in table for char in piece) else one.encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (as GPT-2's): printable ones for themselves,
    others from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """Text piece by piece: all pieces, with that of `flush`, make exactly `decode` of all tokens.

    A piece is held back while it ends in bytes that may be the first part of a character. Worked case, one byte a
    token and "é" = C3 A9: push(C3) gives "", push(A9) gives "é".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens of the piece shown last, then those not shown yet
        self._shown_tokens = 0  # of the window
        self._shown = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        self._window.append(token_id)
        text = decode(self._tokenizer, self._window)
        if len(text) <= self._shown or text.endswith(REPLACEMENT):
            return ""
        piece = text[self._shown :]
        # The tokens of this piece stay as context of the next: some decoders drop the space of the first token they
        # are given.
        self._window = self._window[self._shown_tokens :]
        self._shown_tokens = len(self._window)
        self._shown = len(decode(self._tokenizer, self._window))
        return piece

    def flush(self) -> str:
        """What was held back, once no token follows."""
        piece = decode(self._tokenizer, self._window)[self._shown :]
        self._window, self._shown_tokens, self._shown = [], 0, 0
        return piece


class AnswerText:
    """The text of one answer as the user sees it, ending before the first stop string.

    Tokens go in one by one, so a stop string that lies early in a block of accepted tokens, or across two blocks, ends
    the text and `num_tokens` at the same token. Text that may be the start of a stop string is held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.num_tokens = 0  # up to and with the one that completed a stop string
        self.stopped = False  # by a stop string

    @property
    def length(self) -> int:
        """Characters up to here, those that are held back as a possible stop string included."""
        return len(self.text) + len(self._held)

    def push(self, token_id: int) -> str:
        """The text that may be shown now. Not to be called once `stopped`."""
        assert not self.stopped, f"a stop string ended this answer after {self.num_tokens} tokens"
        self.num_tokens += 1
        return self._show(self._detokenizer.push(token_id))

    def completes_stop(self, token_id: int) -> bool:
        """`push`, and return whether a stop string ends the answer at this token."""
        self.push(token_id)
        return self.stopped

    def finish(self) -> str:
        """The text that was held back, once no token follows."""
        if self.stopped:
            return ""
        piece = self._show(self._detokenizer.flush())
        if self.stopped:
            return piece
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _show(self, new: str) -> str:
        self._held += new
        end = first_stop(self._held, self._stop)
        self.stopped = end is not None
        keep = len(self._held) - held_length(self._held, self._stop) if end is None else end
        piece, self._held = self._held[:keep], self._held[keep:]
        self.text += piece
        return piece


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string that is complete first starts in `text` (of two that end together, the longer one); None:
    no stop.
    """
    found = [(text.index(string) + len(string), text.index(string)) for string in stop if string in text]
    return min(found)[1] if found else None


def held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string: `held_length("a. EN", ["END"])` is 2."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(string.startswith(text[-n:]) for string in stop)), 0)
