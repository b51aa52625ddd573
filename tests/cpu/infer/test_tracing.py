"""Traces: valid trace events of both processes, spans that nest, tokens that stay; the picture and torch's profile."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import threading
import timeit
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drafters.base.errors import EXIT_USER_ERROR, UserError, run_command
from drafters.targets.target import Target
from infer import evaluate, generate
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.launch import launch
from infer.tracing import plot, spans
from infer.tracing.profiler import FILE
from infer.tracing.spans import DRAFTER, TARGET, recording, span
from tests.cpu.infer.recipe import write_recipe
from tests.trained import random_prompts

TARGET_SPANS = {"prefill", "verify", "wait for the drafter", "send"}
DRAFTER_SPANS = {"look up", "draft in sequence", "draft step", "glue", "select", "tree", "tree step"}
PROCESS_SPANS = {"wait for the target", "send"}  # of a draft process of its own
NEW = 40


class Event(NamedTuple):
    """A span of the trace; times in microseconds."""

    process: str
    thread: tuple[int, int]
    name: str
    start: float
    end: float
    arguments: dict[str, Any]


class Traced(NamedTuple):
    """What an engine wrote, and the trace of it."""

    tokens: list[list[int]]
    events: list[Event]


def read(path: Path) -> list[Event]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found = [
        Event(processes[e["pid"]], (e["pid"], e["tid"]), e["name"], e["ts"], e["ts"] + e["dur"], e["args"])
        for e in events
        if e["ph"] == "X"
    ]
    assert {event.thread for event in found} == threads
    return found


def answers(
    pair: tuple[Target, Path], in_process: bool, kill_after: int | None = None, **changes: Any
) -> list[list[int]]:
    """The tokens of three prompts in mode ssd; `kill_after` so many steps the draft process is killed."""
    settings = EngineSettings.model_validate(
        {
            "target": "",
            "drafter": str(pair[1]),
            "dtype": "float32",
            "target_devices": ("cpu",),
            "draft_devices": ("cpu",),
        }
        | {"lookahead": 3, "budget": 12, "max_model_len": 96, "batch_size": 2, **changes}
    )
    with launch(settings, Mode.SSD, pair[0], in_process=in_process) as engine:
        prompts = random_prompts(3, 4, pair[0].facts.vocab_size, seed=5)
        names = [engine.submit(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts]
        ended: dict[str, list[int]] = {}
        for step in itertools.count():
            if not engine.has_work:
                break
            if step == kill_after and engine.draft_pid is not None:
                os.kill(engine.draft_pid, signal.SIGKILL)
            ended |= {o.request_id: o.request.new_tokens for o in engine.step() if o.finish_reason}
    return [ended[name] for name in names]


@pytest.fixture(scope="module", params=[True, False], ids=["in process", "two processes"])
def traced(
    request: pytest.FixtureRequest, pair: tuple[Target, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[bool, Traced]]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with recording(str(path)):
        tokens = answers(pair, in_process=request.param)
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    yield request.param, Traced(tokens, read(path))


def test_every_kind_of_span_is_there_and_nothing_before_the_recording(traced: tuple[bool, Traced]) -> None:
    in_process, trace = traced
    names: dict[str, set[str]] = defaultdict(set)
    for event in trace.events:
        assert 0 <= event.start <= event.end
        names[event.process].add(event.name)
    drafting = names[TARGET if in_process else DRAFTER]
    assert names[TARGET] >= TARGET_SPANS
    assert drafting >= DRAFTER_SPANS
    assert in_process or drafting >= PROCESS_SPANS


def test_spans_of_a_thread_follow_or_contain_each_other(traced: tuple[bool, Traced]) -> None:
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in traced[1].events:
        threads[event.thread].append(event)
    for events in threads.values():
        open_ends: list[float] = []
        for event in sorted(events, key=lambda e: (e.start, -e.end)):
            while open_ends and open_ends[-1] <= event.start:
                open_ends.pop()
            assert not open_ends or event.end <= open_ends[-1], event
            open_ends.append(event.end)


def test_rounds_are_named_as_in_the_messages(traced: tuple[bool, Traced]) -> None:
    """A request's round is the number of committed tokens it starts from: it grows by accepted + 1."""
    rounds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in traced[1].events:
        if event.name == "verify":
            for request, number in event.arguments["rounds"].items():
                rounds[request].append((number, event.arguments["accepted"][request] + 1))
    assert len(rounds) == 3
    for found in rounds.values():
        assert all(number + committed == following for (number, committed), (following, _) in pairwise(found))
    verified = {(request, number) for request, found in rounds.items() for number, _ in found}
    looked_up = {
        pair for event in traced[1].events if event.name == "look up" for pair in event.arguments["rounds"].items()
    }
    assert looked_up and looked_up <= verified


def test_tracing_changes_no_token(traced: tuple[bool, Traced], pair: tuple[Target, Path]) -> None:
    assert answers(pair, in_process=True) == traced[1].tokens


def test_a_round_is_verified_while_the_draft_process_prepares_for_it(traced: tuple[bool, Traced]) -> None:
    in_process, trace = traced
    if in_process:
        pytest.skip("one process works in turns")

    def by_round(name: str) -> dict[tuple[str, int], Event]:
        found = [event for event in trace.events if event.name == name]
        return {pair: event for event in found for pair in event.arguments["rounds"].items()}

    verify, glue, tree, looked_up = (by_round(name) for name in ("verify", "glue", "tree", "look up"))
    rounds = verify.keys() & glue.keys() & tree.keys()
    assert len(rounds) > 10
    for number in rounds & looked_up.keys():  # whatever the order of the processes: the outcome comes after both
        assert verify[number].end < looked_up[number].start and tree[number].end < looked_up[number].start
    assert any(
        glue[number].start < verify[number].end and verify[number].start < tree[number].end for number in rounds
    )


def test_without_a_recording_nothing_is_written_or_kept(
    pair: tuple[Target, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with recording(None):
        assert spans.trace_path() is None
        answers(pair, in_process=True)
    spans.flush()
    assert not list(tmp_path.iterdir())
    assert span("a") is span("b")
    seconds = min(timeit.repeat(lambda: span("glue").__enter__(), number=1000, repeat=5)) / 1000
    assert seconds < 5e-6  # well under one on a machine that is not busy


def test_an_interrupted_recording_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"

    def interrupted() -> None:
        with recording(str(path)), span("answer"), span("verify", lambda: {"r": 3}) as found:
            found.note(accepted={"r": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [event.name for event in read(path)] == ["verify", "answer"]
    assert read(path)[0].arguments == {"rounds": {"r": 3}, "accepted": {"r": 1}}


def test_a_killed_draft_process_loses_neither_the_targets_spans_nor_those_it_wrote(
    pair: tuple[Target, Path], tmp_path: Path
) -> None:
    with recording(str(tmp_path / "trace.json")):
        answers(pair, in_process=False, kill_after=12)
    events = read(tmp_path / "trace.json")
    prepared = [event.end for event in events if event.process == DRAFTER and event.name == "tree"]
    verified = [event for event in events if event.name == "verify"]
    assert prepared and len(verified) > 12
    assert verified[-1].arguments["source"].popitem()[1] == "alone" and max(prepared) < verified[-1].start


def test_threads_are_told_apart_and_a_part_that_a_kill_cut_short_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (tmp_path / "trace.json.77.part").write_text("of an earlier run\n", encoding="utf-8")

    def other() -> None:
        with span("receive"):
            pass

    with recording(str(path)):
        thread = threading.Thread(target=other, name="draft-inbox")
        thread.start()
        thread.join()
        with span("verify"):
            pass
        line = json.dumps(["glue", 10**18, 2000, 5, "MainThread", {}])
        (tmp_path / "trace.json.4711.part").write_text(f"{line}\n{line[:20]}", encoding="utf-8")
    events = read(path)
    assert [(e.process, e.name) for e in events] == [(TARGET, "receive"), (TARGET, "verify"), (DRAFTER, "glue")]
    assert events[2].thread == (4711, 5) and events[2].end - events[2].start == pytest.approx(2, abs=0.1)
    assert events[0].thread != events[1].thread
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert [names[event.thread] for event in events] == ["draft-inbox", "main", "main"]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_the_options_of_generate_write_trace_and_profile_and_the_picture_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, trace = write_recipe(tmp_path / "recipe"), tmp_path / "trace.json"
    ask = ["--recipe", str(recipe), "--prompt", "Hi", "--max-new-tokens", "24", "--mode", "sd", "--json"]

    def tokens(*options: str) -> list[int]:
        assert run_command(generate.main, [*ask, *options]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    plain = tokens()
    assert tokens("--trace", str(trace), "--profile", str(tmp_path / "profile")) == plain
    assert {"verify", "draft in sequence"} <= {event.name for event in read(trace)}
    operators = json.loads(gzip.decompress((tmp_path / "profile" / FILE).read_bytes()))["traceEvents"]
    assert any(str(event.get("name", "")).startswith("aten::") for event in operators)
    assert run_command(plot.main, [str(trace), "--rounds", "2:4"]) == 0
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (["--rounds", "2:4000"], ["--rounds", "4:2"], ["--rounds", "4"], ["--out", "a.gif"]):
        assert run_command(plot.main, [str(trace), *wrong]) == EXIT_USER_ERROR
    assert run_command(plot.main, [str(recipe)]) == EXIT_USER_ERROR
    assert "is no trace" in capsys.readouterr().err


def test_the_trace_of_evaluate_tells_runs_and_prompts_apart(tmp_path: Path) -> None:
    prompts, trace = tmp_path / "p.jsonl", tmp_path / "trace.json"
    prompts.write_text("".join(json.dumps({"id": name, "prompt": f"question {name}"}) + "\n" for name in "ab"))
    arguments = ["--recipe", write_recipe(tmp_path / "recipe"), "--prompts", prompts, "--out", tmp_path / "out"]
    arguments += ["--modes", "ar,sd", "--max-new-tokens", "8", "--trace", trace]
    assert run_command(evaluate.main, list(map(str, arguments))) == 0
    events = read(trace)
    answered = [(e.arguments["run"], e.arguments["prompt"]) for e in events if e.name == "answer"]
    assert sorted(answered) == [("ar", "a"), ("ar", "b"), ("sd", "a"), ("sd", "b")]
    assert sum(event.name == "verify" for event in events) >= 4


def test_a_file_that_cannot_be_written_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--trace"), recording(str(tmp_path)):
        pytest.fail("the recording started")
