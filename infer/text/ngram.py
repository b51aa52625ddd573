"""Prompt look-up: proposes what followed an earlier occurrence of a token sequence's last n-gram."""

from __future__ import annotations

from collections.abc import Sequence


def ngram_propose(tokens: Sequence[int], lookahead: int, max_n: int = 4, min_n: int = 2) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix of `tokens` with `min_n` to `max_n` tokens.

    At most `lookahead` tokens, fewer where the text ends sooner, none where no suffix occurred before. The reference
    for `NgramIndex`. `ngram_propose([1, 2, 3, 9, 1, 2], lookahead=2)` is [3, 9].
    """
    tokens = list(tokens)
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + lookahead]
    return []


class NgramIndex:
    """`ngram_propose` over a growing sequence: appending a token and proposing take O(max_n)."""

    def __init__(self, tokens: Sequence[int] = (), max_n: int = 4, min_n: int = 2) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> end of its latest occurrence that has a token behind it
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            for suffix in self._suffixes():  # only now does a token follow them
                self._ends[suffix] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, lookahead: int) -> list[int]:
        """The same answer as `ngram_propose` on all tokens so far."""
        for suffix in self._suffixes():
            end = self._ends.get(suffix)
            if end is not None:
                return self._tokens[end : end + lookahead]
        return []

    def _suffixes(self) -> list[tuple[int, ...]]:
        return [tuple(self._tokens[-n:]) for n in self._sizes if n <= len(self._tokens)]
