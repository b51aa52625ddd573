"""Renders conversations to token ids and turn ids, by the target's chat template and character offsets
(data/README.md, section 2).

An answer starts where the prompt before it ends: the prompt is the template's rendering of the messages so far with
`add_generation_prompt=True`, which is what serving feeds the target. So no header length is known here, and training
sees the tokens that serving sees.

Templates of reasoning models write a past answer otherwise than the last one (without its thinking). So an answer is
learnt from the text that ends with it, and answers share one example only where the longer text begins with the
shorter one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.chat.conversations import Conversation
from data.chat.messages import Tool, plain
from data.chat.template import PLAIN_TEMPLATE, Messages, Renderer, RenderError, special_ids, special_tokens, tokenize
from drafters.targets.template import TemplateOptions

REFUSED = (
    "the target's chat template does not keep the answer as it was written: "
    "does its thinking mode fit the data (template.enable_thinking)?"
)
MARK = "\u2063"  # an answer that is in no text: what stands behind it closes a turn


class Example(NamedTuple):
    """A rendered conversation of T tokens.

    `turn_ids[i]` is 0 outside answers and n >= 1 inside the n-th assistant turn, its end-of-turn token included and
    nothing after it. The worked case, one character for each token and `$` for the end of a turn:

        text      Q h i $ A y o $ . Q b y e $ A o k $ .
        turn_ids  0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 2 2 2 0
    """

    id: str
    token_ids: list[int]
    turn_ids: list[int]

    @property
    def loss_mask(self) -> list[bool]:
        return [turn > 0 for turn in self.turn_ids]


class Rendered(NamedTuple):
    """What came of conversations: examples, the reason for each conversation left out, and for each single answer left
    out.
    """

    examples: list[Example]
    rejected: list[str]
    skipped: list[str]


class _Turn(NamedTuple):
    """The n-th assistant turn: the text that ends with it, where the answer starts there, and where it ends, closing
    token included.
    """

    number: int
    text: str
    start: int
    end: int


def render_all(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    options: TemplateOptions = PLAIN_TEMPLATE,
) -> Rendered:
    """Render a data set; a conversation that cannot be rendered is left out and its reason kept."""
    rendered = Rendered([], [], [])
    for conversation in conversations:
        try:
            part = render(conversation, tokenizer, max_tokens, options)
        except RenderError as error:
            rendered.rejected.append(str(error))
        else:
            rendered.examples.extend(part.examples)
            rendered.skipped.extend(part.skipped)
    return rendered


def render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    options: TemplateOptions = PLAIN_TEMPLATE,
) -> Rendered:
    """Token ids of a conversation and the turn each belongs to, cut to `max_tokens`; one example, or several (see
    above).

    The tokens before an answer are exactly `render_prompt` of the messages before it. A truncated conversation ends
    with the last token of its last answer: no end of turn follows. Answers with `weight` 0 are context only. Raises
    `RenderError`, with file and line, where no answer is left to learn from.
    """
    try:
        turns, failures, prompts = _turns(
            conversation, Renderer(tokenizer, options, conversation.tools or options.read_tools())
        )
        if not turns:
            raise failures[-1][1] if failures else RenderError("all its answers have weight 0: leave it out")
        whole = [_example(conversation.id, group, prompts, tokenizer) for group in _groups(turns)]
    except RenderError as error:
        raise RenderError(f"{conversation.source}: {error}") from error
    examples = [Example(e.id, e.token_ids[:max_tokens], e.turn_ids[:max_tokens]) for e in whole]
    kept = [example for example in examples if any(example.turn_ids)]
    skipped = [f"{conversation.source}: answer {number}: {error}" for number, error in failures]
    for total in (
        len(long.token_ids) for long, example in zip(whole, examples, strict=True) if not any(example.turn_ids)
    ):
        skipped.append(
            f"{conversation.source}: the first {max_tokens} of its {total} tokens hold no answer: "
            "raise the maximum length"
        )
    if not kept:
        raise RenderError(skipped[-1])
    return Rendered(kept, [], skipped)


def text_of_prompt(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    options: TemplateOptions = PLAIN_TEMPLATE,
    tools: tuple[Tool, ...] = (),
) -> str:
    """The text the target continues: `messages` in its chat template, up to where the next answer starts."""
    if not messages:
        raise RenderError("there are no messages: give at least one with role and content")
    return Renderer(tokenizer, options, tools or options.read_tools()).prompt(messages)


def render_prompt(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    options: TemplateOptions = PLAIN_TEMPLATE,
    tools: tuple[Tool, ...] = (),
) -> list[int]:
    """Token ids of `text_of_prompt`: what serving feeds the target, and a prefix of the rendered training example."""
    text = text_of_prompt(messages, tokenizer, options, tools)
    renderer = Renderer(tokenizer, options, tools or options.read_tools())
    prompts = [
        renderer.prompt(messages[:index]) for index, message in enumerate(messages) if message["role"] == "assistant"
    ]
    return tokenize(text, _starts(prompts, text), tokenizer).ids


def _turns(
    conversation: Conversation, renderer: Renderer
) -> tuple[list[_Turn], list[tuple[int, RenderError]], list[str]]:
    """The answers to learn from, those that cannot be rendered with the reason, and the prompts of all."""
    numbered = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not numbered:
        raise RenderError(
            "no assistant turn to learn from: let the target answer the prompts first (python -m data.synthesize)"
        )
    prompts = [renderer.prompt(conversation.messages[:index]) for index in numbered]
    turns, failures = [], []
    for number, (index, prompt) in enumerate(zip(numbered, prompts, strict=True), start=1):
        if conversation.messages[index].get("weight") == 0:
            continue
        cut = conversation.truncated and index == len(conversation.messages) - 1
        try:
            turns.append(_turn(number, conversation.messages[: index + 1], prompt, cut, renderer))
        except RenderError as error:
            failures.append((number, error))
    return turns, failures, prompts


def _turn(number: int, messages: Messages, prompt: str, cut: bool, renderer: Renderer) -> _Turn:
    """The last of `messages` as an answer to `prompt`. Raises `RenderError` where the template does not write what the
    target wrote.
    """
    *asked, answer = messages
    _check_tools(prompt, renderer)
    raw = prompt + answer["content"]
    if cut and raw == prompt and plain(answer):
        raise RenderError("its only answer is empty and cut: leave it out")
    after = _closing(asked, renderer)
    if _thinks_in_its_text(
        answer["content"], prompt, cut
    ):  # the target's own words, which a template may trim or leave out
        text = raw if cut else raw + after
        return _Turn(
            number, text, len(prompt), len(raw) if cut else _first_special_at(len(raw), text, renderer.tokenizer)
        )
    text = renderer.apply(messages, add_generation_prompt=False)
    end = len(prompt) + _written(answer, text, prompt)
    if cut:  # no end of turn, and nothing that the template would write after a whole answer
        text = raw if plain(answer) else text[:end]
        return _Turn(number, text, len(prompt), len(text))
    behind = len(text) - len(after) if text.endswith(after) else _trailing(text, end, renderer.tokenizer)
    if plain(answer) and text[end:behind].strip():
        raise RenderError(REFUSED)
    return _Turn(number, text, len(prompt), _first_special_at(behind, text, renderer.tokenizer))


def _check_tools(prompt: str, renderer: Renderer) -> None:
    names = [tool["function"]["name"] for tool in renderer.tools]
    if missing := [name for name in names if name not in prompt]:
        raise RenderError(
            f"the target's chat template does not write the tool {missing[0]!r}: "
            "leave the tools out, or use another target"
        )


def _closing(asked: Messages, renderer: Renderer) -> str:
    """What the template writes behind the last answer: the end of turn first."""
    return renderer.apply([*asked, {"role": "assistant", "content": MARK}], add_generation_prompt=False).rpartition(
        MARK
    )[2]


def _first_special_at(start: int, text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """One past the special token that stands at `start` in `text`, blanks before it aside."""
    rest = text[start:].lstrip()
    found = max((len(token) for token in special_tokens(tokenizer) if rest.startswith(token)), default=0)
    if not found:
        raise RenderError(
            "the target's chat template closes the answer with no special token: such a target cannot end its turn"
        )
    return len(text) - len(rest) + found


def _trailing(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where the special tokens and blanks begin that `text` ends with, at `start` at the earliest."""
    end = len(text.rstrip())
    while found := max(
        (len(token) for token in special_tokens(tokenizer) if text[start:end].endswith(token)), default=0
    ):
        end = start + len(text[start : end - found].rstrip())
    return end


def _thinks_in_its_text(content: str, prompt: str, cut: bool) -> bool:
    """Whether `content` starts with its thinking, between tags. `<think>` may be the end of the prompt already."""
    before = prompt.rstrip()
    opened = before.endswith("<think>") != content.lstrip().startswith("<think>")
    return opened and not before.endswith("</think>") and (cut or "</think>" in content)


def _written(answer: Mapping[str, Any], text: str, prompt: str) -> int:
    """How many characters of `text` behind `prompt` are the answer. Blanks at the ends of its parts may be trimmed or
    added.
    """
    if not text.startswith(prompt):
        raise RenderError(REFUSED)
    tail, position = text[len(prompt) :], 0
    names = [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    for part in (answer.get("reasoning_content") or "", answer["content"], *names):
        body = part if tail.startswith(part, position) else part.strip()
        found = tail.find(body, position)
        if found < 0 or (plain(answer) and tail[:found].strip()):
            raise RenderError(REFUSED)
        position = found + len(body)
    return position


def _groups(turns: Sequence[_Turn]) -> list[list[_Turn]]:
    """Turns that can share an example: those whose text, up to their end, the text of the group's last turn begins
    with.
    """
    groups: list[list[_Turn]] = []
    left = list(turns)
    while left:
        last = left[-1]
        group = [turn for turn in left if last.text.startswith(turn.text[: turn.end])]
        left = [turn for turn in left if turn not in group]
        groups.insert(0, group)
    return groups


def _example(name: str, group: Sequence[_Turn], prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Example:
    text = group[-1].text
    tokens = tokenize(text, _starts(prompts, text[: group[-1].start]), tokenizer)
    turn_ids = [0] * len(tokens.ids)
    for turn in group:
        first = bisect_right(tokens.ends, turn.start)
        last = len(tokens.ids) if turn.end == len(text) else bisect_left(tokens.ends, turn.end) + 1
        if tokens.ids[last - 1] in tokens.ids[first : last - 1] and tokens.ids[last - 1] in special_ids(tokenizer):
            name_of_end = tokenizer.convert_ids_to_tokens(tokens.ids[last - 1])
            raise RenderError(f"the answer holds the end-of-turn token {name_of_end} in its text: remove it")
        turn_ids[first:last] = [turn.number] * (last - first)
    return Example(name, tokens.ids, turn_ids)


def _starts(prompts: Iterable[str], text: str) -> list[int]:
    """Where in `text` an answer starts: the lengths of the prompts that it begins with."""
    return sorted({len(prompt) for prompt in prompts if text.startswith(prompt)})
