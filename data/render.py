"""Conversations to token ids and turn ids, by the target's own chat template and by character offsets.

The template writes the whole conversation as one text. An answer starts where the prompt before it ends: the prompt is the
template's rendering of the messages so far with `add_generation_prompt=True`, which is what serving feeds the target. So no
header length is known here, and training sees the tokens that serving sees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation, DataError
from drafters.errors import UserError

Messages = Sequence[Mapping[str, str]]


class RenderError(DataError):
    """A conversation that the template cannot write, or that leaves nothing to learn from. Names its file and line."""


class Example(NamedTuple):
    """A rendered conversation of T tokens.

    `turn_ids[i]` is 0 outside answers and n >= 1 inside the n-th assistant turn, its end-of-turn token included and nothing
    after it. The worked case, one character for each token and `$` for the end of a turn:

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
    """What came of a data set: its examples, and for each conversation that was left out the reason with file and line."""

    examples: list[Example]
    rejected: list[str]


class Tokens(NamedTuple):
    """Token ids of a text, with the characters `[starts[i], ends[i])` that each stands for."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class _Turn(NamedTuple):
    """The n-th assistant turn in the text: its first character, and the end of its content."""

    number: int
    start: int
    content_end: int


def render_all(conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> Rendered:
    """Render a data set; a conversation that cannot be rendered is left out and its reason kept."""
    rendered = Rendered([], [])
    for conversation in conversations:
        try:
            rendered.examples.append(render(conversation, tokenizer, max_tokens))
        except RenderError as error:
            rendered.rejected.append(str(error))
    return rendered


def render(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> Example:
    """Token ids of a conversation and the turn each belongs to, cut to `max_tokens`.

    The tokens before an answer are exactly `render_prompt` of the messages before it. A truncated conversation ends with the
    last token of its last answer: no end of turn follows. An earlier answer which the template rewrites (some leave out the
    thinking of past turns) is context only, since the target did not write what then stands there.
    Raises `RenderError`, with file and line, where no answer is left to learn from.
    """
    try:
        text = _apply(conversation.messages, tokenizer, add_generation_prompt=False)
        starts = _answer_starts(conversation.messages, text, tokenizer)
        turns = _find_turns(conversation, text, starts)
        cut = conversation.truncated and conversation.messages[-1]["role"] == "assistant"
        if cut:
            text = text[: turns[-1].content_end]
        tokens = tokenize(text, [start for start in starts.values() if start <= len(text)], tokenizer)
        turn_ids = [0] * len(tokens.ids)
        for turn in turns:
            first = bisect_right(tokens.ends, turn.start)
            last = len(tokens.ids) if cut and turn is turns[-1] else _end_of_turn(turn, text, tokens, tokenizer)
            turn_ids[first:last] = [turn.number] * (last - first)
    except RenderError as error:
        raise RenderError(f"{conversation.source}: {error}") from error
    example = Example(conversation.id, tokens.ids[:max_tokens], turn_ids[:max_tokens])
    if not any(turn_ids):
        raise RenderError(f"{conversation.source}: its only answer is empty and cut: leave it out")
    if not any(example.turn_ids):
        total = len(tokens.ids)
        raise RenderError(f"{conversation.source}: the first {max_tokens} of its {total} tokens hold no answer: raise the maximum length")
    return example


def text_of_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text the target continues: `messages` in its chat template, up to where the next answer starts."""
    if not messages:
        raise RenderError("there are no messages: give at least one with role and content")
    return _apply(messages, tokenizer, add_generation_prompt=True)


def render_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of `text_of_prompt`: what serving feeds the target, and a prefix of the rendered training example."""
    text = text_of_prompt(messages, tokenizer)
    starts = _answer_starts(messages, text, tokenizer)
    return tokenize(text, list(starts.values()), tokenizer).ids


def tokenize(text: str, boundaries: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise `text` so that no token lies across one of the `boundaries` (increasing character offsets).

    A prompt that ends in "Answer: " makes the tokens `:` and ` `, while the text "Answer: Yes" has the token ` Yes`, which the
    target cannot write after that prompt. Only there the text is tokenised in two pieces; elsewhere the pieces would be equal.
    """
    whole = _encode(text, 0, tokenizer)
    crossed = [boundary for boundary in boundaries if 0 < boundary < len(text) and not _is_clean(whole, boundary)]
    if not crossed:
        return whole
    cuts = [0, *crossed, len(text)]
    pieces = [_encode(text[start:end], start, tokenizer) for start, end in zip(cuts, cuts[1:], strict=False)]
    return Tokens(*(sum(parts, []) for parts in zip(*pieces, strict=True)))


def _is_clean(tokens: Tokens, boundary: int) -> bool:
    """Whether a token ends at `boundary`. A gap before it is a space that the next token holds: some tokenizers trim offsets."""
    before = bisect_right(tokens.ends, boundary)
    return before > 0 and tokens.ends[before - 1] == boundary


def _encode(text: str, offset: int, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} gives no character offsets: the target needs a fast tokenizer (tokenizer.json)")
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    spans = encoding["offset_mapping"]
    return Tokens(encoding["input_ids"], [offset + start for start, _ in spans], [offset + end for _, end in spans])


def _apply(messages: Messages, tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template: use an instruction-tuned target")
    chat = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise RenderError(f"the target's chat template refuses the messages ({error}): change their roles or order") from error
    assert isinstance(text, str), type(text)
    return text


def _answer_starts(messages: Messages, text: str, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Message index -> character at which that answer starts in `text`, for the answers whose prompt `text` really holds."""
    starts = {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _apply(messages[:index], tokenizer, add_generation_prompt=True)
            if text.startswith(prompt):
                starts[index] = len(prompt)
    return starts


def _find_turns(conversation: Conversation, text: str, starts: Mapping[int, int]) -> list[_Turn]:
    """The answers that stand in `text` as they were written; a last one that does not is an error."""
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not answers:
        raise RenderError("no assistant turn to learn from: let the target answer the prompts first (python -m data.synthesize)")
    turns = []
    for number, index in enumerate(answers, start=1):
        start = starts.get(index)
        end = None if start is None else _content_end(text, start, conversation.messages[index]["content"])
        if start is not None and end is not None:
            turns.append(_Turn(number, start, end))
    if not turns or turns[-1].number != len(answers):
        raise RenderError(
            "the target's chat template does not keep the last answer as it was written: does its thinking mode fit the data?"
        )
    return turns


def _content_end(text: str, start: int, content: str) -> int | None:
    """Where `content` ends in `text[start:]`; blanks at its ends may be trimmed or added. None where it does not stand there."""
    lead = len(text) - len(text[start:].lstrip()) if content.strip() else start
    for body in (content, content.rstrip()):
        if text.startswith(body, start):
            return start + len(body)
    for body in (content.lstrip(), content.strip()):
        if text.startswith(body, lead):
            return lead + len(body)
    return None


def _end_of_turn(turn: _Turn, text: str, tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> int:
    """One past the token that closes `turn`: the first special token after the content, with only blanks between."""
    special = _special_ids(tokenizer)
    after = bisect_right(tokens.ends, turn.content_end)
    closing = next((i for i in range(after, len(tokens.ids)) if tokens.ids[i] in special), None)
    if closing is None or text[turn.content_end : tokens.starts[closing]].strip():
        raise RenderError("the target's chat template closes the answer with no special token: such a target cannot end its turn")
    first = bisect_right(tokens.ends, turn.start)
    if tokens.ids[closing] in tokens.ids[first:closing]:
        name = tokenizer.convert_ids_to_tokens(tokens.ids[closing])
        raise RenderError(f"the answer holds the end-of-turn token {name} in its text: remove it")
    return closing + 1


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)
