"""Prompts to measure on: an even mix of several files, and their overlap with a training corpus."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from data.chat.conversations import Conversation, DataError, Message, read_conversations

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A chat that waits for an answer: its last message is not the assistant's."""

    id: str
    messages: tuple[Message, ...]


class Overlap(NamedTuple):
    """A run of words that a prompt shares with the corpus, and the `file:line` of the conversation."""

    prompt_id: str
    conversation_id: str
    source: str
    words: str


def read_prompts(paths: Sequence[str | Path], num_prompts: int | None = None) -> list[Prompt]:
    """Read prompts from files of `messages` or `prompt` rows, in turns from each file, so that any number is a mix.

    Answers at the end of a row are left out. Where fewer than `num_prompts` exist, all are taken and a warning says
    how many. Raises `DataError` for a row with nothing to answer, and for an id that stands twice.
    """
    if not paths:
        raise DataError("no prompt files: give at least one .jsonl file with 'messages' or 'prompt' rows")
    if num_prompts is not None and num_prompts < 1:
        raise DataError(f"num_prompts = {num_prompts}: it has to be at least 1")
    files = [read_conversations(path) for path in paths]
    mixed = [conversation for conversation in chain.from_iterable(zip_longest(*files)) if conversation is not None]
    _refuse_duplicates(mixed)
    if num_prompts is not None and num_prompts > len(mixed):
        log.warning("%d prompts were asked for, the files hold %d: taking all of them", num_prompts, len(mixed))
    return [_to_prompt(conversation) for conversation in islice(mixed, num_prompts)]


class PromptOverlap(NamedTuple):
    """How much of one prompt a corpus holds: a whole message (`exact`), or the share of its runs of `n` words.

    `words` is the first such run, at `source`.
    """

    prompt_id: str
    exact: bool
    share: float
    source: str
    words: str


def overlap_by_prompt(prompts: Sequence[Prompt], corpus: Sequence[Conversation], n: int = 8) -> list[PromptOverlap]:
    """The prompts of which the corpus holds a run of `n` words (see `overlap`), those it holds most of first."""
    asked = {_words(text) for conversation in corpus for text in _questions(conversation.messages)}
    found: dict[str, tuple[Overlap, set[str]]] = {}
    for finding in shared_runs(prompts, corpus, n):
        found.setdefault(finding.prompt_id, (finding, set()))[1].add(finding.words)
    result = []
    for prompt in prompts:
        if prompt.id in found:
            first, runs = found[prompt.id]
            own = {" ".join(gram) for text in _questions(prompt.messages) for gram in _grams(text, n)}
            exact = any(_words(text) in asked for text in _questions(prompt.messages) if text.strip())
            result.append(PromptOverlap(prompt.id, exact, len(runs) / len(own), first.source, first.words))
    return sorted(result, key=lambda overlap: (-overlap.exact, -overlap.share))


def overlap(prompts: Iterable[Prompt], corpus: Iterable[Conversation], n: int = 8) -> list[Overlap]:
    """The prompts that the corpus asks too: those which share `n` words in a row with what is said to the assistant
    there.

    Case and punctuation do not count. A prompt message of fewer than `n` words has to equal a whole message of the
    corpus. One finding for each prompt, the first; an empty list means that none is in the corpus.
    """
    first: dict[str, Overlap] = {}
    for finding in shared_runs(prompts, corpus, n):
        first.setdefault(finding.prompt_id, finding)
    return list(first.values())


def shared_runs(prompts: Iterable[Prompt], corpus: Iterable[Conversation], n: int = 8) -> Iterator[Overlap]:
    """Every run of `n` words that a conversation of the corpus shares with a prompt, in the corpus' order (see
    `overlap`).
    """
    owners: dict[tuple[str, ...], list[str]] = {}
    for prompt in prompts:
        for gram in chain.from_iterable(_grams(text, n) for text in _questions(prompt.messages)):
            owners.setdefault(gram, []).append(prompt.id)
    for conversation in corpus:
        for text in _questions(conversation.messages):
            for gram in _grams(text, n):
                for prompt_id in owners.get(gram, ()):
                    yield Overlap(prompt_id, conversation.id, conversation.source, " ".join(gram))


def _questions(messages: Sequence[Message]) -> Iterator[str]:
    return (message["content"] for message in messages if message["role"] == "user")


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    """Every run of `n` words in order, each once; all the words at once where there are fewer."""
    words = _words(text)
    if not words:
        return []
    return list(dict.fromkeys(words[start : start + n] for start in range(max(1, len(words) - n + 1))))


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def _to_prompt(conversation: Conversation) -> Prompt:
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{conversation.source}: the row holds no question: its messages need one of the user's")
    return Prompt(conversation.id, tuple(messages))


def _refuse_duplicates(conversations: Iterable[Conversation]) -> None:
    sources: dict[str, str] = {}
    for conversation in conversations:
        if conversation.id in sources:
            first = sources[conversation.id]
            raise DataError(
                f"{conversation.source}: the id {conversation.id!r} stands at {first} already: "
                "give each prompt its own id"
            )
        sources[conversation.id] = conversation.source
