"""Answers by a server: a small one that fails on purpose, and the project's own."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data import synthesize
from data.chat.conversations import read_conversations
from data.chat.render import render_prompt
from data.manifest import read_manifest
from data.synthesis import server_answers
from drafters.base.errors import run_command
from drafters.base.settings import load_settings
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.launch import launch
from infer.server.app import create_app
from infer.server.engine_thread import EngineThread
from infer.server.http import listen, make_server, url_of
from infer.text.detokenize import decode
from tests.cpu.infer.recipe import target_of, write_recipe
from tests.tiny import save_tiny_target

Response = tuple[int, dict[str, str], Any]


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that left before their answer came: a run that ends early leaves requests behind."""

    daemon_threads = False  # closing waits for them, so none writes into a later test

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeServer:
    """Echoes the last message. `faults` maps a question to the answers that come before the echo."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: dict[str, list[Response]] = {}
        self.always: Response | None = None
        self.busy = self.most_busy = 0
        self.reply: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {
            "content": f"echo {body['messages'][-1]['content']}"
        }
        self.finish, self.delay = "stop", 0.0
        self.lock = threading.Lock()
        self.http = QuietServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> Response:
        with self.lock:
            self.bodies.append(body)
            if faults := self.faults.get(str(body["messages"][-1]["content"])):
                return faults.pop(0)
        if self.always:
            return self.always
        message = {"role": "assistant", **self.reply(body)}
        return (
            200,
            {},
            {"choices": [{"message": message, "finish_reason": self.finish}], "usage": {"completion_tokens": 4}},
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.headers.append(dict(self.headers))
                self._send(200, {}, {"data": [{"id": "tiny"}, {"id": "other"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.busy += 1
                    fake.most_busy = max(fake.busy, fake.most_busy)
                time.sleep(fake.delay)
                reply = fake.answer(body)
                with fake.lock:
                    fake.busy -= 1
                self._send(*reply)

            def _send(self, status: int, headers: dict[str, str], content: Any) -> None:
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(server_answers, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(server_answers, "TRIES", 4)
    fake = FakeServer()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def write_chats(path: Path, count: int = 3, turns: int = 1) -> Path:
    """`count` conversations of `turns` questions `q<conversation>.<turn>`, with old answers between them."""
    path.parent.mkdir(exist_ok=True)
    lines = []
    for i in range(count):
        questions = [{"role": "user", "content": f"q{i}.{turn}"} for turn in range(turns)]
        messages = [
            message for question in questions for message in (question, {"role": "assistant", "content": "old"})
        ]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages[:-1]}) + "\n")
    path.write_text("".join(lines))
    return path


def run(target: Path, directory: Path, url: str, *options: str) -> int:
    given = [
        "--target",
        str(target),
        "--out",
        str(directory / "out"),
        "--server",
        url,
        "--model",
        "tiny",
        "--max-new-tokens",
        "8",
    ]
    return run_command(
        synthesize.main, [*given, *(options or ["--prompts", str(write_chats(directory / "chats.jsonl"))])]
    )


def rows(directory: Path) -> list[dict[str, Any]]:
    return pq.read_table(directory / "out" / "corpus.parquet").to_pylist()


def test_turns_are_answered_one_after_the_other_and_many_at_once(
    server: FakeServer, target: Path, tmp_path: Path
) -> None:
    server.delay = 0.02
    chats = write_chats(tmp_path / "chats.jsonl", count=12, turns=3)
    assert (
        run(
            target,
            tmp_path,
            f"{server.url}/v1/",
            "--prompts",
            str(chats),
            "--concurrency",
            "5",
            "--enable-thinking",
            "false",
        )
        == 0
    )
    found = rows(tmp_path)
    assert len(found) == 12 and server.most_busy == 5
    for i, row in enumerate(sorted(found, key=lambda row: int(row["id"][1:]))):
        assert [m["content"] for m in row["messages"]] == [
            t for n in range(3) for t in (f"q{i}.{n}", f"echo q{i}.{n}")
        ]
        assert (row["tokens"], row["finish_reason"], row["temperature"]) == (12, "stop", 0.8 * (i % 2))
    assert {(body["max_tokens"], body["model"]) for body in server.bodies} == {(8, "tiny")}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.bodies)
    assert len({body["seed"] for body in server.bodies}) == 36
    manifest = read_manifest(tmp_path / "out")
    assert manifest.num_response_tokens == 144 and manifest.template_options == {"enable_thinking": False}


def test_faults_that_pass_are_tried_again(server: FakeServer, target: Path, tmp_path: Path) -> None:
    server.faults = {
        "q0.0": [(429, {"Retry-After": "0"}, "slow down"), (503, {}, {"error": {"message": "busy"}})],
        "q1.0": [(500, {}, "")],
    }
    assert run(target, tmp_path, server.url) == 0
    assert len(rows(tmp_path)) == 3 and len(server.bodies) == 6


def test_a_conversation_that_is_refused_is_left_out(
    server: FakeServer, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = {"q1.0": [(400, {}, {"error": {"message": "maximum context length\nis 64"}})] * 9}
    assert run(target, tmp_path, server.url) == 0
    assert [row["id"] for row in rows(tmp_path)] == ["c0", "c2"] and len(server.bodies) == 3
    assert "left out: c1: 400 (maximum context length is 64)" in capsys.readouterr().out


def test_thinking_tool_calls_and_cut_answers_are_kept(server: FakeServer, target: Path, tmp_path: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    chats = tmp_path / "chats.jsonl"
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "r", "tool_call_id": "x"}]
    chats.write_text(
        json.dumps({"id": "c", "messages": [{"role": "user", "content": "a"}, *called], "tools": [tool]}) + "\n"
    )
    server.reply = lambda body: {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    assert run(target, tmp_path, server.url, "--prompts", str(chats)) == 0
    (body,) = server.bodies
    assert (
        body["tools"] == [tool] and body["messages"][1]["tool_calls"] == [call] and "weight" not in body["messages"][1]
    )
    (conversation,) = read_conversations(tmp_path / "out")
    assert conversation.tools == (tool,) and conversation.messages[1]["weight"] == 0
    answer = conversation.messages[-1]
    assert answer["reasoning_content"] == "hm" and answer["tool_calls"][0]["function"]["arguments"] == {"city": "Lima"}
    server.reply, server.finish = (lambda body: {"content": "cut he"}), "length"
    assert run(target, tmp_path / "second", server.url) == 0
    assert all(conversation.truncated for conversation in read_conversations(tmp_path / "second" / "out"))


def test_a_server_that_goes_away_ends_the_run_and_the_next_one_goes_on(
    server: FakeServer, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = {"q2.1": [(502, {}, "gone")] * 4}
    options = ("--prompts", str(write_chats(tmp_path / "chats.jsonl", count=4, turns=2)), "--concurrency", "1")
    assert run(target, tmp_path, server.url, *options) == 2
    assert "failed 4 times (502 (gone)): see to it, and the same command goes on from here" in capsys.readouterr().err
    asked = len(server.bodies)
    assert asked == 5 + 4
    assert run(target, tmp_path, server.url, *options) == 0
    assert [body["messages"][-1]["content"] for body in server.bodies[asked:]] == ["q2.1", "q3.0", "q3.1"] and len(
        rows(tmp_path)
    ) == 4


def test_a_client_that_leaves_is_no_error_of_the_server(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.delay, server.reply = 0.2, lambda body: {"content": 10_000_000 * "x"}
    with socket.create_connection(("127.0.0.1", server.http.server_port)) as client:
        body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        while not server.busy:
            time.sleep(0.01)
    server.http.shutdown()
    server.http.server_close()
    assert server.bodies and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("always", "message"),
    [
        ((401, {}, {"error": {"message": "no key"}}), "answers 401 (no key): give --api-key-env NAME"),
        ((404, {}, {"detail": "Not Found"}), "answers 404"),
        ((200, {}, {"choices": []}), "gives no chat completion with usage"),
        ((200, {}, "<html>"), "gives no chat completion with usage"),
    ],
)
def test_faults_that_do_not_pass_end_the_run_at_once(
    server: FakeServer,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    always: Response,
    message: str,
) -> None:
    server.always = always
    assert run(target, tmp_path, server.url) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1] and "Traceback" not in "".join(lines)


def test_a_run_where_everything_is_refused_gives_up(
    server: FakeServer, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always = (422, {}, {"error": {"message": "no seed please"}})
    assert run(target, tmp_path, server.url, "--prompts", str(write_chats(tmp_path / "chats.jsonl", count=40))) == 2
    assert (
        "the first 20 conversations were all refused, the last one because: 422 (no seed please)"
        in capsys.readouterr().err
    )


def test_who_is_asked_is_checked_first(
    server: FakeServer,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chats = str(write_chats(tmp_path / "chats.jsonl"))
    assert run(target, tmp_path / "a", server.url, "--prompts", chats, "--model", "tyni") == 2
    assert "--model 'tyni' is not served at" in capsys.readouterr().err
    assert run(target, tmp_path / "b", "http://127.0.0.1:9", "--prompts", chats) == 2
    assert "no server answers at --server http://127.0.0.1:9/v1/" in capsys.readouterr().err
    assert run(target, tmp_path / "c", server.url, "--prompts", chats, "--api-key-env", "NO_SUCH_KEY") == 2
    assert "there is no such environment variable" in capsys.readouterr().err
    monkeypatch.setenv("A_KEY", "secret")
    assert run(target, tmp_path / "d", server.url, "--prompts", chats, "--api-key-env", "A_KEY") == 0
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert "secret" not in (tmp_path / "d" / "out" / "work" / "settings.json").read_text()


def test_the_projects_own_server_answers_what_its_engine_does(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    engine = launch(load_settings(EngineSettings, recipe, ["batch_size=3"]), Mode.AR)
    thread = EngineThread(lambda: engine)
    listener = listen("127.0.0.1", 0)
    http = make_server(create_app(thread, thread.start(), "tiny"))
    serving = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
    serving.start()
    try:
        chats = write_chats(tmp_path / "chats.jsonl", count=3, turns=2)
        assert run(recipe.parent / "target", tmp_path, url_of(listener), "--prompts", str(chats)) == 0
    finally:
        http.should_exit = True
        serving.join(timeout=10)
        thread.close()
    target = target_of(recipe)
    alone = launch(load_settings(EngineSettings, recipe), Mode.AR, target)
    greedy = [row for row in rows(tmp_path) if row["temperature"] == 0.0]
    assert len(greedy) == 2
    for row in greedy:
        alone.submit(render_prompt(row["messages"][:1], target.tokenizer), SamplingParams(8))
        while alone.has_work:
            outputs = alone.step()
        assert decode(target.tokenizer, outputs[-1].request.new_tokens) == row["messages"][1]["content"]
