"""Log-probabilities in OpenAI's two formats, of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.kernels.sampling.verdict import TokenLogprob
from infer.text.detokenize import token_bytes


class PlacedToken(NamedTuple):
    """A token with its log-probability, and where its text begins in the answer, in characters."""

    logprob: TokenLogprob
    offset: int


def chat_logprobs(tokenizer: Any, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    content = [{**entry(*own[:2]), "top_logprobs": [entry(*other) for other in own.top]} for own, _ in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. The chosen token is always among the top ones."""
    return {
        "tokens": [_name(tokenizer, own.token) for own, _ in tokens],
        "token_logprobs": [own.logprob for own, _ in tokens],
        "top_logprobs": [{_name(tokenizer, t): p for t, p in (*own.top, own[:2])} for own, _ in tokens],
        "text_offset": [offset for _, offset in tokens],
    }


def _name(tokenizer: Any, token: int) -> str:
    """The token's text; of a token that holds a part of a character only, its bytes."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
