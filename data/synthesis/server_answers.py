"""Answers by an OpenAI-compatible server (vLLM, SGLang): concurrent requests, retried after transient errors."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx

from data.chat.messages import DataError, Message, to_message
from data.synthesis.dialogue import Question, Reply
from drafters.base.errors import UserError
from drafters.targets.template import TemplateOptions

TRIES = 8
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds; doubled after each try
TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an answer may take minutes at a busy server
TRY_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
ROW_REFUSED = {400, 413, 422}  # the fault of this conversation, such as one too long for the server's context


class ServerAnswerer:
    """An `Answerer` with `concurrency` requests at a time; `url` may end in /v1 or not."""

    def __init__(
        self,
        url: str,
        model: str,
        max_new_tokens: int,
        concurrency: int,
        template: TemplateOptions,
        key: str | None = None,
    ):
        base = url.rstrip("/").removesuffix("/v1") + "/v1/"
        self.url, self.model, self.max_new_tokens, self.concurrency = base, model, max_new_tokens, concurrency
        self.template = template
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.waiting: deque[Question] = deque()

    def check(self) -> None:
        """Raises `UserError` where no server answers, or it does not serve the model."""
        try:
            response = httpx.get(f"{self.url}models", headers=self.headers, timeout=TIMEOUT)
            served = [str(model["id"]) for model in response.raise_for_status().json()["data"]]
        except httpx.HTTPStatusError as error:
            raise UserError(f"--server {self.url}models answers {_complaint(error.response)}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"no server answers at --server {self.url} ({_said(error)}): start it, or correct the address"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--server {self.url}models is no list of models: is this an OpenAI-compatible server?"
            ) from error
        if self.model not in served:
            raise UserError(
                f"--model {self.model!r} is not served at {self.url}; served: {', '.join(served) or 'nothing'}"
            )

    def ask(self, question: Question, first: bool = False) -> str | None:
        """See `Answerer.ask`."""
        (self.waiting.appendleft if first else self.waiting.append)(question)
        return None

    def replies(self) -> Iterator[Reply]:
        """See `Answerer.replies`. Raises `UserError` where the server refuses everything, or is gone for a minute or
        more.
        """
        loop = asyncio.new_event_loop()
        client = httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=TIMEOUT, limits=httpx.Limits(max_connections=None)
        )
        tasks: set[asyncio.Task[Reply]] = set()
        try:
            while self.waiting or tasks:
                while self.waiting and len(tasks) < self.concurrency:
                    tasks.add(loop.create_task(self._reply(client, self.waiting.popleft())))
                done, tasks = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    yield task.result()
        finally:
            loop.run_until_complete(_end(tasks, client))
            loop.close()

    async def _reply(self, client: httpx.AsyncClient, question: Question) -> Reply:
        response = await self._post(client, self._body(question))
        if response.status_code in ROW_REFUSED:
            return Reply(question.key, {"role": "assistant", "content": ""}, False, 0, _complaint(response))
        try:
            content = response.json()
            choice = content["choices"][0]
            message = to_message(
                {**choice["message"], "content": choice["message"].get("content") or ""}, "the server's answer"
            )
            return Reply(
                question.key, message, choice["finish_reason"] != "length", int(content["usage"]["completion_tokens"])
            )
        except (ValueError, KeyError, IndexError, TypeError, DataError) as error:
            raise UserError(
                f"{self.url}chat/completions gives no chat completion with usage ({_said(error)})"
            ) from error

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """The response; after errors that may pass, further tries with growing waits."""
        reason = ""
        for attempt in range(TRIES):
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.5)
            try:
                response = await client.post("chat/completions", json=body)
            except httpx.TransportError as error:
                reason = _said(error)
            else:
                if response.is_success or response.status_code in ROW_REFUSED:
                    return response
                reason = _complaint(response)
                if response.status_code not in TRY_AGAIN:
                    raise UserError(f"--server {self.url} answers {reason}")
                asked = response.headers.get("Retry-After", "")
                wait = max(wait, min(LONGEST_WAIT, float(asked))) if asked.isdigit() else wait
            if attempt + 1 < TRIES:
                await asyncio.sleep(wait)
        raise UserError(
            f"--server {self.url} failed {TRIES} times ({reason}): see to it, and the same command goes on from here"
        )

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": [_sent(message) for message in question.messages]}
        body |= {
            "temperature": question.temperature,
            "top_p": 1.0,
            "max_tokens": self.max_new_tokens,
            "seed": question.seed % 2**31,
        }
        if tools := question.tools or self.template.read_tools():
            body["tools"] = list(tools)
        if arguments := self.template.arguments():
            body["chat_template_kwargs"] = arguments
        return body


async def _end(tasks: set[asyncio.Task[Reply]], client: httpx.AsyncClient) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def _sent(message: Message) -> Message:
    """As the API wants it: arguments of tool calls as JSON, no `weight`."""
    sent = {key: value for key, value in message.items() if key != "weight"}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _complaint(response: httpx.Response) -> str:
    """Status and message of an error response: "404 (The model `x` does not exist.)"."""
    try:
        content = response.json()
        error = content.get("error", content)
        message = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = response.text
    hint = {401: ": give --api-key-env NAME", 403: ": give --api-key-env NAME"}.get(response.status_code, "")
    return f"{response.status_code} ({' '.join(str(message).split())[:300]}){hint}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
