"""Writing a corpus: what the target would answer, whatever the batch, once for each prompt, and no row lost or doubled
by a stop.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from data import synthesize
from data.chat.conversations import read_conversations
from data.chat.render import render_all
from data.manifest import check_files, read_manifest
from data.synthesis.generation import BatchGenerator, Continuation, Generated
from drafters.base.errors import run_command
from drafters.targets.target import Target, load_target
from tests.tiny import tiny_model, tiny_tokenizer

NEW, END = 12, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target, made to end about every tenth token."""
    path, model = tmp_path_factory.mktemp("synthesize") / "target", tiny_model()
    with torch.no_grad():
        model.lm_head.weight[END] *= 2
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return load_target(str(directory), "float32")


def _asks(temperature: float = 0.0) -> list[Continuation]:
    """Eight, of different lengths; the longest answers need slots when others have ended."""
    random = torch.Generator().manual_seed(4)
    lengths, most = (3, 17, 1, 9, 30, 2, 5, 12), (16, 4, 9, 16, 1, 16, 7, 12)
    prompts = [tuple(torch.randint(3, 259, (n,), generator=random).tolist()) for n in lengths]
    return [
        Continuation(str(i), p, temperature, m, seed=i) for i, (p, m) in enumerate(zip(prompts, most, strict=True))
    ]


def _answers(target: Target, batch_size: int, asks: list[Continuation]) -> dict[str, Generated]:
    generator = BatchGenerator(target, batch_size, max_tokens=48)
    answers = list(generator.run(asks))
    generator.engine.check()
    assert len(answers) == len(asks)
    return {answer.key: answer for answer in answers}


def test_greedy_answers_are_what_transformers_generates(target: Target, directory: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = _answers(target, 3, _asks())
    for ask in _asks():
        prompt = torch.tensor([ask.prompt_ids])
        out = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ask.max_new_tokens, do_sample=False
        )
        expected = out[0, len(ask.prompt_ids) :].tolist()
        assert answers[ask.key].token_ids == tuple(expected) and answers[ask.key].ended == (expected[-1] == END)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_the_batch(target: Target, temperature: float) -> None:
    alone = _answers(target, 1, _asks(temperature))
    assert alone == _answers(target, 3, _asks(temperature)) == _answers(target, 8, list(reversed(_asks(temperature))))
    assert temperature == 0 or any(alone[key] != answer for key, answer in _answers(target, 8, _asks()).items()), (
        "never sampled"
    )


def test_a_pool_that_other_answers_used_gives_the_same_ones(target: Target) -> None:
    generator = BatchGenerator(target, 4, max_tokens=48)
    first = {answer.key: answer for answer in generator.run(_asks())}
    assert first == {answer.key: answer for answer in generator.run(_asks())}


def test_an_end_token_ends_an_answer(target: Target) -> None:
    answers = [*_answers(target, 8, _asks()).values(), *_answers(target, 8, _asks(temperature=1.0)).values()]
    assert 0 < sum(answer.ended for answer in answers) < len(answers)
    assert all(
        answer.ended == (answer.token_ids[-1] == END) and END not in answer.token_ids[:-1] for answer in answers
    )


def _run(directory: Path, out: Path, *options: str) -> int:
    common = [
        "--target",
        str(directory),
        "--out",
        str(out),
        "--dtype",
        "float32",
        "--max-new-tokens",
        str(NEW),
        "--batch-size",
        "4",
    ]
    return run_command(synthesize.main, [*common, *options])


def _rows(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out / "corpus.parquet").to_pylist()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p-{i:02d}", "prompt": f"Question {i}?"}) + "\n" for i in range(10)))
    return path


@pytest.fixture(scope="module")
def whole(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over self-written prompts that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert _run(directory, out, "--response-tokens", "900") == 0
    return out


def test_a_corpus_is_complete_and_can_be_trained_on(whole: Path, target: Target) -> None:
    rows, manifest = _rows(whole), read_manifest(whole)
    check_files(whole, manifest)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows}) and len(rows) >= 4
    assert {row["temperature"] for row in rows} == {0.0, 0.8}
    assert all(
        0 < row["tokens"] <= NEW and (row["finish_reason"] == "length") <= (row["tokens"] == NEW) for row in rows
    )
    assert (manifest.num_rows, manifest.num_response_tokens) == (len(rows), sum(row["tokens"] for row in rows))
    assert manifest.num_truncated == sum(row["finish_reason"] == "length" for row in rows)
    assert (manifest.target_weight_hash, manifest.template_hash) == (
        target.facts.weight_hash,
        target.facts.template_hash,
    )
    rendered = render_all(read_conversations(whole / "corpus.parquet"), target.tokenizer)
    assert len(rendered.examples) == len(rows) and not rendered.rejected


def test_the_target_itself_wrote_the_rest_of_some_prompts(whole: Path) -> None:
    written = [json.loads(line) for line in (whole / "work" / "prompts-0.jsonl").read_text().splitlines()]
    by_id = {row["id"]: row["messages"][0]["content"] for row in _rows(whole)}
    assert any(line["key"] in by_id for line in written)
    assert all(by_id[line["key"]].endswith(line["text"].strip()) for line in written if line["key"] in by_id)
    assert not any(line["key"] in by_id for line in written if not line["ended"]), (
        "a turn that never ended is no prompt"
    )


def test_a_greedy_row_is_what_the_target_answers(whole: Path, target: Target, directory: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    row = next(row for row in _rows(whole) if row["temperature"] == 0.0)
    asked = target.tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = plain.generate(**asked, max_new_tokens=NEW, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert target.tokenizer.decode(out[:-1] if out[-1] == END else out) == row["messages"][1]["content"]


@pytest.mark.parametrize("after", [1, 5])
def test_an_interrupted_run_goes_on_to_the_same_corpus(
    whole: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Ctrl-C after a number of answers; then a line that a kill cut short."""
    plain_run, left = BatchGenerator.run, [after]

    def interrupted(self: BatchGenerator, asks: Iterable[Continuation]) -> Iterator[Generated]:
        for answer in plain_run(self, asks):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(BatchGenerator, "run", interrupted)
        assert _run(directory, tmp_path, "--response-tokens", "900") == 130
    assert not (tmp_path / "corpus.parquet").exists()
    for file in (tmp_path / "work").glob("*.jsonl"):
        with file.open("a", encoding="utf-8") as out:
            out.write('{"key": "0-0000')
    assert _run(directory, tmp_path, "--response-tokens", "900") == 0
    assert _rows(tmp_path) == _rows(whole)
    assert read_manifest(tmp_path) == read_manifest(whole)


def test_a_run_stops_when_the_tokens_are_there_and_again_adds_nothing(
    directory: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--prompts", str(prompts), "--response-tokens", "30"]
    assert _run(directory, tmp_path, *options) == 0
    rows = _rows(tmp_path)
    assert 30 <= sum(row["tokens"] for row in rows) < 30 + NEW and len(rows) < 10
    assert _run(directory, tmp_path, *options) == 0
    assert _rows(tmp_path) == rows


def test_shards_are_put_together_by_merge(
    directory: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", str(prompts), "--response-tokens", "1000"]
    for shard in ("0/2", "1/2"):
        assert _run(directory, tmp_path / "two", *options, "--shard", shard) == 0
        assert "--merge" in capsys.readouterr().out and not (tmp_path / "two" / "corpus.parquet").exists()
    assert _run(directory, tmp_path / "two", *options, "--merge") == 0
    assert _run(directory, tmp_path / "one", *options) == 0
    merged, single = _rows(tmp_path / "two"), {row["id"]: row for row in _rows(tmp_path / "one")}
    assert [row["id"] for row in merged] == [f"p-{i:02d}" for i in range(10)]
    alike = [row for row in merged if row["temperature"] == single[row["id"]]["temperature"]]
    assert len(alike) >= 4 and all(row == single[row["id"]] for row in alike)
    check_files(tmp_path / "two", read_manifest(tmp_path / "two"))


def test_a_run_that_was_begun_otherwise_is_refused(
    directory: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", str(prompts), "--response-tokens", "20"]
    assert _run(directory, tmp_path, *options) == 0
    rows = _rows(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "prompt": "Something else?"}\n')
    for change, said in (
        (["--seed", "1"], "was begun with seed = 0, this command has 1: give the same, or another --out"),
        (["--max-new-tokens", "5"], "max_new_tokens = 12, this command has 5"),
        (["--prompts", str(other)], "prompts = "),
        (["--shard", "0/2"], "shards = 1, this command has 2"),
        (["--enable-thinking", "true"], "template_options = {}, this command has {'enable_thinking': True}"),
    ):
        assert _run(directory, tmp_path, *options, *change) == 2
        assert said in capsys.readouterr().err
    assert _rows(tmp_path) == rows
    assert _run(directory, tmp_path, *options[:3], "60", "--batch-size", "3") == 0  # more tokens, in other batches
    assert len(_rows(tmp_path)) > len(rows)


def test_work_of_a_run_without_settings_goes_on_with_a_warning(
    whole: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "work", tmp_path / "work")
    (tmp_path / "work" / "settings.json").unlink()
    assert _run(directory, tmp_path, "--response-tokens", "900") == 0
    assert "holds lines of a run that kept no settings" in capsys.readouterr().out
    assert _rows(tmp_path) == _rows(whole)


def test_conversations_are_answered_turn_by_turn(directory: Path, target: Target, tmp_path: Path) -> None:
    """Each answer is the target's to what it said before, not to the answers that the file holds; a stop loses no
    turn.
    """
    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for name in "abcdef":
            turns = [
                ("user", f"One {name}?"),
                ("assistant", "No."),
                ("user", "Two?"),
                ("assistant", "No."),
                ("user", "Three?"),
            ]
            print(
                json.dumps({"id": name, "messages": [{"role": role, "content": text} for role, text in turns]}),
                file=file,
            )
    assert _run(directory, tmp_path / "out", "--prompts", str(chats)) == 0
    rows = _rows(tmp_path / "out")
    assert [row["id"] for row in rows] == list("abcdef")
    longest: list[dict[str, str]] = max((row["messages"] for row in rows if row["temperature"] == 0.0), key=len)
    for index in range(1, len(longest), 2):
        asked = target.tokenizer.apply_chat_template(
            longest[:index], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = plain.generate(**asked, max_new_tokens=NEW, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert target.tokenizer.decode(out[:-1] if out[-1] == END else out) == longest[index]["content"]
    assert max(len(row["messages"]) for row in rows) > 2, "no conversation went on to its second turn"
    kept = (tmp_path / "out" / "work" / "turns-0.jsonl").read_text().splitlines(keepends=True)
    said_nothing = {line["key"] for line in map(json.loads, kept) if not line["message"]["content"]}
    short = [row for row in rows if len(row["messages"]) < 6]
    assert all(row["finish_reason"] == "length" or row["id"] in said_nothing for row in short)
    (tmp_path / "out" / "work" / "turns-0.jsonl").write_text("".join(kept[:4]))
    (tmp_path / "out" / "work" / "answers-0.jsonl").write_text("")
    assert _run(directory, tmp_path / "out", "--prompts", str(chats)) == 0
    assert _rows(tmp_path / "out") == rows


def test_sigterm_keeps_what_is_finished(
    directory: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_run = BatchGenerator.run

    def terminated(self: BatchGenerator, asks: Iterable[Continuation]) -> Iterator[Generated]:
        for count, answer in enumerate(plain_run(self, asks)):
            if count == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield answer

    monkeypatch.setattr(BatchGenerator, "run", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert _run(directory, tmp_path, "--prompts", str(prompts)) == 130
    assert signal.getsignal(signal.SIGTERM) is before and capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert len((tmp_path / "work" / "answers-0.jsonl").read_text().splitlines()) == 2
    assert _run(directory, tmp_path, "--merge") == 2 and "is not complete" in capsys.readouterr().err
    assert _run(directory, tmp_path, "--merge", "--incomplete") == 0 and len(_rows(tmp_path)) == 2


def test_long_prompts_are_left_out_and_named(
    directory: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"id": "long", "prompt": "word " * 100}) + "\n")
    assert _run(directory, tmp_path, "--prompts", str(prompts), str(long), "--max-prompt-tokens", "100") == 0
    assert "left out: long: its prompt has " in capsys.readouterr().out
    assert len(_rows(tmp_path)) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "2/2"], "--shard '2/2': write I/N with I below N"),
        (["--response-tokens", "0"], "--response-tokens 0: has to be at least 1"),
        (["--batch-size", "0"], "--batch-size 0: has to be at least 1"),
        (["--max-new-tokens", "-1"], "--max-new-tokens -1: has to be at least 1"),
        (["--prompts", "nowhere.jsonl", "--target", "/nowhere"], "nowhere.jsonl"),  # before the target is looked for
        (["--exclude", "nowhere.jsonl", "--target", "/nowhere"], "nowhere.jsonl"),
        (["--enable-thinking", "maybe"], "'maybe' is neither true nor false"),
        (["--tools", "nowhere.json"], "template.tools = nowhere.json: no such file"),
        (["--server", "http://127.0.0.1:9"], "--server needs --prompts FILE"),
        (["--target", "./nowhere"], "target './nowhere' is neither a directory"),
        (["--merge"], "run the command without --merge first"),
    ],
)
def test_a_bad_option_is_one_line(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert _run(directory, tmp_path, *options) == 2
    lines = capsys.readouterr().err.splitlines()  # progress of loading may stand above
    assert lines[-1].startswith("error: ") and message in lines[-1] and "Traceback" not in "".join(lines)
