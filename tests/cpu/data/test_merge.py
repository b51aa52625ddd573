"""Merging runs: each conversation once, none that shares words with a measuring prompt, a manifest of all runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data.chat.conversations import read_conversations
from data.manifest import Manifest, check_files, read_manifest
from data.prompts import Prompt
from data.synthesis import merge as merging
from data.synthesis.merge import merge
from data.synthesis.work_directory import RunSettings, mark_complete, store_settings
from drafters.base.errors import UserError
from drafters.targets.identity import TargetIdentity

TARGET = TargetIdentity("w", "k", "t")
QUESTION = "Why does the moon look larger when it is close to the horizon?"


def row(name: str, question: str, tokens: int = 5, temperature: float = 0.0, cut: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"About {question}"}]
    reason = "length" if cut else "stop"
    return {
        "id": name,
        "messages": messages,
        "finish_reason": reason,
        "subject": "code",
        "temperature": temperature,
        "tokens": tokens,
    }


def write_run(
    path: Path, *shards: list[dict[str, Any]], seed: int | None = 0, complete: bool = True, **changes: Any
) -> Path:
    """Work files as a run leaves them, one list of rows for each shard; with `seed` None of a run that kept no
    settings.
    """
    work = path / "work"
    if seed is not None:
        store_settings(work, run_settings(seed=seed, shards=len(shards), **changes), print)
    work.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(shards):
        (work / f"answers-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        mark_complete(work, number, complete)
    return path


def run_settings(**changes: Any) -> RunSettings:
    usual: dict[str, Any] = {
        "target": "T",
        "target_weight_hash": "w",
        "tokenizer_hash": "k",
        "template_hash": "t",
        "seed": 0,
        "temperatures": (0.0, 0.8),
        "prompt_temperature": 0.8,
        "max_new_tokens": 9,
        "max_prompt_tokens": 64,
        "dtype": "float32",
        "prompts": "",
        "prompt_source": "self-prompted",
        "shards": 1,
    }
    return RunSettings(**(usual | changes))


def put_together(
    out: Path, *paths: Path, prompts: list[Prompt] | None = None, incomplete: bool = False
) -> tuple[Manifest, list[str]]:
    said: list[str] = []
    return merge("T", paths, out, prompts or [], lambda: TARGET, said.append, incomplete), said


def ids(out: Path) -> list[str]:
    return [conversation.id for conversation in read_conversations(out)]


def test_shards_and_runs_are_put_together_without_doubles(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [row("0-2", "B?", 7, 0.8, cut=True)], [row("0-1", "A?", 3)])
    second = write_run(tmp_path / "b", [row("1-1", "A?", 3), row("1-2", "C?", 9, cut=True)], seed=1, max_new_tokens=12)
    manifest, said = put_together(tmp_path / "out", first, second)
    assert ids(tmp_path / "out") == ["0-1", "0-2", "1-2"]
    assert (manifest.num_rows, manifest.num_response_tokens, manifest.num_truncated) == (3, 19, 2)
    assert [(run.seed, run.sampling.temperatures, run.sampling.max_new_tokens) for run in manifest.runs] == [
        (0, (0.0, 0.8), 9),
        (1, (0.0, 0.8), 12),
    ]
    assert (manifest.seed, manifest.sampling.temperatures, manifest.sampling.max_new_tokens) == (0, (0.0, 0.8), 12)
    assert manifest.target_weight_hash == "w" and read_manifest(tmp_path / "out") == manifest
    check_files(tmp_path / "out", manifest)
    assert said[-1] == "left out: 1 that stood twice, 0 that share words with a measuring prompt"


def test_a_finished_corpus_grows_in_its_place_and_old_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keeper = tmp_path / "out", tmp_path / "out" / "notes.txt"
    put_together(out, write_run(tmp_path / "a", [row(f"0-{i}", f"{i}?") for i in range(5)]))
    keeper.write_text("mine")
    before = pq.read_table(out / "corpus.parquet").to_pylist()
    monkeypatch.setattr(merging, "PART_BYTES", 500)
    manifest, _ = put_together(out, out, write_run(tmp_path / "b", [row("1-0", "new?")], seed=1))
    assert len(manifest.files) > 1 and sorted(manifest.files) == sorted(p.name for p in out.glob("*.parquet"))
    assert not list(out.glob(".*")) and keeper.read_text() == "mine"
    assert [r for name in sorted(manifest.files) for r in pq.read_table(out / name).to_pylist()][:5] == before
    assert ids(out)[5:] == ["1-0"] and [run.seed for run in manifest.runs] == [0, 1]
    monkeypatch.undo()
    again, _ = put_together(out, out)
    assert (
        list(again.files) == ["corpus.parquet"] == [p.name for p in out.glob("*.parquet")]
        and again.runs == manifest.runs
    )


def test_a_corpus_that_others_were_added_to_keeps_them(tmp_path: Path) -> None:
    """The directory of a run holds its work and the corpus that grew there; other answers to one question have ids of
    their own.
    """
    out = write_run(tmp_path / "out", [row("p1", "A?"), row("p2", "B?")])
    put_together(out, out)
    answered = row("p1", "A?")
    answered["messages"][1]["content"] = "Another answer"
    put_together(out, out, write_run(tmp_path / "b", [answered, row("p2", "B?")], seed=1))
    assert ids(out) == ["p1", "p1~2", "p2"]
    manifest, _ = put_together(out, out, write_run(tmp_path / "c", [row("p3", "C?")], seed=2))
    assert ids(out) == ["p1", "p1~2", "p2", "p3"] and [run.seed for run in manifest.runs] == [0, 1, 2]
    (out / "corpus.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="corpus.parquet has SHA-256"):
        put_together(out, out)


def test_measuring_prompts_are_kept_out_and_named(tmp_path: Path) -> None:
    prompts = [Prompt("moon", ({"role": "user", "content": QUESTION},))]
    rows = [
        row("0-1", "Tell me: " + QUESTION.upper()),
        row("0-2", "What is rust?"),
        row("0-3", "Why does the moon look larger today?"),
    ]
    manifest, said = put_together(tmp_path / "out", write_run(tmp_path / "a", rows), prompts=prompts)
    assert ids(tmp_path / "out") == ["0-2", "0-3"] and manifest.num_rows == 2
    assert any("0-1 shares with moon: 'why does the moon look larger when it'" in line for line in said)


def test_a_run_still_being_written_is_left_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [row("3-1", "A?", 5), row("3-2", "B?", 8, 0.8)], seed=None)
    file = run / "work" / "answers-0.jsonl"
    with file.open("a") as out:
        out.write('{"id": "3-3", "mess')
    content = file.read_bytes()
    manifest, said = put_together(tmp_path / "out", run)
    assert ids(tmp_path / "out") == ["3-1", "3-2"] and file.read_bytes() == content
    assert "holds no settings: its target is taken to be --target, its 1 shard(s) to be complete" in said[0]
    (run_read,) = manifest.runs  # from its rows, as far as they show
    assert (run_read.seed, run_read.sampling.temperatures, run_read.sampling.max_new_tokens) == (3, (0.0, 0.8), 8)


def test_shards_that_are_not_complete_are_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [row("0-1", "A?")], [row("0-2", "B?")], complete=False)
    mark_complete(run / "work", 0, True)
    with pytest.raises(
        UserError,
        match=r"a/work: shard 1/2 is not complete \(2 rows are there\): let its command finish, or add --incomplete",
    ):
        put_together(tmp_path / "out", run)
    assert not (tmp_path / "out").exists()
    _, said = put_together(tmp_path / "out", run, incomplete=True)
    assert ids(tmp_path / "out") == ["0-1", "0-2"] and "taking what is there" in said[0]


def test_tools_and_calls_survive_the_corpus_and_its_growth(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}
    other = {"type": "function", "function": {"name": "clock", "arguments": {"zone": 5}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    rows = [row("0-1", "A?"), row("0-2", "B?"), row("0-3", "C?")]
    rows[1]["messages"].insert(1, {"role": "assistant", "content": "", "tool_calls": [call, other], "weight": 0})
    rows[1]["messages"].insert(2, {"role": "tool", "content": "rain"})
    rows[1]["tools"] = [tool]
    first = write_run(tmp_path / "a", rows)
    put_together(tmp_path / "out", first)
    put_together(tmp_path / "out", tmp_path / "out", first, write_run(tmp_path / "b", [row("1-1", "D?")], seed=1))
    read = {c.id: c for c in read_conversations(tmp_path / "out")}
    assert [(list(c.messages), list(c.tools)) for c in read.values()][:3] == [
        (r["messages"], r.get("tools", [])) for r in rows
    ]
    assert read["1-1"].tools == () and len(read) == 4


def test_different_targets_and_empty_directories_are_refused(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [row("0-1", "A?")])
    other = write_run(tmp_path / "b", [row("1-1", "B?")], template_hash="u")
    thinks = write_run(tmp_path / "d", [row("1-1", "B?")], template_options={"enable_thinking": True})
    with pytest.raises(UserError, match=r"written by different targets \(template_hash t and u\)"):
        put_together(tmp_path / "out", first, other)
    with pytest.raises(
        UserError, match=r"different chat template options \(enable_thinking was not given, is True now\)"
    ):
        put_together(tmp_path / "out", first, thinks)
    with pytest.raises(UserError, match="void/work holds no answers"):
        put_together(tmp_path / "out", tmp_path / "void")
    with pytest.raises(UserError, match="no row is left to write"):
        put_together(tmp_path / "out", write_run(tmp_path / "c", []))
    assert not (tmp_path / "out").exists()
