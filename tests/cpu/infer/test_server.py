"""The HTTP server on a tiny target, through the `openai` client and a real uvicorn."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from data.chat.render import render_prompt
from drafters.base.errors import UserError, run_command
from drafters.base.settings import load_settings
from drafters.targets.target import Target
from infer import serve
from infer.config import EngineSettings, Mode
from infer.engine.engine import Engine
from infer.engine.request import SamplingParams
from infer.launch import launch
from infer.server.app import create_app
from infer.server.engine_thread import EngineThread
from infer.server.errors import ApiError
from infer.server.http import listen, make_server, url_of
from infer.server.protocol import ChatBody, CompletionBody, parse_body
from infer.text.detokenize import decode
from tests.cpu.infer.recipe import target_of, write_recipe

HELLO: Any = [{"role": "user", "content": "hello"}]


class Served(NamedTuple):
    """A server under test, and the engine behind it."""

    url: str
    thread: EngineThread
    engine: Engine
    client: openai.OpenAI


def serve_in_thread(launcher: Callable[[], Engine]) -> Iterator[Served]:
    thread = EngineThread(launcher)
    engine = thread.start()
    listener = listen("127.0.0.1", 0)
    server = make_server(create_app(thread, engine, "tiny"))
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    url = url_of(listener)
    yield Served(url, thread, engine, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    server.should_exit = True
    running.join(timeout=10)
    thread.close()
    assert not running.is_alive()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def served(recipe: Path) -> Iterator[Served]:
    settings = load_settings(EngineSettings, recipe, ["batch_size=4"])
    yield from serve_in_thread(partial(launch, settings, Mode.SD))


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Callable[..., list[int]]:
    """The greedy answer of an engine in mode ar, one request at a time."""
    target: Target = target_of(recipe)
    engine = launch(load_settings(EngineSettings, recipe), Mode.AR, target)

    def answer(prompt_ids: list[int] | None = None, max_new_tokens: int = 30, **params: Any) -> list[int]:
        engine.submit(prompt_ids or render_prompt(HELLO, target.tokenizer), SamplingParams(max_new_tokens, **params))
        while True:
            for output in engine.step():
                if output.finish_reason:
                    return output.request.new_tokens

    return answer


def text_of(served: Served, tokens: list[int]) -> str:
    return decode(served.engine.target.tokenizer, tokens)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_models_and_health(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("large")
    response = httpx.get(f"{served.url}/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "mode": "sd", "drafter": "serving"})


def test_a_chat_answer_is_what_the_engine_alone_gives(served: Served, alone: Callable[..., list[int]]) -> None:
    expected = alone()
    answer = served.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=30, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", text_of(served, expected))
    assert choice.finish_reason == "length"
    prompt_tokens = len(render_prompt(HELLO, served.engine.target.tokenizer))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 30)
    assert answer.usage.total_tokens == prompt_tokens + 30
    assert answer.object == "chat.completion"


def test_a_streamed_chat_adds_up_to_the_whole_one(served: Served, alone: Callable[..., list[int]]) -> None:
    stream = served.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text_of(served, alone())
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(pieces) > 10  # it really comes in pieces


def test_the_stream_is_server_sent_events_and_ends_with_done(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}
    lines = [line for line in httpx.post(f"{served.url}/v1/completions", json=body).text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert not any("usage" in chunk for chunk in chunks)


def test_a_completion_takes_text_or_token_ids(served: Served, alone: Callable[..., list[int]]) -> None:
    ids = served.engine.target.tokenizer("abc")["input_ids"]
    expected = text_of(served, alone(ids, 16))
    prompts: tuple[Any, ...] = ("abc", ["abc"], ids, [ids])
    for prompt in prompts:
        answer = served.client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert answer.choices[0].text == expected
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)  # 16 is the API's default


def test_a_stop_string_cuts_text_and_usage_at_the_same_token(served: Served, alone: Callable[..., list[int]]) -> None:
    tokens = alone()
    text = text_of(served, tokens)
    stop = next(
        text[i : i + 2]
        for i in range(6, len(text))
        if "\ufffd" not in text[i : i + 2] and text.index(text[i : i + 2]) == i
    )
    needed = next(n for n in range(len(tokens)) if stop in text_of(served, tokens[:n]))
    for streams in (False, True):
        answer: Any = served.client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=30,
            temperature=0,
            stop=["never there", stop],
            stream=streams,
            **({"stream_options": {"include_usage": True}} if streams else {}),  # type: ignore[arg-type]
        )
        if streams:
            chunks = list(answer)
            shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            shown, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
        assert (shown, reason, usage.completion_tokens) == (text[: text.index(stop)], "stop", needed)
    wait_until(lambda: not served.engine.has_work)  # what a stop string ends does not run on


def _streamed(chunks: Any, choice: int) -> tuple[str, list[Any], str | None]:
    """Text, log-probability entries and finish reason of one choice of a streamed chat."""
    own = [c for chunk in chunks for c in chunk.choices if c.index == choice]
    entries = [entry for c in own if c.logprobs for entry in c.logprobs.content]
    return "".join(c.delta.content or "" for c in own), entries, own[-1].finish_reason


def test_log_probabilities_of_a_chat_streamed_and_whole(served: Served, alone: Callable[..., list[int]]) -> None:
    ask: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = served.client.chat.completions.create(**ask).choices[0]
    tokens = alone(max_new_tokens=20)
    assert whole.logprobs is not None and whole.logprobs.content is not None
    special = served.engine.target.tokenizer.all_special_tokens  # they have an entry, and no text
    raw = bytes(byte for entry in whole.logprobs.content if entry.token not in special for byte in entry.bytes or [])
    assert raw.decode("utf-8", "replace") == text_of(served, tokens)
    assert all(
        entry.logprob < 0 and entry.top_logprobs[0].token == entry.token for entry in whole.logprobs.content
    )  # greedy
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in whole.logprobs.content)
    text, entries, reason = _streamed(list(served.client.chat.completions.create(**ask, stream=True)), 0)
    assert (text, reason) == (whole.message.content, whole.finish_reason)
    assert entries == whole.logprobs.content


def test_log_probabilities_of_a_completion(served: Served) -> None:
    answer = served.client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, temperature=1, seed=5, logprobs=2
    )
    got = answer.choices[0].logprobs
    assert got is not None and got.tokens and got.token_logprobs and got.top_logprobs and got.text_offset
    assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(got.text_offset) == 12
    for token, logprob, top in zip(got.tokens, got.token_logprobs, got.top_logprobs, strict=True):
        assert top[token] == logprob and 2 <= len(top) <= 3
        assert logprob <= max(top.values())
    text = answer.choices[0].text
    ends = [*got.text_offset[1:], len(text)]
    for token, start, end in zip(got.tokens, got.text_offset, ends, strict=True):
        assert (
            token.startswith("bytes:") or text[start:end].lstrip("\ufffd") == token
        )  # broken characters appear with what follows


def test_a_stop_string_trims_tokens_log_probabilities_and_usage_alike(
    served: Served, alone: Callable[..., list[int]]
) -> None:
    tokens = alone()
    text = text_of(served, tokens)
    stop = next(
        text[i : i + 2]
        for i in range(6, len(text))
        if "\ufffd" not in text[i : i + 2] and text.index(text[i : i + 2]) == i
    )
    needed = next(n for n in range(len(tokens)) if stop in text_of(served, tokens[:n]))
    ask: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "temperature": 0, "stop": stop, "logprobs": True}
    answer = served.client.chat.completions.create(**ask)
    entries = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert answer.usage is not None and entries is not None
    assert len(entries) == answer.usage.completion_tokens == needed
    assert _streamed(list(served.client.chat.completions.create(**ask, stream=True)), 0) == (
        text[: text.index(stop)],
        entries,
        "stop",
    )


@pytest.mark.parametrize("streams", [False, True])
def test_greedy_choices_are_identical_and_sampled_ones_have_their_own_seeds(served: Served, streams: bool) -> None:
    def answers(n: int, **options: Any) -> tuple[list[str], Any]:
        ask: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "n": n, **options}
        if not streams:
            whole = served.client.chat.completions.create(**ask)
            assert [choice.index for choice in whole.choices] == list(range(n))
            return [choice.message.content or "" for choice in whole.choices], whole.usage
        chunks = list(
            served.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        )
        return [_streamed(chunks, i)[0] for i in range(n)], chunks[-1].usage

    greedy, usage = answers(3, temperature=0)
    assert len(set(greedy)) == 1
    prompt_tokens = len(render_prompt(HELLO, served.engine.target.tokenizer))
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 36)  # the prompt once, every answer
    sampled, _ = answers(6, seed=3)  # more than the batch holds
    assert len(set(sampled)) == 6
    assert sampled[:1] == answers(1, seed=3)[0] and sampled[:2] == answers(2, seed=3)[0]


def test_several_prompts_in_one_completion(served: Served) -> None:
    one = [
        served.client.completions.create(model="tiny", prompt=p, max_tokens=8, temperature=0).choices[0].text
        for p in ("ab", "xyz")
    ]
    both = served.client.completions.create(model="tiny", prompt=["ab", "xyz"], max_tokens=8, temperature=0, n=2)
    assert [choice.text for choice in both.choices] == [one[0], one[0], one[1], one[1]]
    assert both.usage is not None and (both.usage.prompt_tokens, both.usage.completion_tokens) == (5, 32)


def test_one_refused_choice_leaves_none_running(served: Served) -> None:
    body = {"prompt": ["ab", "xyz"], "max_tokens": 8, "logit_bias": {"9999": 1}}
    assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 400
    wait_until(lambda: not served.engine.has_work)


def test_penalties_and_bias_reach_the_engine(served: Served, alone: Callable[..., list[int]]) -> None:
    expected = alone(presence_penalty=1.5, repetition_penalty=1.2, logit_bias=((40, 5.0),))
    ask: Any = {"max_tokens": 30, "temperature": 0, "presence_penalty": 1.5, "logit_bias": {"40": 5}}
    answer = served.client.chat.completions.create(
        model="tiny", messages=HELLO, **ask, extra_body={"repetition_penalty": 1.2}
    )
    assert answer.choices[0].message.content == text_of(served, expected) != text_of(served, alone())


def test_answers_with_a_grammar_follow_it(served: Served) -> None:
    create: Any = served.client.chat.completions.create
    ask: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 120}

    def content(**options: Any) -> str:
        choice = create(**ask, **options).choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content

    for named in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert content(extra_body=named) in ("yes", "no")
    assert re.fullmatch(
        "[0-9]{3}(-[0-9]{2}){2}", content(seed=1, extra_body={"guided_regex": "[0-9]{3}(-[0-9]{2}){2}"})
    )
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert isinstance(json.loads(content(seed=2, response_format=wanted))["ok"], bool)
    chunks = list(create(**ask, seed=2, response_format=wanted, stream=True, n=2))
    assert all(isinstance(json.loads(_streamed(chunks, i)[0])["ok"], bool) for i in (0, 1))


def test_seeds_repeat_and_requests_without_one_differ(served: Served) -> None:
    def answer(**options: Any) -> str:
        return served.client.completions.create(model="tiny", prompt="abc", max_tokens=24, **options).choices[0].text

    assert answer(seed=3) == answer(seed=3)
    assert answer(seed=3) != answer(seed=4)
    assert len({answer() for _ in range(3)}) == 3  # temperature 1 unless given
    assert answer(temperature=0) == answer(temperature=0, seed=9)


def test_many_at_once_get_their_own_answers(served: Served, alone: Callable[..., list[int]]) -> None:
    prompts = [f"{letter}{letter}" for letter in "abcdefghij"]  # more than the batch holds
    expected = [text_of(served, alone(served.engine.target.tokenizer(prompt)["input_ids"], 20)) for prompt in prompts]
    with ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(
                lambda p: served.client.completions.create(model="tiny", prompt=p, max_tokens=20, temperature=0),
                prompts,
            )
        )
    assert [answer.choices[0].text for answer in answers] == expected


@pytest.mark.parametrize("streams", [True, False])
def test_who_hangs_up_frees_everything(served: Served, streams: bool) -> None:
    scheduler = served.engine.scheduler
    body = {"prompt": "abc", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": streams}
    free = scheduler.pool.num_free
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(5, read=0.03)) as client:
        served.thread._inbox.put(
            lambda engine: time.sleep(0.3)
        )  # the answer surely takes longer than the client has patience
        client.post(f"{served.url}/v1/completions", json=body)
    wait_until(lambda: not scheduler.running and not scheduler.waiting and scheduler.pool.num_free == free)
    assert (
        served.client.completions.create(model="tiny", prompt="abc", max_tokens=2).choices[0].finish_reason == "length"
    )


def test_an_answer_ends_with_the_context(served: Served) -> None:
    answer = served.client.completions.create(
        model="tiny", prompt="abc", max_tokens=5000, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == served.engine.settings.max_model_len
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", {"prompt": ""}, "prompt", "prompt is empty"),
        ("completions", {"prompt": []}, "prompt", "prompt"),
        ("completions", {"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ("completions", {"prompt": ["a", ""]}, "prompt", "prompt is empty"),
        ("completions", {"prompt": [7, 9999]}, "prompt", "token id 9999"),
        ("completions", {"prompt": "x" * 160}, "prompt", "160 tokens"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 200}]},
            "messages",
            "the context holds 160",
        ),
        ("completions", {}, "prompt", "you must give the parameter 'prompt'"),
        ("chat/completions", {}, "messages", "you must give the parameter 'messages'"),
        ("chat/completions", {"messages": []}, "messages", "at least 1"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "tool"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens = 0"),
        ("completions", {"prompt": "a", "temperature": 3}, "temperature", "temperature = 3"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p", "top_p = 0"),
        ("completions", {"prompt": "a", "seed": "x"}, "seed", "seed"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop", "none of them empty"),
        ("completions", {"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ("completions", {"prompt": "a", "n": 0}, "n", "n = 0"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of", "best_of = 2 is not supported"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs", "give 0..20"),
        ("completions", {"prompt": "a", "logprobs": True}, "logprobs", "logprobs = true"),
        (
            "chat/completions",
            {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "top_logprobs = 21",
        ),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ("completions", {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "presence_penalty = 2.5"),
        ("completions", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty = 0"),
        ("completions", {"prompt": "a", "min_p": 2}, "min_p", "min_p = 2"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids and numbers in -100..100"),
        ("completions", {"prompt": "a", "logit_bias": {"9999": 1}}, None, "token ids of this target, 0..258"),
        ("completions", {"prompt": "a", "stop_token_ids": [-1]}, None, "stop_token_ids = -1"),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools = "),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "xml"),
        (
            "chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema has to",
        ),
        ("completions", {"prompt": "a", "guided_regex": "(a"}, "guided_regex", "cannot be used"),
        ("completions", {"prompt": "a", "guided_json": {"type": "nothing"}}, "guided_json", "cannot be used"),
        ("completions", {"prompt": "a", "guided_choice": ["x", ""]}, "guided_choice", "none of them empty"),
        (
            "completions",
            {"prompt": "a", "guided_choice": ["x"], "guided_regex": "x"},
            "guided_choice",
            "give one of them",
        ),
        ("completions", {"prompt": "a", "guided_regex": "x", "ignore_eos": True}, None, "ignore_eos"),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"regex": "(a"}},
            "structured_outputs.regex",
            "cannot be used",
        ),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"rege": "a"}},
            "structured_outputs.rege",
            "is not known",
        ),
    ],
)
def test_errors_name_the_field(
    served: Served, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = httpx.post(f"{served.url}/v1/{path}", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert message in error["message"] or message in str(error["param"])


def test_other_errors_have_the_same_shape(served: Served) -> None:
    for response, status in (
        (httpx.get(f"{served.url}/v1/nowhere"), 404),
        (httpx.get(f"{served.url}/v1/completions"), 405),
        (httpx.post(f"{served.url}/v1/completions", content="{no json"), 400),
        (httpx.post(f"{served.url}/v1/completions", json=[1]), 400),
        (httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "model": "large"}), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        served.client.chat.completions.create(model="large", messages=HELLO)


def test_neutral_values_of_unsupported_fields_pass() -> None:
    body = parse_body(
        CompletionBody,
        json.dumps({"prompt": "a", "best_of": 1, "logprobs": False, "user": "me", "echo": False}).encode(),
    )
    assert body.prompt == "a"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = parse_body(
        ChatBody, json.dumps({"messages": [{"role": "developer", "content": parts}], "tools": []}).encode()
    )
    assert chat.messages[0].plain == {"role": "system", "content": "ab"}
    with pytest.raises(ApiError, match="not supported"):
        parse_body(CompletionBody, b'{"prompt": "a", "best_of": 0}')


def test_an_engine_that_fails_is_an_error_at_once_and_a_503_afterwards(recipe: Path) -> None:
    def broken() -> Engine:
        engine = launch(load_settings(EngineSettings, recipe), Mode.AR)
        steps = iter(range(4))
        step = engine.step

        def fails_later() -> Any:
            if next(steps, None) is None:
                raise RuntimeError("the device fell off")
            return step()

        engine.step = fails_later  # type: ignore[method-assign]
        return engine

    for served in serve_in_thread(broken):
        stream = served.client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=50, temperature=0, stream=True
        )
        with pytest.raises(openai.APIError, match="the answer is incomplete"):
            list(stream)
        wait_until(lambda served=served: not served.thread.alive)
        response = httpx.get(f"{served.url}/health")
        assert (response.status_code, response.json()["status"]) == (503, "engine ended")
        with pytest.raises(openai.InternalServerError) as error:
            served.client.chat.completions.create(model="tiny", messages=HELLO)
        assert error.value.status_code == 503


def test_a_launch_that_fails_is_raised_where_it_was_asked_for(recipe: Path) -> None:
    settings = load_settings(EngineSettings, recipe, ["drafter=nowhere"])
    thread = EngineThread(partial(launch, settings, Mode.SD))
    with pytest.raises(UserError, match="nowhere"):
        thread.start()
    thread.close()


def test_a_port_in_use_is_one_line_and_nothing_is_loaded(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert run_command(serve.main, ["--recipe", str(recipe), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; give a free port with --port, "
        "or another --host\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lookahed=2"], "did you mean 'lookahead'?"),
        (["--port", "70000"], "give 0..65535"),
        (["--recipe", "none.yaml"], "no such file"),
    ],
)
def test_mistakes_of_the_command(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_command(serve.main, ["--recipe", str(recipe), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_serves_in_mode_ssd_and_ctrl_c_stops_it_cleanly(recipe: Path) -> None:
    command = [sys.executable, "-m", "infer.serve", "--recipe", str(recipe), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("serving"))
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        health = httpx.get(f"{url}/health").json()
        assert health == {"status": "ok", "mode": "ssd", "drafter": "serving"}
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 8, "temperature": 0}, timeout=30
        ).json()
        assert answer["usage"]["completion_tokens"] == 8
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the draft process too
        assert process.wait(timeout=20) == 0
        assert process.stderr.read().endswith("stopped\n")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
