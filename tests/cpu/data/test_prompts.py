"""Prompts come as an even mix, each once; and the shipped ones stand in no shipped corpus."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from data.chat.conversations import Conversation, DataError, read_conversations
from data.prompts import Prompt, overlap, overlap_by_prompt, read_prompts

DATA = Path(__file__).parents[3] / "data"
SHIPPED = sorted((DATA / "prompts").glob("*.jsonl"))
MEASURING = sorted(
    (DATA.parents[1] / "shared" / "prompts").glob("*.jsonl")
)  # question sets beside the project, where they are
CORPORA = sorted(path for path in (DATA / "corpora").glob("*") if path.is_dir() and any(path.glob("*.parquet")))


def write_prompts(path: Path, *ids: str) -> Path:
    rows = ({"id": name, "messages": [{"role": "user", "content": f"Question {name}?"}]} for name in ids)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_files_take_turns(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.jsonl", "a1", "a2", "a3", "a4")
    second = write_prompts(tmp_path / "b.jsonl", "b1", "b2")
    third = write_prompts(tmp_path / "c.jsonl", "c1", "c2", "c3")
    prompts = read_prompts([first, second, third], 5)
    assert [prompt.id for prompt in prompts] == ["a1", "b1", "c1", "a2", "b2"]
    assert prompts[1] == Prompt("b1", asked("Question b1?"))
    assert [prompt.id for prompt in read_prompts([first, second, third])] == [
        "a1",
        "b1",
        "c1",
        "a2",
        "b2",
        "c2",
        "a3",
        "c3",
        "a4",
    ]


def test_asking_for_more_than_there_are_gives_all_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_prompts(tmp_path / "a.jsonl", "a1", "a2")
    with caplog.at_level(logging.WARNING):
        assert len(read_prompts([path], 2)) == 2
        assert not caplog.records
        assert len(read_prompts([path], 10)) == 2
    assert caplog.messages == ["10 prompts were asked for, the files hold 2: taking all of them"]


def test_prompt_rows_and_answers_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"prompt": "x"},
        {"id": "m", "messages": turns},
        {"id": "n", "messages": [*turns, {"role": "user", "content": "c"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [len(prompt.messages) for prompt in read_prompts([path])] == [1, 1, 3]
    assert read_prompts([path])[0] == Prompt(f"{path}:1", asked("x"))


def test_bad_prompt_sets_are_named(tmp_path: Path) -> None:
    twice = write_prompts(tmp_path / "a.jsonl", "x", "y", "x")
    with pytest.raises(DataError, match=r"a\.jsonl:3: the id 'x' stands at .*a\.jsonl:1 already"):
        read_prompts([twice])
    other = write_prompts(tmp_path / "b.jsonl", "z")
    with pytest.raises(DataError, match="the id 'z' stands at .* already"):
        read_prompts([other, other])
    with pytest.raises(DataError, match="no prompt files"):
        read_prompts([])
    with pytest.raises(DataError, match="num_prompts = 0"):
        read_prompts([other], 0)
    answer = tmp_path / "c.jsonl"
    answer.write_text('{"messages": [{"role": "assistant", "content": "b"}]}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:1: the row holds no question"):
        read_prompts([answer])


def test_overlap_finds_shared_runs_of_words_and_whole_short_prompts() -> None:
    long = "Why does the moon look larger when it is close to the horizon?"
    prompts = [Prompt("long", asked(long)), Prompt("short", asked("What is rust?"))]

    def corpus(question: str, answer: str = "") -> list[Conversation]:
        return [Conversation("c", (*asked(question), {"role": "assistant", "content": answer}), False, "c.jsonl:1")]

    eight = overlap(prompts, corpus("Tell me, WHY does the moon look larger, when it sets?"))
    assert len(eight) == 1 and eight[0][:3] == ("long", "c", "c.jsonl:1")
    assert eight[0].words == "why does the moon look larger when it"
    assert overlap(prompts, corpus("Why does the moon look larger when she sets?")) == []  # seven words in a row
    assert overlap(prompts, corpus("Why does the moon look larger when she sets?"), n=7) != []
    assert overlap(prompts, corpus("what is Rust")) == [("short", "c", "c.jsonl:1", "what is rust")]
    assert overlap(prompts, corpus("What is rust made of?")) == []
    assert overlap(prompts, corpus("Hello", answer=long)) == []  # an answer is no question


def test_overlap_by_prompt_says_how_much_of_each_is_there() -> None:
    prompts = [
        Prompt("half", asked("a b c d e f g h i j")),
        Prompt("whole", asked("one two three")),
        Prompt("none", asked("x y z")),
    ]
    corpus = [
        Conversation("1", asked("A b c d e f g h!"), False, "c:1"),
        Conversation("2", asked("b c d e f g h i"), False, "c:2"),
        Conversation("3", (*asked("One, two, three?"), {"role": "assistant", "content": "x y z"}), False, "c:3"),
    ]
    whole, half = overlap_by_prompt(prompts, corpus)
    assert whole == ("whole", True, 1.0, "c:3", "one two three")
    assert half == ("half", False, 2 / 3, "c:1", "a b c d e f g h")


def test_shipped_prompts_are_distinct_and_many() -> None:
    prompts = read_prompts(SHIPPED)
    assert len(SHIPPED) >= 3 and len(prompts) >= 72
    for prompt in prompts:
        rest = [Conversation(other.id, other.messages, False, other.id) for other in prompts if other.id != prompt.id]
        assert overlap([prompt], rest, n=12) == []


@pytest.mark.skipif(not CORPORA, reason="no corpus lies under data/corpora")
def test_prompts_to_measure_on_stand_in_no_shipped_corpus() -> None:
    prompts = read_prompts([*SHIPPED, *MEASURING])
    for corpus in CORPORA:
        assert overlap(prompts, read_conversations(corpus)) == []
