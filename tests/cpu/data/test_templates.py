"""Masks of real template structures, written by hand; and the law that what serving renders is a prefix of what
training renders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data.chat.conversations import Conversation
from data.chat.render import PLAIN_TEMPLATE, Example, RenderError, render, render_all, render_prompt, text_of_prompt
from drafters.base.errors import UserError
from drafters.targets.template import TemplateOptions, differences
from tests.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, NAMES, OPENS_THINKING, PHI3, QWEN3, tokenizer_of

THINKING, NOT_THINKING = TemplateOptions(enable_thinking=True), TemplateOptions(enable_thinking=False)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}


def says(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def talk(*messages: dict[str, Any], truncated: bool = False, tools: tuple[Any, ...] = ()) -> Conversation:
    return Conversation("c", messages, truncated, "chats.jsonl:3", tools)


def learnt(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions = PLAIN_TEMPLATE
) -> list[list[str]]:
    """For each example the texts of its supervised turns; every prompt before one is checked against what serving
    renders.
    """
    found = []
    for example in render(conversation, tokenizer, options=options).examples:
        found.append(
            [
                check_turn(example, turn, conversation, tokenizer, options)
                for turn in sorted(set(example.turn_ids) - {0})
            ]
        )
    return found


def check_turn(
    example: Example,
    turn: int,
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: TemplateOptions,
) -> str:
    """The text of one turn, after checks that it is one run of tokens and that the prompt before it is serving's."""
    places = [i for i, t in enumerate(example.turn_ids) if t == turn]
    assert places == list(range(places[0], places[-1] + 1))
    index = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"][turn - 1]
    assert example.token_ids[: places[0]] == render_prompt(
        conversation.messages[:index], tokenizer, options, conversation.tools
    )
    return str(tokenizer.decode(example.token_ids[places[0] : places[-1] + 1]))


SYSTEM, HI, BYE = says("system", "Rhyme."), says("user", "Hi"), says("user", "Bye")
YO, SEE = says("assistant", "Yo"), says("assistant", "See you.")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Yo<|im_end|>", "See you.<|im_end|>"]),
        (LLAMA3, ["Yo<|eot|>", "See you.<|eot|>"]),
        (MISTRAL, [" Yo</s>", " See you.</s>"]),
        (GEMMA, ["Yo<end_of_turn>", "See you.<end_of_turn>"]),
        (PHI3, ["Yo<|end|>", "See you.<|end|>"]),
    ],
    ids=lambda value: NAMES.get(value) if isinstance(value, str) else "",
)
def test_turns_of_plain_templates_share_one_example(template: str, expected: list[str]) -> None:
    tokenizer = tokenizer_of(template)
    assert learnt(talk(HI, YO, BYE, SEE), tokenizer) == [expected]
    if template != GEMMA:
        assert learnt(talk(SYSTEM, HI, YO, BYE, SEE), tokenizer) == [expected]
        assert "Rhyme." in text_of_prompt([SYSTEM, HI], tokenizer)


def test_a_refused_role_is_named() -> None:
    with pytest.raises(RenderError, match=r"chats\.jsonl:3: .*refuses the messages \(no role system\)"):
        render(talk(SYSTEM, HI, YO), tokenizer_of(GEMMA))
    with pytest.raises(RenderError, match="user and model take turns"):
        render(talk(HI, BYE, YO), tokenizer_of(GEMMA))


def test_qwen3_without_thinking_is_cut_per_turn() -> None:
    """The prompt of each turn ends with an empty block, which past turns lose: no one text holds both as serving
    writes them.
    """
    tokenizer = tokenizer_of(QWEN3)
    assert learnt(talk(HI, YO, BYE, SEE), tokenizer, NOT_THINKING) == [["Yo<|im_end|>"], ["See you.<|im_end|>"]]
    first, second = render(talk(HI, YO, BYE, SEE), tokenizer, options=NOT_THINKING).examples
    assert str(tokenizer.decode(first.token_ids)).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nYo<|im_end|>\n"
    )
    assert "assistant\nYo<|im_end|>\n<|im_start|>user" in str(tokenizer.decode(second.token_ids))


@pytest.mark.parametrize("inline", [True, False])
def test_qwen3_with_thinking_is_cut_per_turn(inline: bool) -> None:
    def thinks(thought: str, answer: str) -> dict[str, Any]:
        if inline:
            return says("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
        return says("assistant", answer, reasoning_content=thought)

    tokenizer = tokenizer_of(QWEN3)
    conversation = talk(HI, thinks("a b", "A"), BYE, thinks("c", "C"))
    expected = [["<think>\na b\n</think>\n\nA<|im_end|>"], ["<think>\nc\n</think>\n\nC<|im_end|>"]]
    assert learnt(conversation, tokenizer) == learnt(conversation, tokenizer, THINKING) == expected


def test_qwen3_refuses_answers_of_the_other_mode() -> None:
    tokenizer = tokenizer_of(QWEN3)
    with pytest.raises(RenderError, match=r"thinking mode fit the data \(template.enable_thinking\)"):
        render(talk(HI, YO), tokenizer, options=THINKING)
    with pytest.raises(RenderError, match="thinking mode"):
        render(talk(HI, says("assistant", "<think>\na\n</think>\n\nA")), tokenizer, options=NOT_THINKING)
    with pytest.raises(RenderError, match="thinking mode"):
        render(talk(HI, says("assistant", "A", reasoning_content="a")), tokenizer, options=NOT_THINKING)
    with pytest.raises(RenderError, match="does not keep the answer"):  # a template that would drop the thinking
        render(talk(HI, says("assistant", "A", reasoning_content="because")), tokenizer_of(CHATML))


def test_an_answer_cut_while_thinking_ends_there() -> None:
    tokenizer = tokenizer_of(QWEN3)
    inline = says("assistant", "<think>\nLet me see ")
    assert learnt(talk(HI, inline, truncated=True), tokenizer) == [["<think>\nLet me see "]]
    apart = says("assistant", "", reasoning_content="Let me see")
    assert learnt(talk(HI, apart, truncated=True), tokenizer) == [["<think>\nLet me see"]]
    assert learnt(talk(HI, YO, truncated=True), tokenizer, NOT_THINKING) == [["Yo"]]
    with pytest.raises(RenderError, match="thinking mode"):
        render(talk(HI, YO, truncated=True), tokenizer, options=THINKING)


def test_a_prompt_that_opens_the_thinking() -> None:
    tokenizer = tokenizer_of(OPENS_THINKING)
    conversation = talk(HI, says("assistant", "hm\n</think>\nYo"), BYE, says("assistant", "</think>See"))
    assert learnt(conversation, tokenizer) == [["hm\n</think>\nYo<|end|>"], ["</think>See<|end|>"]]
    assert (
        text_of_prompt(conversation.messages[:3], tokenizer)
        == "<|user|>Hi<|assistant|>\nYo<|end|><|user|>Bye<|assistant|><think>\n"
    )


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (LLAMA3, PLAIN_TEMPLATE, [['{"name": "weather", "parameters": {"city": "Lima"}}<|eom|>', "It rains.<|eot|>"]]),
        (
            QWEN3,
            NOT_THINKING,
            [
                ['<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call><|im_end|>'],
                ["It rains.<|im_end|>"],
            ],
        ),
        (MISTRAL, PLAIN_TEMPLATE, [['[CALLS] weather {"city": "Lima"}</s>', " It rains.</s>"]]),
    ],
    ids=["llama3", "qwen3", "mistral"],
)
def test_tool_calls_and_results(template: str, options: TemplateOptions, expected: list[list[str]]) -> None:
    tokenizer = tokenizer_of(template)
    messages = (HI, says("assistant", tool_calls=[CALL]), says("tool", "rain"), says("assistant", "It rains."))
    assert learnt(talk(*messages, tools=(TOOL,)), tokenizer, options) == expected
    assert '"weather"' in text_of_prompt([HI], tokenizer, options, (TOOL,)) and "rain" in text_of_prompt(
        messages[:3], tokenizer, options
    )


def test_tools_that_move_to_the_last_question_cut_the_conversation() -> None:
    conversation = talk(HI, YO, BYE, SEE, tools=(TOOL,))
    assert learnt(conversation, tokenizer_of(MISTRAL)) == [[" Yo</s>"], [" See you.</s>"]]
    assert learnt(conversation, tokenizer_of(LLAMA3)) == [["Yo<|eot|>", "See you.<|eot|>"]]


def test_a_template_that_does_not_know_tools_is_refused() -> None:
    with pytest.raises(RenderError, match="does not write the tool 'weather'"):
        render(talk(HI, YO, tools=(TOOL,)), tokenizer_of(CHATML))
    with pytest.raises(RenderError, match="does not keep the answer"):
        render(talk(HI, says("assistant", tool_calls=[CALL])), tokenizer_of(CHATML))


def test_answers_of_weight_zero_are_context() -> None:
    tokenizer = tokenizer_of(CHATML)
    assert learnt(talk(HI, {**YO, "weight": 0}, BYE, SEE), tokenizer) == [["See you.<|im_end|>"]]
    with pytest.raises(RenderError, match="all its answers have weight 0"):
        render(talk(HI, {**YO, "weight": 0}), tokenizer)


def test_tools_of_the_options_are_for_chats_without_their_own(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    options, tokenizer = TemplateOptions(tools=str(file)), tokenizer_of(LLAMA3)
    assert '"weather"' in text_of_prompt([HI], tokenizer, options)
    other = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    text = text_of_prompt([HI], tokenizer, options, (other,))
    assert "clock" in text and "weather" not in text
    assert learnt(talk(HI, YO), tokenizer, options) == [["Yo<|eot|>"]]
    assert len(options.recorded()["tools"]) == 16 and options.recorded() != TemplateOptions().recorded()
    with pytest.raises(UserError, match=r"template.tools = nowhere.json: no such file"):
        text_of_prompt([HI], tokenizer, TemplateOptions(tools="nowhere.json"))
    file.write_text('{"a": 1}')
    other_file = tmp_path / "other.json"
    other_file.write_text('{"a": 1}')
    with pytest.raises(UserError, match="a list of tool definitions"):
        text_of_prompt([HI], tokenizer, TemplateOptions(tools=str(other_file)))


def test_options_that_differ_are_said() -> None:
    assert differences({}, {}) == [] == differences({"enable_thinking": True}, {"enable_thinking": True})
    assert differences({"enable_thinking": False}, {}) == ["enable_thinking was False, is not given now"]
    assert differences({}, {"enable_thinking": True}) == ["enable_thinking was not given, is True now"]


TEXTS = st.text(st.sampled_from("ab \n.é😀<"), max_size=6)


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, QWEN3, MISTRAL, GEMMA, PHI3], ids=lambda template: NAMES[template]
)
@settings(max_examples=20, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=6), truncated=st.booleans())
def test_every_answer_is_learnt_once_behind_the_prompt_of_serving(
    template: str, texts: list[str], truncated: bool
) -> None:
    tokenizer, options = tokenizer_of(template), NOT_THINKING if template == QWEN3 else PLAIN_TEMPLATE
    messages = [says(("user", "assistant")[i % 2], text) for i, text in enumerate(texts[: len(texts) // 2 * 2])]
    conversation = talk(*messages, truncated=truncated)
    rendered = render_all([conversation], tokenizer, options=options)
    answers = {n: m["content"] for n, m in enumerate(messages[1::2], start=1)}
    if truncated and not messages[-1]["content"]:
        answers.pop(len(answers))
    found: dict[int, str] = {}
    for example in rendered.examples:
        for turn in set(example.turn_ids) - {0}:
            assert turn not in found
            found[turn] = check_turn(example, turn, conversation, tokenizer, options)
    assert found.keys() == answers.keys()
    for turn, text in found.items():
        ends = sum(token in text for token in ("<|im_end|>", "<|eot|>", "</s>", "<end_of_turn>", "<|end|>"))
        assert ends == (0 if truncated and turn == len(messages) // 2 else 1)
        assert text.replace("\n", " ").strip().startswith(answers[turn].replace("\n", " ").strip())
