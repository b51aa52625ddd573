"""From a token stream to the text that is shown, and to OpenAI's response objects and stream chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from infer.server.driver import EngineGone, EngineThread, TokenStream
from infer.server.errors import ApiError
from infer.text import AnswerText


class Delta(NamedTuple):
    """A piece of an answer. `new_tokens` counts the answer's tokens up to here, the one that ended it included."""

    text: str
    new_tokens: int
    finish_reason: str | None


class Reply(NamedTuple):
    """What all objects of one response share."""

    id: str
    model: str
    created: int
    is_chat: bool
    prompt_tokens: int


async def deltas(engine: EngineThread, stream: TokenStream, answer: AnswerText) -> AsyncGenerator[Delta, None]:
    """The answer piece by piece. Whoever stops reading, a client that hangs up included, cancels the request."""
    try:
        async with aclosing(stream.read()) as rounds:
            async for token_ids, reason in rounds:
                text = ""
                for token in token_ids:
                    text += answer.push(token)
                    if answer.stopped:
                        break
                if reason is not None:
                    text += answer.finish()
                finish = "stop" if answer.stopped else reason and str(reason)
                if text or finish:
                    yield Delta(text, answer.num_tokens, finish)
                if finish:
                    return
    except EngineGone as error:
        raise ApiError(503, f"{error}; the answer is incomplete") from error
    finally:
        engine.cancel(stream.request_id)


async def whole_answer(reply: Reply, pieces: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    """The response object of a request that does not stream."""
    text, last = "", Delta("", 0, None)
    async for last in pieces:
        text += last.text
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if reply.is_chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": last.finish_reason}
    return {**_head(reply, "chat.completion" if reply.is_chat else "text_completion"), "choices": [choice], "usage": _usage(reply, last)}


async def events(reply: Reply, pieces: AsyncGenerator[Delta, None], include_usage: bool) -> AsyncGenerator[str, None]:
    """Server-sent events of a request that streams, `[DONE]` at the end; an error in between is an event too."""
    head = _head(reply, "chat.completion.chunk" if reply.is_chat else "text_completion")
    usage = {"usage": None} if include_usage else {}

    def chunk(content: dict[str, Any], finish_reason: str | None = None) -> str:
        body = {"delta": content} if reply.is_chat else content
        return _event({**head, "choices": [{"index": 0, **body, "logprobs": None, "finish_reason": finish_reason}], **usage})

    last = Delta("", 0, None)
    try:
        async with aclosing(pieces) as reading:
            if reply.is_chat:
                yield chunk({"role": "assistant", "content": ""})
            async for last in reading:
                if last.text:
                    yield chunk({"content" if reply.is_chat else "text": last.text})
        yield chunk({} if reply.is_chat else {"text": ""}, last.finish_reason)
    except ApiError as error:
        yield _event(error.body)
        return
    if include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply, last)})
    yield "data: [DONE]\n\n"


def new_reply(request_id: str, model: str, is_chat: bool, prompt_tokens: int) -> Reply:
    """A reply that starts now."""
    return Reply(request_id, model, int(time.time()), is_chat, prompt_tokens)


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply, last: Delta) -> dict[str, int]:
    total = reply.prompt_tokens + last.new_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": last.new_tokens, "total_tokens": total}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
