"""What a conversation asks next, by hand: answers are written anew, tool calls and their results stay, and what ends a
row.
"""

from __future__ import annotations

from typing import Any

from data.synthesis.dialogue import Dialogue, Question, Reply, next_step, num_answers

SYSTEM, HI, BYE = (
    {"role": role, "content": text} for role, text in (("system", "S"), ("user", "Hi"), ("user", "Bye"))
)
OLD = {"role": "assistant", "content": "old"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "42"}


def dialogue(*messages: dict[str, Any]) -> Dialogue:
    return Dialogue("k", "file", messages, (), 0.8)


def reply(text: str, ended: bool = True, **more: Any) -> Reply:
    return Reply("k", {"role": "assistant", "content": text, **more}, ended, 3)


def asked(step: Any) -> list[Any]:
    assert isinstance(step, Question)
    return list(step.messages)


def row(step: Any) -> dict[str, Any]:
    assert isinstance(step, dict)
    return step


def test_each_turn_is_asked_with_the_answers_before() -> None:
    conversation = dialogue(SYSTEM, HI, OLD, BYE)
    first, second = reply("new"), reply("more")
    assert num_answers(conversation) == 2
    assert asked(next_step(conversation, [], 0)) == [SYSTEM, HI]
    assert asked(next_step(conversation, [first], 0)) == [SYSTEM, HI, first.message, BYE]
    done = row(next_step(conversation, [first, second], 0))
    assert done["messages"] == [SYSTEM, HI, first.message, BYE, second.message]
    assert (done["id"], done["finish_reason"], done["tokens"], done["temperature"]) == ("k", "stop", 6, 0.8)
    assert row(next_step(dialogue(HI, OLD), [first], 0))["messages"] == [HI, first.message]


def test_every_turn_draws_by_its_own_seed() -> None:
    steps = [next_step(dialogue(HI, OLD, BYE), replies, seed) for replies in ([], [reply("a")]) for seed in (0, 1)]
    assert len({step.seed for step in steps if isinstance(step, Question)}) == 4


def test_tool_calls_and_weightless_answers_stay_as_context() -> None:
    conversation = dialogue(HI, CALL, RESULT, OLD, BYE, {**OLD, "weight": 0}, BYE)
    kept_call = {**CALL, "weight": 0}
    assert num_answers(conversation) == 2
    assert asked(next_step(conversation, [], 0)) == [HI, kept_call, RESULT]
    first = reply("new")
    assert asked(next_step(conversation, [first], 0)) == [
        HI,
        kept_call,
        RESULT,
        first.message,
        BYE,
        {**OLD, "weight": 0},
        BYE,
    ]


def test_what_ends_a_conversation_before_its_last_turn() -> None:
    conversation = dialogue(HI, OLD, BYE, OLD, HI)
    first = reply("new")
    cut = row(next_step(conversation, [first, reply("mo", ended=False)], 0))
    assert (cut["finish_reason"], len(cut["messages"]), cut["tokens"]) == ("length", 4, 6)
    calls = row(next_step(conversation, [reply("", tool_calls=CALL["tool_calls"])], 0))
    assert (calls["finish_reason"], len(calls["messages"])) == ("stop", 2)
    for nothing in (reply(""), Reply("k", {"role": "assistant", "content": ""}, False, 0, "too long")):
        before = row(next_step(conversation, [first, nothing], 0))
        assert (before["messages"], before["finish_reason"], before["tokens"]) == ([HI, first.message], "stop", 3)
        assert next_step(conversation, [nothing], 0) is None
    thinks = row(next_step(dialogue(HI), [reply("", ended=False, reasoning_content="hm")], 0))
    assert thinks["messages"][-1]["reasoning_content"] == "hm" and thinks["finish_reason"] == "length"
