"""Constrained output (llguidance): grammars from regular expressions, JSON schemas, choices and Lark, and the tokens
that one allows after a text.

R rows, V vocabulary. A `GrammarState` is the state after the committed tokens, and only `advance` moves it. Questions
about drafted tokens look ahead on a copy, so rejected tokens leave no trace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor

from drafters.base.errors import UserError
from drafters.targets.target import Target

log = logging.getLogger(__name__)
# any layout, but no endless run of blanks, which small models fall into
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\n]{0,20}"}
ANY_OBJECT = {"type": "object"}


def regex_grammar(pattern: str) -> str:
    """The whole answer matches `pattern` (syntax of Rust's regex crate). Raises `UserError` for a bad pattern."""
    return _checked("regular expression", pattern, LLMatcher.grammar_from_regex(pattern))


def json_grammar(schema: Any = ANY_OBJECT) -> str:
    """The answer is one JSON value that follows a JSON schema; without one, any object. Raises `UserError` for a bad
    schema.
    """
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema), overrides=JSON_OPTIONS
        )
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error
    return _checked("JSON schema", schema, grammar)


def choice_grammar(choices: Sequence[str]) -> str:
    """The answer is one of `choices`."""
    if not choices or "" in choices:
        raise UserError(f"choices = {list(choices)}: give at least one, and none of them empty")
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(text: str) -> str:
    """The answer follows a context-free grammar in Lark's notation, from the rule `start` on."""
    return _checked("grammar", text, LLMatcher.grammar_from_lark(text))


def _checked(kind: str, value: Any, grammar: str) -> str:
    message = LLMatcher.validate_grammar(grammar)
    if message:
        raise UserError(f"the {kind} {json.dumps(value)[:80]} cannot be used: {' '.join(message.split())[:300]}")
    return grammar


class Vocabulary(NamedTuple):
    """A target's tokens as grammars read them, in a form that can be sent to another process."""

    tokenizer_json: str | None  # None: not a tokenizer that grammars can read
    size: int
    end_token_ids: tuple[int, ...]

    @staticmethod
    def of(target: Target) -> Vocabulary:
        """The target's own."""
        backend = getattr(target.tokenizer, "backend_tokenizer", None)
        if backend is not None and (backend.padding or backend.truncation):
            backend = Tokenizer.from_str(backend.to_str())
            backend.no_padding()
            backend.no_truncation()
        return Vocabulary(backend and backend.to_str(), target.facts.vocab_size, tuple(target.facts.end_token_ids))


class Grammars:
    """Starts grammars over one vocabulary, which is prepared when the first one starts; that takes up to a second."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of the grammars."""
        return self._make_vocabulary()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        text, size, ends = self.vocabulary
        if text is None or not ends:
            raise UserError(
                "grammar: this target has no fast tokenizer or no end token, so its output cannot be constrained"
            )
        try:
            return LLTokenizer(text, n_vocab=size, eos_token=list(ends))
        except ValueError as error:
            raise UserError(
                f"grammar: this target's tokenizer cannot be read for constrained output: {error}"
            ) from error

    def start(self, grammar: str) -> GrammarState:
        """The state before the first token. Raises `UserError` for an unusable tokenizer or grammar."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the grammar cannot be used: {' '.join(matcher.get_error().split())[:300]}")
        return GrammarState(matcher, self.vocabulary)


class GrammarState:
    """The state of a grammar after a request's committed tokens."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens, which were allowed. An end token, and what follows it, is no part of the text."""
        ends = self._vocabulary.end_token_ids
        tokens = list(takewhile(lambda token: token not in ends, tokens))
        consumed = self._matcher.try_consume_tokens(tokens)
        if consumed < len(tokens):
            log.warning("a grammar gave up after %d of the tokens %s: %s", consumed, tokens, self._matcher.get_error())

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow, one after another."""
        return self._matcher.validate_tokens(list(tokens))

    def allowed(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Which tokens may follow each path, bool [R, V]. All of them after a path that is refused or that ended the
        text, since nothing follows it.
        """
        walker, ends = _Walker(self._matcher), self._vocabulary.end_token_ids
        rows = []
        for path in paths:
            ended = bool(path) and path[-1] in ends
            rows.append(
                self._mask(walker.matcher) if walker.go(path) and not ended else np.ones(self._vocabulary.size, bool)
            )
        return torch.from_numpy(np.stack(rows))

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        if matcher.is_error():  # a limit of the library: the text ends here
            mask = np.zeros(self._vocabulary.size, bool)
            mask[list(self._vocabulary.end_token_ids)] = True
            return mask
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(bool)


class _Walker:
    """A copy of a grammar's state that moves from path to path, and rolls back no further than needed."""

    def __init__(self, origin: LLMatcher) -> None:
        self._origin, self._walked = origin, list[int]()
        self.matcher = origin.deep_copy()

    def go(self, path: Sequence[int]) -> bool:
        """Move behind `path`, or before its first token that is refused. Returns whether all of it was allowed."""
        pairs = zip(self._walked, path, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._walked), len(path)))
        if shared < len(self._walked):
            if self.matcher.rollback(len(self._walked) - shared):
                del self._walked[shared:]
            else:  # some grammars cannot roll back
                self.matcher, self._walked = self._origin.deep_copy(), []
        rest = list(path[len(self._walked) :])
        self._walked += rest[: self.matcher.try_consume_tokens(rest)]
        return len(self._walked) == len(path)
