"""Chat template and tokenizer: messages to text, and text to tokens with character offsets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.chat.messages import DataError, Tool
from drafters.base.errors import UserError
from drafters.targets.template import TemplateOptions

Messages = Sequence[Mapping[str, Any]]
PLAIN_TEMPLATE = TemplateOptions()
WRITTEN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # what a template gets to see


class RenderError(DataError):
    """A conversation that the template cannot write, or that leaves nothing to learn from. Names its file and line."""


class Tokens(NamedTuple):
    """Token ids of a text, with the characters `[starts[i], ends[i])` that each stands for."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class Renderer(NamedTuple):
    """A tokenizer's chat template with its options."""

    tokenizer: PreTrainedTokenizerBase
    options: TemplateOptions = PLAIN_TEMPLATE
    tools: tuple[Tool, ...] = ()

    def apply(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The text of `messages`. Raises `RenderError` where the template refuses them."""
        if not self.tokenizer.chat_template:
            raise UserError("the target's tokenizer has no chat template: use an instruction-tuned target")
        chat = [{key: message[key] for key in WRITTEN if key in message} for message in messages]
        given = {"tools": list(self.tools), **self.options.arguments()} if self.tools else self.options.arguments()
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add_generation_prompt, **given
            )
        except (TemplateError, TypeError) as error:
            raise RenderError(
                f"the target's chat template refuses the messages ({error}): change their roles or order"
            ) from error
        assert isinstance(text, str), type(text)
        return text

    def prompt(self, messages: Messages) -> str:
        """The text that the target continues after `messages`."""
        return self.apply(messages, add_generation_prompt=True)


def tokenize(text: str, boundaries: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise `text` so that no token lies across one of the `boundaries` (increasing character offsets).

    A prompt that ends in "Answer: " makes the tokens `:` and ` `, while the text "Answer: Yes" has the token ` Yes`,
    which the target cannot write after that prompt. Only there the text is tokenised in two pieces; elsewhere the
    pieces would be equal.
    """
    whole = _encode(text, 0, tokenizer)
    crossed = [boundary for boundary in boundaries if 0 < boundary < len(text) and not _is_clean(whole, boundary)]
    if not crossed:
        return whole
    cuts = [0, *crossed, len(text)]
    pieces = [_encode(text[start:end], start, tokenizer) for start, end in zip(cuts, cuts[1:], strict=False)]
    return Tokens(*(sum(parts, []) for parts in zip(*pieces, strict=True)))


def _is_clean(tokens: Tokens, boundary: int) -> bool:
    """Whether a token ends at `boundary`. A gap before it is a space that the next token holds: some tokenizers trim
    offsets.
    """
    before = bisect_right(tokens.ends, boundary)
    return before > 0 and tokens.ends[before - 1] == boundary


def _encode(text: str, offset: int, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} gives no character offsets: "
            "the target needs a fast tokenizer (tokenizer.json)"
        )
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    spans = encoding["offset_mapping"]
    return Tokens(encoding["input_ids"], [offset + start for start, _ in spans], [offset + end for _, end in spans])


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the special tokens."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Special tokens as they stand in text."""
    return tuple(token for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))) if token)
