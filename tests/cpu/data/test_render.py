"""The loss mask, token by token, against masks written by hand; and the law that prompts are prefixes of examples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.chat.conversations import Conversation, Message
from data.chat.render import Example, Rendered, RenderError, render_all, render_prompt, text_of_prompt
from data.chat.render import render as render_conversation
from drafters.base.errors import UserError
from tests.tiny import CHATML, tiny_tokenizer

# The structures of well-known templates, rebuilt with the special tokens of the tiny tokenizer.
DEFAULT_SYSTEM = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER_TRIM = (  # a start-of-text token, blank line after the header, content trimmed, nothing after the end of a turn
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_start|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
ROLE_NAMES = (  # the assistant is called model, a system turn is refused, the end token is not the tokenizer's eos
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
PLAIN_HEADER = (  # no special token opens the answer; a blank before it and before the end token
    "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\nA: "
    "{% else %}{{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
BLANK_IN_ANSWER = (  # the prompt ends before the blank, so the target writes it
    "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\nA:"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
STRIPS_THINKING = (  # past answers lose their thinking, as in templates of reasoning models
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = [DEFAULT_SYSTEM, HEADER_TRIM, ROLE_NAMES, PLAIN_HEADER, BLANK_IN_ANSWER]


def chat(*texts: str, truncated: bool = False, system: str | None = None) -> Conversation:
    """User and assistant take turns."""
    head: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
    turns = ({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))
    return Conversation("c", (*head, *turns), truncated, "chats.jsonl:3")


def render(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> Example:
    """The one example of a conversation."""
    (example,) = render_conversation(conversation, tokenizer, max_tokens).examples
    return example


def marked(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """The example as runs of one turn id, decoded: [(0, prompt), (1, answer), ...]."""
    runs: list[tuple[int, list[int]]] = []
    for token, turn in zip(example.token_ids, example.turn_ids, strict=True):
        if not runs or runs[-1][0] != turn:
            runs.append((turn, []))
        runs[-1][1].append(token)
    return [(turn, str(tokenizer.decode(ids))) for turn, ids in runs]


def test_mask_token_by_token() -> None:
    tokenizer = tiny_tokenizer()
    example = render(chat("Hi", "Yo", "é", "ok"), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    user, assistant = ["<|im_start|>", *"user", "Ċ"], ["<|im_start|>", *"assistant", "Ċ"]
    expected = [
        *((token, 0) for token in [*user, "H", "i", "<|im_end|>", "Ċ", *assistant]),
        *((token, 1) for token in ["Y", "o", "<|im_end|>"]),
        *((token, 0) for token in ["Ċ", *user, "Ã", "©", "<|im_end|>", "Ċ", *assistant]),
        *((token, 2) for token in ["o", "k", "<|im_end|>"]),
        ("Ċ", 0),
    ]
    assert list(zip(tokens, example.turn_ids, strict=True)) == expected
    assert example.loss_mask == [turn > 0 for _, turn in expected]


@pytest.mark.parametrize(
    ("template", "system", "expected"),
    [
        (
            DEFAULT_SYSTEM,
            None,
            [
                (0, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
                (1, " Yo\n<|im_end|>"),
                (0, "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
                (2, "See you.<|im_end|>"),
                (0, "\n"),
            ],
        ),
        (
            DEFAULT_SYSTEM,
            "Rhyme.",
            [
                (0, "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
                (1, " Yo\n<|im_end|>"),
                (0, "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
                (2, "See you.<|im_end|>"),
                (0, "\n"),
            ],
        ),
        (
            HEADER_TRIM,
            None,
            [
                (0, "<|endoftext|><|im_start|>user<|im_start|>\n\nHi<|im_end|><|im_start|>assistant<|im_start|>\n\n"),
                (1, "Yo<|im_end|>"),
                (0, "<|im_start|>user<|im_start|>\n\nBye<|im_end|><|im_start|>assistant<|im_start|>\n\n"),
                (2, "See you.<|im_end|>"),
            ],
        ),
        (
            ROLE_NAMES,
            None,
            [
                (0, "<|im_start|>user\nHi<|endoftext|>\n<|im_start|>model\n"),
                (1, "Yo<|endoftext|>"),
                (0, "\n<|im_start|>user\nBye<|endoftext|>\n<|im_start|>model\n"),
                (2, "See you.<|endoftext|>"),
                (0, "\n"),
            ],
        ),
        (
            PLAIN_HEADER,
            None,
            [(0, "Q: Hi\nA: "), (1, " Yo\n <|im_end|>"), (0, "Q: Bye\nA: "), (2, "See you. <|im_end|>")],
        ),
        (
            BLANK_IN_ANSWER,
            None,
            [(0, "Q: Hi\nA:"), (1, "  Yo\n<|im_end|>"), (0, "Q: Bye\nA:"), (2, " See you.<|im_end|>")],
        ),
    ],
    ids=["default-system", "own-system", "header-trim", "role-names", "plain-header", "blank-in-answer"],
)
def test_spans_follow_the_template(template: str, system: str | None, expected: list[tuple[int, str]]) -> None:
    tokenizer = tiny_tokenizer(template)
    example = render(chat("Hi", " Yo\n", "Bye", "See you.", system=system), tokenizer)
    assert marked(example, tokenizer) == expected


def test_truncated_answer_ends_without_its_end_of_turn() -> None:
    tokenizer = tiny_tokenizer()
    example = render(chat("Hi", "Yo", "More", "and then ", truncated=True), tokenizer)
    assert marked(example, tokenizer)[-2:] == [
        (0, "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
        (2, "and then "),
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("ab \n.é😀"), max_size=6), min_size=2, max_size=6), truncated=st.booleans()
)
def test_prompts_are_prefixes_and_answers_stand_as_written(template: str, texts: list[str], truncated: bool) -> None:
    tokenizer = tiny_tokenizer(template)
    texts = texts[: len(texts) // 2 * 2]
    conversation = chat(*texts, truncated=truncated)
    try:
        example = render(conversation, tokenizer)
    except RenderError as error:
        assert "empty and cut" in str(error) and truncated and texts[1:] == [""]
        return
    if truncated and not texts[-1]:
        texts = texts[:-2]  # such an answer is left out, the others are not
    for number, index in enumerate(range(1, len(texts), 2), start=1):
        prompt = render_prompt(conversation.messages[:index], tokenizer)
        assert example.token_ids[: len(prompt)] == prompt
        answer = [token for token, turn in zip(example.token_ids, example.turn_ids, strict=True) if turn == number]
        assert example.turn_ids[len(prompt) : len(prompt) + len(answer)] == [number] * len(answer)
        cut = truncated and index == len(conversation.messages) - 1
        assert str(tokenizer.decode(answer, skip_special_tokens=True)).strip() == texts[index].strip()
        assert sum(token in (0, 2) for token in answer) == (0 if cut else 1)
    if not truncated:
        assert example.token_ids == tokenizer.apply_chat_template(list(conversation.messages), return_dict=False)


def blank_joining_tokenizer(trim_offsets: bool) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with one merge: a blank and `Y` are one token, as words carry their blank in real
    vocabularies.
    """
    fast = tiny_tokenizer(PLAIN_HEADER)
    backend = fast.backend_tokenizer
    vocab = dict(backend.get_vocab())
    merged = Tokenizer(models.BPE(vocab=vocab | {"ĠY": len(vocab)}, merges=[("Ġ", "Y")]))
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merged.decoder = backend.decoder
    if trim_offsets:
        merged.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = PLAIN_HEADER
    return tokenizer


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_no_token_lies_across_the_start_of_an_answer(trim_offsets: bool) -> None:
    tokenizer = blank_joining_tokenizer(trim_offsets)
    joined = tokenizer.get_vocab()["ĠY"]
    conversation = chat("a Y", "Yes Y", "b", "Yo")
    assert tokenizer(" Yes", add_special_tokens=False)["input_ids"][0] == joined
    example = render(conversation, tokenizer)
    assert marked(example, tokenizer) == [
        (0, "Q: a Y\nA: "),
        (1, "Yes Y <|im_end|>"),
        (0, "Q: b\nA: "),
        (2, "Yo <|im_end|>"),
    ]
    assert (
        example.token_ids.count(joined) == 2
    )  # inside the question and inside the answer, not where the answers start
    for index in (1, 3):
        prompt = render_prompt(conversation.messages[:index], tokenizer)
        assert example.token_ids[: len(prompt)] == prompt


def test_an_answer_that_later_loses_its_thinking_has_an_example_of_its_own() -> None:
    tokenizer = tiny_tokenizer(STRIPS_THINKING)
    first, second = render_conversation(chat("Q", "<think>a</think>A", "R", "<think>b</think>B"), tokenizer).examples
    assert [(turn, text) for turn, text in marked(first, tokenizer) if turn] == [(1, "<think>a</think>A<|im_end|>")]
    assert [(turn, text) for turn, text in marked(second, tokenizer) if turn] == [(2, "<think>b</think>B<|im_end|>")]
    assert "<|im_start|>assistant\nA<|im_end|>" in marked(second, tokenizer)[0][1]
    plain = render(chat("Q", "A", "R", "<think>b</think>B"), tokenizer)
    assert [turn for turn, _ in marked(plain, tokenizer) if turn] == [1, 2]


def test_a_rewritten_answer_is_refused_alone() -> None:
    tokenizer = tiny_tokenizer(CHATML.replace("m['content']", "m['content'] | replace('x', 'y')"))
    with pytest.raises(RenderError, match=r"chats\.jsonl:3: .*does not keep the answer as it was written"):
        render(chat("Q", "axb"), tokenizer)
    rendered = render_conversation(chat("Q", "axb", "R", "B"), tokenizer)
    assert [turn for turn, _ in marked(rendered.examples[0], tokenizer) if turn] == [2]
    assert len(rendered.skipped) == 1 and "answer 1: the target's chat template does not keep" in rendered.skipped[0]


@pytest.mark.parametrize(
    ("conversation", "template", "complaint"),
    [
        (chat("Q"), DEFAULT_SYSTEM, "no assistant turn to learn from"),
        (chat("Q", "A", system="S"), ROLE_NAMES, r"refuses the messages \(no system turns\)"),
        (chat("Q", "", truncated=True), DEFAULT_SYSTEM, "its only answer is empty and cut"),
        (chat("Q", "A<|im_end|>B"), DEFAULT_SYSTEM, r"holds the end-of-turn token <\|im_end\|>"),
        (chat("Q", "A", "R", "B"), PLAIN_HEADER.replace("<|im_end|>", ""), "closes the answer with no special token"),
    ],
)
def test_what_cannot_be_rendered_is_named_by_file_and_line(
    conversation: Conversation, template: str, complaint: str
) -> None:
    with pytest.raises(RenderError, match=rf"chats\.jsonl:3: .*{complaint}"):
        render(conversation, tiny_tokenizer(template))


def test_max_tokens_cuts_and_refuses_where_no_answer_is_left() -> None:
    tokenizer = tiny_tokenizer()
    whole = render(chat("Hi", "Yo"), tokenizer)
    start = whole.turn_ids.index(1)
    cut = render(chat("Hi", "Yo"), tokenizer, max_tokens=start + 1)
    assert (cut.token_ids, cut.turn_ids) == (whole.token_ids[: start + 1], [0] * start + [1])
    with pytest.raises(
        RenderError, match=rf"chats\.jsonl:3: the first {start} of its {len(whole.token_ids)} tokens hold no answer"
    ):
        render(chat("Hi", "Yo"), tokenizer, max_tokens=start)


def test_render_all_keeps_the_reasons() -> None:
    rendered = render_all([chat("Q", "A"), chat("Q"), chat("R", "B")], tiny_tokenizer())
    assert isinstance(rendered, Rendered) and not rendered.skipped
    assert rendered.examples == [
        render(chat("Q", "A"), tiny_tokenizer()),
        render(chat("R", "B"), tiny_tokenizer()),
    ]
    assert len(rendered.rejected) == 1 and rendered.rejected[0].startswith("chats.jsonl:3: no assistant turn")


def test_prompt_text_and_its_errors() -> None:
    assert (
        text_of_prompt(chat("Hi").messages, tiny_tokenizer())
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(UserError, match="there are no messages"):
        render_prompt([], tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        render_prompt(chat("Hi").messages, tokenizer)
