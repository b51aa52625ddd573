"""`data.inspection` shows the mask in colour, counts, reasons by file and line, coverage, overlap; the command's old
name warns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.chat.conversations import Conversation
from data.chat.render import Example, render
from data.inspection import coloured, count, main
from data.synthesis.generation import BatchGenerator, Continuation
from data.synthesis.work_directory import mark_complete
from data.target_check import top1_share
from drafters.base.errors import run_command
from drafters.targets.target import load_target
from tests.chat_templates import CHATML, tokenizer_of
from tests.cpu.data.test_merge import put_together, row, write_run
from tests.tiny import save_tiny_drafter, save_tiny_target

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def chat(*texts: str, **more: object) -> dict[str, object]:
    return {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)],
        **more,
    }


def test_answers_are_green_and_marked() -> None:
    tokenizer = tokenizer_of(CHATML)
    messages = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "é!"},
        {"role": "user", "content": "B"},
    )
    example = render(
        Conversation("c", (*messages, {"role": "assistant", "content": "C"}), False, "c:1"), tokenizer
    ).examples[0]
    text = coloured(example, tokenizer)
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        text.plain
        == f"{start}[1>é!<|im_end|><1]\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n[2>C<|im_end|><2]\n"
    )
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    grey = "".join(text.plain[span.start : span.end] for span in text.spans if "grey" in str(span.style))
    assert green == "é!<|im_end|>C<|im_end|>" and grey + green != "" and "assistant" in grey and "é" not in grey
    styles = [str(span.style) for span in text.spans if "magenta" not in str(span.style)]
    assert all(a != b for a, b in zip(styles, styles[1:], strict=False)), "neighbouring tokens have one shade"


def test_counts() -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    plain = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    conversations = [
        Conversation("1", plain, True, "c:1", temperature=0.8),
        Conversation("2", ({"role": "system", "content": "s"}, *plain, *plain), False, "c:2", temperature=0.0),
        Conversation(
            "3", (plain[0], {"role": "assistant", "content": "", "tool_calls": call}), False, "c:3", temperature=0.8
        ),
        Conversation("4", (plain[0], {"role": "assistant", "content": "<think>x</think>y"}), False, "c:4"),
    ]
    counts = count(conversations)
    assert (counts.conversations, counts.truncated, counts.answers) == (4, 1, 5)
    assert counts.kinds == {"a system message": 1, "several answers": 1, "tools": 1, "thinking": 1}
    assert counts.temperatures == {"0": 1, "0.8": 2, "unknown": 1}


def test_everything_is_shown(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, prompts = tmp_path / "chats.jsonl", tmp_path / "prompts.jsonl"
    rows = [
        chat("Hi there", "Yo", temperature=0.0),
        {"question": "no layout"},
        chat("no answer"),
        chat("What is one plus one plus one plus one?", "Four", finish_reason="length", temperature=0.8),
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in rows))
    prompts.write_text(
        '{"id": "sum", "prompt": "what is one plus one plus one plus one"}\n{"id": "other", "prompt": "Why?"}\n'
    )
    command = ["--target", str(target), str(data), "--show", "1", "--draft-vocab-size", "4"]
    assert run_command(main, [*command, "--against", str(prompts)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for expected in (
        "assistant [1>Yo<|im_end|><1]",
        "conversations 3, 1 of them left out",
        "truncated 1 (33.3%)",
        "temperatures 0: 33.3%, 0.8: 33.3%, unknown: 33.3%",
        "examples 2, with 2 of 2 answers",
        "learnt from 7 tokens",  # Y o end, F o u r
        f"rows that cannot be read: 1 {data}:2: the row is in no known layout",
        f"conversations that are left out: 1 {data}:3: no assistant turn to learn from",
        "6 different tokens are learnt from; a vocabulary of 4: 71.43%",  # o twice, and three of the five others
        "overlap: 1 of 2 prompts share eight words in a row, 1 stand there whole sum (whole) at",
        f"warning: {data} has no manifest.json: make sure that {target} itself wrote its answers",
    ):
        assert expected in out, out
    assert "Four" not in out.split("conversations 3")[0], "more examples than were asked for"
    drafter = save_tiny_drafter(tmp_path / "tiny-eagle3", load_target(str(target), "float32"), draft_vocab_size=259)
    assert run_command(main, [*command, "--drafter", str(drafter)]) == 0
    assert "tiny-eagle3: its 259 cover 100.00%" in capsys.readouterr().out


def test_a_corpus_of_another_target_is_named(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [row("0-1", "A?")])
    mark_complete(run / "work", 0, True)
    put_together(tmp_path / "out", run)
    assert run_command(main, ["--target", str(target), str(tmp_path / "out")]) == 0
    assert "was written with target weights of hash w (T)" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "out" / "corpus.parquet").write_bytes(b"PAR1")
    assert run_command(main, ["--target", str(target), str(tmp_path / "out")]) == 2
    assert "corpus.parquet" in capsys.readouterr().err


def test_the_probe_knows_the_targets_own_text(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_target(str(target), "float32")
    asks = [Continuation(str(i), tuple(range(3 + i, 20 + i)), 0.0, 16, seed=0) for i in range(4)]
    examples = []
    for answer in BatchGenerator(loaded, 4, 64).run(asks):
        prompt = list(asks[int(answer.key)].prompt_ids)
        turn_ids = [0] * len(prompt) + [1] * len(answer.token_ids)
        examples.append(Example(answer.key, prompt + list(answer.token_ids), turn_ids))
    assert top1_share(loaded, examples) == (sum(sum(example.turn_ids) for example in examples), 1.0)
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(
        "".join(json.dumps(chat(f"Question {i}?", "Certainly not.", temperature=0.8)) + "\n" for i in range(3))
    )
    assert run_command(main, ["--target", str(target), str(foreign), "--probe", "2"]) == 0
    line = capsys.readouterr().out.split("own choice\n")[1].splitlines()[0]
    assert line.startswith("  temperature 0.8: ") and line.endswith(
        f" of 30: has {target} written them, in this thinking mode?"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["DATA", "--against", "nowhere.jsonl"], "nowhere.jsonl"),
        (["DATA", "--target", "/nowhere"], "target '/nowhere' is neither a directory"),
        (["DATA", "--shwo", "1"], "unrecognized arguments: --shwo"),
        (["DATA", "--drafter", "/nowhere"], "--drafter /nowhere: no model.safetensors there"),
        (["BAD"], "no row can be read; the first one: "),
    ],
)
def test_a_bad_option_is_one_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "DATA").write_text(json.dumps(chat("a", "b")))
    (tmp_path / "DATA").rename(tmp_path / "data.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n')
    names = {"DATA": str(tmp_path / "data.jsonl"), "BAD": str(tmp_path / "bad.jsonl")}
    assert run_command(main, ["--target", str(target), *(names.get(option, option) for option in options)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with data/ on its path, where data/inspect.py stands before the standard library's module."""
    path = os.pathsep.join((str(ROOT / "data"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_old_name_of_the_command_does_not_hide_the_standard_library() -> None:
    done = run_python("-c", "import inspect, dataclasses; print(inspect.signature(len))")
    assert done.stdout.startswith("(obj, /)")


@pytest.mark.parametrize(
    ("command", "warns"),
    [
        (["-m", "data.inspection"], False),
        (["-m", "data.inspect"], True),
        ([str(ROOT / "data" / "inspection.py")], False),
        ([str(ROOT / "data" / "inspect.py")], True),
    ],
)
def test_the_old_name_of_the_command_warns(command: list[str], warns: bool) -> None:
    done = run_python(*command, "--help")
    assert done.stdout.startswith("usage: python -m data.inspection ")
    assert done.stderr == (
        "warning: `python -m data.inspect` is now `python -m data.inspection`; the next version drops the old name\n"
        if warns
        else ""
    )
