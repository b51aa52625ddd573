"""Every layout reads to the same record, and every mistake is reported with its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.chat.conversations import Conversation, DataError, read_conversations
from data.chat.messages import stored

CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4 😀"},
)
OPENAI = {"id": "a", "messages": list(CHAT)}
SHAREGPT = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is 2 + 2?"},
        {"from": "gpt", "value": "4 😀"},
    ],
}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT], ids=["openai", "sharegpt"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "lines.json", "parquet"])
def test_every_layout_in_every_file_type_reads_the_same(tmp_path: Path, row: dict[str, object], kind: str) -> None:
    path = tmp_path / f"chats.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif kind == "json":
        path.write_text(json.dumps([row]), encoding="utf-8")
    else:
        write_lines(path, row)
    assert read_conversations(path) == [Conversation("a", CHAT, False, f"{path}:1")]


def test_prompt_rows_become_one_question(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "Hello?"})
    assert read_conversations(path) == [
        Conversation(f"{path}:1", ({"role": "user", "content": "Hello?"},), False, f"{path}:1")
    ]


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "no", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is dry.", "weight": 0},
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_thinking_and_weights_read_the_same_from_every_layout(tmp_path: Path, kind: str) -> None:
    """Arguments as an object or as JSON, calls and tools as lists or as JSON, content parts, and the empty fields of
    Parquet.
    """
    as_json = CALL | {"function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
    asks = {"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}]}
    calls = {"role": "assistant", "content": None, "tool_calls": [as_json], "reasoning": "hm"}
    expected = [Conversation("a", WITH_TOOLS, False, "c:1", (TOOL,))]
    path = tmp_path / f"c.{kind}"
    if kind == "parquet":
        rows = [{"id": "a", "messages": [stored(message) for message in WITH_TOOLS], "tools": json.dumps([TOOL])}]
        pq.write_table(pa.Table.from_pylist(rows), path)
        variants = [path]
    else:
        other = write_lines(
            tmp_path / "d.jsonl", {"id": "a", "messages": [asks, calls, *WITH_TOOLS[2:]], "tools": [TOOL["function"]]}
        )
        variants = [write_lines(path, {"id": "a", "messages": list(WITH_TOOLS), "tools": [TOOL]}), other]
    for variant in variants:
        assert [c._replace(source="c:1") for c in read_conversations(variant)] == expected


def test_sharegpt_function_calls_become_tool_calls(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Lima"}}'},
        {"from": "observation", "value": "no"},
    ]
    (conversation,) = read_conversations(write_lines(tmp_path / "c.jsonl", {"conversations": turns}))
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool"]
    assert conversation.messages[1]["tool_calls"] == [{key: CALL[key] for key in ("type", "function")}]


def test_rows_in_no_known_form_can_be_collected_in_place_of_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", {"prompt": "a"}, {"question": "b"}, {"prompt": "c"})
    rejected: list[str] = []
    assert [c.messages[0]["content"] for c in read_conversations(path, rejected=rejected)] == ["a", "c"]
    assert len(rejected) == 1 and rejected[0].startswith(f"{path}:2: the row is in no known layout")


def test_finish_reason_length_marks_a_cut_answer(tmp_path: Path) -> None:
    rows = [OPENAI | {"finish_reason": reason} for reason in ("length", "stop", None)]
    assert [c.truncated for c in read_conversations(write_lines(tmp_path / "c.jsonl", *rows))] == [True, False, False]


def test_parquet_columns_of_other_layouts_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "mixed.parquet"
    rows = [{"id": "1", "messages": None, "prompt": "One?"}, {"id": "2", "messages": list(CHAT), "prompt": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert [(c.id, len(c.messages), c.source) for c in read_conversations(path)] == [
        ("1", 1, f"{path}:1"),
        ("2", 3, f"{path}:2"),
    ]


def test_lines_are_counted_with_the_blank_ones_and_rows_need_no_common_schema(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"id": 7, "prompt": "a"}\n\n   \n'
        '{"id": "x", "messages": [{"role": "user", "content": "b"}], "extra": {"k": 1}}\n'
    )
    assert [(c.id, c.source) for c in read_conversations(path)] == [("7", f"{path}:1"), ("x", f"{path}:4")]


def test_rows_of_a_json_array_carry_the_line_they_start_on(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('\ufeff\n[ {"prompt": "a"},\n{"prompt":\n "b"}\n,\n\n{"prompt": "c"} ]\n', encoding="utf-8")
    assert [c.source for c in read_conversations(path)] == [f"{path}:2", f"{path}:3", f"{path}:7"]


def test_directory_is_read_in_order_of_names_without_its_manifest(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"prompt": "2"}, {"prompt": "3"})
    write_lines(tmp_path / "a.jsonl", {"prompt": "1"})
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    (tmp_path / "README.md").write_text("notes")
    assert [c.messages[0]["content"] for c in read_conversations(tmp_path)] == ["1", "2", "3"]
    assert [c.messages[0]["content"] for c in read_conversations(tmp_path, limit=2)] == ["1", "2"]


def test_limit_stops_before_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n')
    assert len(read_conversations(path, limit=1)) == 1


def test_reading_parquet_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": str(i)} for i in range(5)]), path)
    assert len(read_conversations(path)) == 5 and len(read_conversations(path, limit=2)) == 2
    assert not cache.exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        ('["a"]', "the row is a list"),
        ('{"question": "a", "answer": "b"}', "no known layout (it has 'question', 'answer')"),
        ("{}", "no known layout (it has no keys)"),
        ('{"messages": []}', "no known layout"),
        ('{"messages": "hello"}', "the messages are a str"),
        ('{"messages": ["hello"]}', "message 1 is a str"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
            "message 2 has content of type NoneType",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message 1 has content of type list"),
        ('{"prompt": 5}', "message 1 has content of type int"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "message 1 has the role 'wizard'"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "message 1 has the role ['user']"),
        ('{"messages": [{"content": "a"}]}', "message 1 has the role None"),
        ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}',
            "message 1 has a tool call without a name",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}',
            "calls f with arguments that are no JSON",
        ),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}', "message 1 has the weight 2"),
        ('{"prompt": "a", "tools": "{"}', "its tools are no JSON"),
        ('{"prompt": "a", "temperature": "hot"}', "its temperature is 'hot'"),
        ('{"prompt": "a", "tools": [{"type": "function"}]}', "a tool has no name"),
    ],
)
def test_a_bad_row_is_reported_with_its_file_and_line(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(DataError) as caught:
        read_conversations(path)
    assert f"{path}:3: " in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n{"prompt": "a"},\n{"prompt" "b"}]', 3),
        ('[\n{"prompt": "a"}\n\n{"prompt": "b"}]', 4),
        ('[{"prompt": "a"},\n', 2),
    ],
)
def test_a_bad_array_is_reported_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"bad.json:{line}: not valid JSON"):
        read_conversations(path)


def test_a_json_array_that_is_not_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(b'[\n{"prompt": "caf\xe9"}]')
    with pytest.raises(DataError, match="bad.json:2: not UTF-8"):
        read_conversations(path)


def test_missing_empty_and_unknown_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"no such file or directory: .*nothing\.jsonl"):
        read_conversations(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="no such file or directory: data/no-such-corpus"):
        read_conversations("data/no-such-corpus")  # two parts like a hub name, but data/ is a directory here
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no rows"):
        read_conversations(tmp_path / "empty.jsonl")
    (tmp_path / "table.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"table\.csv has an unknown file type '\.csv'"):
        read_conversations(tmp_path / "table.csv")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"broken\.parquet is not a readable Parquet file"):
        read_conversations(tmp_path / "broken.parquet")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"void holds no \.jsonl"):
        read_conversations(tmp_path / "void")
