"""OpenAI's response objects and stream chunks, made from a stream of tokens.

A response has one or more choices: answers to the same prompt, and to several prompts. They are interleaved in any
order and end one by one.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from infer.server.engine_thread import EngineGone, EngineThread, TokenStream
from infer.server.errors import ApiError
from infer.server.logprobs import PlacedToken
from infer.text.detokenize import AnswerText

LogprobsObject = Callable[[Sequence[PlacedToken]], dict[str, Any]]


class TextDelta(NamedTuple):
    """New text of one choice. `new_tokens` counts the answer's tokens so far, the one that ended it included.

    `tokens` are those since the delta before, with log-probabilities where they were asked for. Every counted token
    has its entry, also those whose text a stop string cut off.
    """

    choice: int
    text: str
    new_tokens: int
    finish_reason: str | None
    tokens: tuple[PlacedToken, ...] = ()


class ResponseHead(NamedTuple):
    """The fields shared by all objects of a response. `logprobs` makes the object of some tokens, where asked for."""

    id: str
    model: str
    created: int
    is_chat: bool
    prompt_tokens: int
    choices: int
    logprobs: LogprobsObject | None


def new_response(
    request_id: str,
    model: str,
    is_chat: bool,
    prompt_tokens: int,
    choices: int = 1,
    logprobs: LogprobsObject | None = None,
) -> ResponseHead:
    """The head of a response that is created now."""
    return ResponseHead(request_id, model, int(time.time()), is_chat, prompt_tokens, choices, logprobs)


async def deltas(
    engine: EngineThread, stream: TokenStream, answers: Sequence[AnswerText]
) -> AsyncGenerator[TextDelta, None]:
    """The answers as text deltas. Requests are cancelled when the reader stops, also when a client hangs up."""
    pending: list[list[PlacedToken]] = [[] for _ in answers]
    try:
        async with aclosing(stream.read()) as rounds:
            async for choice, token_ids, reason, logprobs in rounds:
                answer, text = answers[choice], ""
                for i, token in enumerate(token_ids):
                    if logprobs:
                        pending[choice].append(PlacedToken(logprobs[i], answer.length))
                    text += answer.push(token)
                if reason is not None:
                    text += answer.finish()
                if text or reason is not None:
                    yield TextDelta(choice, text, answer.num_tokens, reason and str(reason), tuple(pending[choice]))
                    pending[choice] = []
    except EngineGone as error:
        raise ApiError(503, f"{error}; the answer is incomplete") from error
    finally:
        engine.cancel(stream)


async def whole_answer(reply: ResponseHead, pieces: AsyncGenerator[TextDelta, None]) -> dict[str, Any]:
    """The response object of a request that does not stream."""
    found: list[list[TextDelta]] = [[] for _ in range(reply.choices)]
    async for piece in pieces:
        found[piece.choice].append(piece)
    choices = [_choice(reply, own) for own in found]
    kind = "chat.completion" if reply.is_chat else "text_completion"
    return {**_head(reply, kind), "choices": choices, "usage": _usage(reply, [own[-1].new_tokens for own in found])}


async def events(
    reply: ResponseHead, pieces: AsyncGenerator[TextDelta, None], include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events of a request that streams, `[DONE]` at the end; an error in between is an event too."""
    head = _head(reply, "chat.completion.chunk" if reply.is_chat else "text_completion")
    usage = {"usage": None} if include_usage else {}

    def chunk(
        choice: int, content: dict[str, Any], tokens: Sequence[PlacedToken] = (), finish_reason: str | None = None
    ) -> str:
        body = {"delta": content} if reply.is_chat else content
        logprobs = reply.logprobs(tokens) if reply.logprobs and tokens else None
        return _event(
            {
                **head,
                "choices": [{"index": choice, **body, "logprobs": logprobs, "finish_reason": finish_reason}],
                **usage,
            }
        )

    counts = [0] * reply.choices
    try:
        async with aclosing(pieces) as reading:
            for choice in range(reply.choices) if reply.is_chat else ():
                yield chunk(choice, {"role": "assistant", "content": ""})
            async for choice, text, new_tokens, finish_reason, tokens in reading:
                counts[choice] = new_tokens
                if text:
                    yield chunk(choice, {"content" if reply.is_chat else "text": text}, tokens)
                if finish_reason:
                    yield chunk(choice, {} if reply.is_chat else {"text": ""}, () if text else tokens, finish_reason)
    except ApiError as error:
        yield _event(error.body)
        return
    if include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply, counts)})
    yield "data: [DONE]\n\n"


def _choice(reply: ResponseHead, pieces: Sequence[TextDelta]) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if reply.is_chat else {"text": text}
    logprobs = reply.logprobs([token for piece in pieces for token in piece.tokens]) if reply.logprobs else None
    return {"index": pieces[0].choice, **content, "logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}


def _head(reply: ResponseHead, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: ResponseHead, new_tokens: Sequence[int]) -> dict[str, int]:
    """Every prompt counts once, every answer."""
    new = sum(new_tokens)
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": new, "total_tokens": reply.prompt_tokens + new}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
