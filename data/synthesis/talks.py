"""A conversation that the target answers turn by turn: what is asked next, and the row that comes of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from data.chat.messages import Message, Tool

Row = dict[str, Any]
ANSWER: Message = {"role": "assistant", "content": ""}  # a place for an answer at the end


class Plan(NamedTuple):
    """A conversation to answer. Assistant messages stand for answers to write, but for tool calls, since their results
    follow.
    """

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
    """An answer of so many tokens; `ended` says that the target ended it. `refused`: why there is none."""

    key: str
    message: Message
    ended: bool
    tokens: int
    refused: str | None = None


class Answerer(Protocol):
    """Something that answers questions: the target in this process, or a server."""

    def ask(self, question: Question, first: bool = False) -> str | None:
        """Queue a question, before the others with `first`. The reason where it cannot be asked."""
        ...

    def replies(self) -> Iterator[Reply]:
        """Replies as they come, until no question waits; more may be asked meanwhile."""
        ...


def next_step(plan: Plan, replies: Sequence[Reply], seed: int) -> Question | Row | None:
    """What follows after `replies`, the answers so far in order: the next question, the finished row, or None: nothing
    to keep.

    An answer that the length limit cut ends the conversation, as does one that calls a tool, for nobody knows the
    result; an empty one, or a turn that was refused, ends it with the answer before.
    """
    history: list[Message] = []
    kept: list[Message] = []  # up to the last answer
    used = 0
    places = plan.messages if plan.messages[-1]["role"] == "assistant" else (*plan.messages, ANSWER)
    for message in places:
        if message["role"] != "assistant":
            history.append(message)
        elif message.get("tool_calls") or message.get("weight") == 0:
            history.append({**message, "weight": 0})
        elif used == len(replies):
            return Question(
                plan.key,
                tuple(history),
                plan.tools,
                plan.temperature,
                draw_seed(seed, plan.key, f"answer{used or ''}"),
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
    return _row(plan, kept, replies[:used]) if kept else None


def num_answers(plan: Plan) -> int:
    """How many answers the conversation asks for."""
    answers = [
        m for m in plan.messages if m["role"] == "assistant" and not m.get("tool_calls") and m.get("weight") != 0
    ]
    return len(answers) + (plan.messages[-1]["role"] != "assistant")


def draw_seed(seed: int, key: str, purpose: str) -> int:
    """The seed of one generation, independent of those of other keys and purposes."""
    return random.Random(f"{seed}:{key}:{purpose}").getrandbits(48)


def _row(plan: Plan, messages: list[Message], replies: Sequence[Reply]) -> Row:
    row: Row = {"id": plan.key, "messages": messages, "finish_reason": "stop" if replies[-1].ended else "length"}
    row |= {"subject": plan.subject, "temperature": plan.temperature, "tokens": sum(reply.tokens for reply in replies)}
    return row | ({"tools": list(plan.tools)} if plan.tools else {})
