"""Dialogues that the target answers turn by turn: the next question after given replies, and the finished row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from data.chat.messages import Message, Tool

Row = dict[str, Any]
ANSWER: Message = {"role": "assistant", "content": ""}  # a place for an answer at the end


class Dialogue(NamedTuple):
    """A conversation to answer. Its assistant messages are answered anew, except tool calls, whose results follow."""

    key: str
    subject: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    temperature: float


class Question(NamedTuple):
    """One turn to answer; draws are keyed by `seed`."""

    key: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    temperature: float
    seed: int


class Reply(NamedTuple):
    """An answer of `tokens` tokens; `ended` by the target, not by a limit. `refused`: the reason if there is none."""

    key: str
    message: Message
    ended: bool
    tokens: int
    refused: str | None = None


class Answerer(Protocol):
    """Interface of what answers questions: the target in this process, or a server."""

    def ask(self, question: Question, first: bool = False) -> str | None:
        """Queue a question, with `first` before the others. Returns the reason if it cannot be asked."""
        ...

    def replies(self) -> Iterator[Reply]:
        """Replies as they come, until no question waits; more may be asked meanwhile."""
        ...


def next_step(dialogue: Dialogue, replies: Sequence[Reply], seed: int) -> Question | Row | None:
    """The next question after `replies` (the answers so far, in order), the finished row, or None if nothing is kept.

    An answer that the length limit cut ends the conversation, as does one that calls a tool, whose result is unknown.
    An empty answer, or a refused turn, ends it with the answer before.
    """
    history: list[Message] = []
    kept: list[Message] = []  # up to the last answer
    used = 0
    places = dialogue.messages if dialogue.messages[-1]["role"] == "assistant" else (*dialogue.messages, ANSWER)
    for message in places:
        if message["role"] != "assistant":
            history.append(message)
        elif message.get("tool_calls") or message.get("weight") == 0:
            history.append({**message, "weight": 0})
        elif used == len(replies):
            return Question(
                dialogue.key,
                tuple(history),
                dialogue.tools,
                dialogue.temperature,
                draw_seed(seed, dialogue.key, f"answer{used or ''}"),
            )
        else:
            reply, used = replies[used], used + 1
            if reply.refused or not any(
                reply.message.get(part) for part in ("content", "reasoning_content", "tool_calls")
            ):
                used -= 1
                break
            history.append(reply.message)
            kept = list(history)
            if not reply.ended or reply.message.get("tool_calls"):
                break
    return _row(dialogue, kept, replies[:used]) if kept else None


def num_answers(dialogue: Dialogue) -> int:
    """Number of answers that the conversation asks for."""
    answers = [
        m for m in dialogue.messages if m["role"] == "assistant" and not m.get("tool_calls") and m.get("weight") != 0
    ]
    return len(answers) + (dialogue.messages[-1]["role"] != "assistant")


def draw_seed(seed: int, key: str, purpose: str) -> int:
    """The seed of one generation, independent of those of other keys and purposes."""
    return random.Random(f"{seed}:{key}:{purpose}").getrandbits(48)


def _row(dialogue: Dialogue, messages: list[Message], replies: Sequence[Reply]) -> Row:
    row: Row = {"id": dialogue.key, "messages": messages, "finish_reason": "stop" if replies[-1].ended else "length"}
    row |= {
        "subject": dialogue.subject,
        "temperature": dialogue.temperature,
        "tokens": sum(reply.tokens for reply in replies),
    }
    return row | ({"tools": list(dialogue.tools)} if dialogue.tools else {})
