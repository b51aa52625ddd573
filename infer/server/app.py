"""The HTTP application: `/health`, `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from data.chat.render import RenderError, render_prompt
from drafters.base.errors import UserError
from infer.engine.request import SamplingParams
from infer.server.engine_thread import EngineGone, EngineThread, NewRequest
from infer.server.errors import ApiError, handle_errors
from infer.server.logprobs import chat_logprobs, completion_logprobs
from infer.server.protocol import Body, ChatBody, CompletionBody, grammar_of, parse_body
from infer.server.responses import deltas, events, new_response, whole_answer
from infer.text.detokenize import AnswerText

if TYPE_CHECKING:
    from infer.engine.engine import Engine

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat's answer may fill the context
MOST_PROMPTS = 128  # of one completion
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # pieces are for now, not for a proxy's buffer


def create_app(thread: EngineThread, engine: Engine, model_name: str) -> FastAPI:
    """The application around a started engine thread. `engine` is read only: its tokenizer, facts and settings."""
    app = FastAPI(title="ssd-drafters", docs_url=None, redoc_url=None, openapi_url=None)
    handle_errors(app)
    model = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "ssd-drafters"}

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "ok" if thread.alive else "engine ended"
        content = {"status": status, "mode": engine.mode.value, "drafter": engine.draft_state.value}
        return JSONResponse(content, 200 if thread.alive else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, model_name)
        return model

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await request.body())
        return await respond(request, body, _prompts(body.prompt, engine), body.max_tokens or COMPLETION_TOKENS)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatBody, await request.body())
        try:
            prompt_ids = render_prompt(
                [message.plain for message in body.messages], engine.target.tokenizer, engine.settings.template
            )
        except RenderError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from error
        return await respond(request, body, [prompt_ids], body.max_completion_tokens or body.max_tokens)

    async def respond(
        request: Request, body: Body, prompts: Sequence[Sequence[int]], max_tokens: int | None
    ) -> Response:
        is_chat = isinstance(body, ChatBody)
        _check_model(body.model or model_name, model_name)
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        asks: list[NewRequest] = []
        try:
            for prompt_ids in prompts:
                room = _room(prompt_ids, engine, "messages" if is_chat else "prompt")
                for params in _sampling(body, min(max_tokens or room, room)).choices(body.n or 1):
                    asks.append(NewRequest(f"{request_id}-{len(asks)}", prompt_ids, params))
            stream = await thread.submit(asks)
        except UserError as error:
            raise ApiError(400, str(error)) from error
        except EngineGone as error:
            raise ApiError(503, str(error)) from error
        tokenizer = engine.target.tokenizer
        pieces = deltas(thread, stream, [AnswerText(tokenizer, body.stops) for _ in asks])
        logprobs = (
            None
            if body.wanted_logprobs is None
            else partial(chat_logprobs if is_chat else completion_logprobs, tokenizer)
        )
        reply = new_response(request_id, model_name, is_chat, sum(map(len, prompts)), len(asks), logprobs)
        if body.stream:
            return StreamingResponse(
                events(reply, pieces, body.include_usage), media_type="text/event-stream", headers=STREAM_HEADERS
            )
        answer = await _unless_disconnected(request, asyncio.ensure_future(whole_answer(reply, pieces)))
        return JSONResponse(answer)

    return app


async def _unless_disconnected(request: Request, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer; where the client hangs up before, it is cancelled, and with it the request in the engine."""
    hung_up = asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        answer.cancel()
        hung_up.cancel()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], engine: Engine) -> list[list[int]]:
    """Token ids of each prompt of a completion."""
    several: list[Any] = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(several) > MOST_PROMPTS:
        raise ApiError(
            400, f"prompt holds {len(several)} prompts: give at most {MOST_PROMPTS}", "prompt", "invalid_value"
        )
    vocab_size = engine.target.facts.vocab_size
    result = []
    for one in several:
        ids = (engine.target.tokenizer(one)["input_ids"] if one else []) if isinstance(one, str) else one
        for token in ids:
            if not 0 <= token < vocab_size:
                message = f"prompt holds the token id {token}: ids of this model are 0..{vocab_size - 1}"
                raise ApiError(400, message, "prompt", "invalid_value")
        result.append(ids)
    return result


def _room(prompt_ids: Sequence[int], engine: Engine, field: str) -> int:
    """RoundTokens that an answer may have. Raises `ApiError` for an empty prompt and for one that leaves no room."""
    if not prompt_ids:
        raise ApiError(400, f"{field} is empty: give at least one token of text", field, "invalid_value")
    settings = engine.settings
    limit = min(settings.max_model_len, settings.kv_tokens or settings.max_model_len)
    if len(prompt_ids) >= limit:
        message = f"{field}: {len(prompt_ids)} tokens, but the context holds {limit} with the answer: shorten the text"
        raise ApiError(400, message, field, "context_length_exceeded")
    return limit - len(prompt_ids)


def _sampling(body: Body, max_new_tokens: int) -> SamplingParams:
    """Requests without a seed get one of their own each."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.biases,
        stop=body.stops,
        logprobs=body.wanted_logprobs,
        grammar=grammar_of(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )


def _check_model(name: str, model_name: str) -> None:
    if name != model_name:
        raise ApiError(404, f"the model {name!r} is not served here: use {model_name!r}", "model", "model_not_found")
