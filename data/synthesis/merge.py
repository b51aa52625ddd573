"""Merges the rows of several runs into one corpus: deduplicated, in Parquet parts, with a manifest of all runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data.chat.conversations import Conversation
from data.chat.messages import stored
from data.manifest import MANIFEST_NAME, Manifest, Run, Sampling, check_files, checksums, read_manifest, write_manifest
from data.prompts import Overlap, Prompt, shared_runs
from data.synthesis.work_directory import RunSettings, incomplete_shards, read_lines, read_settings
from drafters.base.errors import UserError
from drafters.base.files import atomic_write_group
from drafters.targets.identity import TargetIdentity
from drafters.targets.template import differences

Row = dict[str, Any]
PART_BYTES = 4_000_000  # of JSON in one Parquet part: just below a megabyte when compressed


class Source(NamedTuple):
    """Rows of one directory and their runs; the target's identity and template options, where they are stored."""

    path: Path
    rows: list[Row]
    runs: tuple[Run, ...]
    target: TargetIdentity | None
    template_options: dict[str, Any]


def merge(
    name: str,
    paths: Sequence[Path],
    out: Path,
    prompts: Sequence[Prompt],
    identify: Callable[[], TargetIdentity],
    say: Callable[[str], None],
    incomplete: bool = False,
) -> Manifest:
    """Write the rows of the directories `paths` (of a run, with `work/`, of a finished corpus, or both) to `out`,
    which may be one of them.

    `name` is the target, and `identify` computes its hashes where no directory holds them. Conversations that stand
    twice are taken once, those that share eight words in a row with a user turn of `prompts` not at all. Raises
    `UserError` where nothing is there, where different targets or template options wrote the rows, and where a shard
    has not said that it is complete, unless `incomplete` allows that.
    """
    sources = [source for path in paths for source in _read_sources(path, incomplete, say)]
    target = _one_target(sources, identify)
    rows, num_doubles = _distinct(row for source in sources for row in source.rows)
    rows, offenders = exclude(rows, prompts)
    for line in offenders:
        say(line)
    if not rows:
        raise UserError(f"{', '.join(map(str, paths))}: no row is left to write: has the run answered anything yet?")
    files = _write_parts(rows, out)
    manifest = _describe(name, target, sources, rows, checksums(out, files))
    write_manifest(out, manifest)
    say(
        f"{out}: {manifest.num_rows} conversations, {manifest.num_response_tokens} answer tokens, {len(files)} file(s)"
    )
    say(f"left out: {num_doubles} that stood twice, {len(offenders)} that share words with a measuring prompt")
    return manifest


def exclude(rows: Sequence[Row], prompts: Sequence[Prompt]) -> tuple[list[Row], list[str]]:
    """Rows without those whose user turns share eight words in a row with `prompts`, and a line about each that was
    left out.
    """
    if not prompts:
        return list(rows), []
    asked = [Conversation(str(i), tuple(row["messages"]), False, row["id"]) for i, row in enumerate(rows)]
    found: dict[int, Overlap] = {}
    for finding in shared_runs(prompts, asked):
        found.setdefault(int(finding.conversation_id), finding)
    lines = [f"{f.source} shares with {f.prompt_id}: {f.words!r}" for f in found.values()]
    return [row for i, row in enumerate(rows) if i not in found], lines


def _read_sources(path: Path, incomplete: bool, say: Callable[[str], None]) -> list[Source]:
    """What a directory holds: the work of a run, and a corpus, to which others may have been added since."""
    corpus = [_read_corpus(path)] if (path / MANIFEST_NAME).is_file() else []
    answers = sorted((path / "work").glob("answers-*.jsonl"))
    if not corpus and not answers:
        raise UserError(
            f"{path / 'work'} holds no answers and {path} no {MANIFEST_NAME}: run the command without --merge first"
        )
    return corpus + ([_read_work(path, answers, incomplete, say)] if answers else [])


def _read_work(path: Path, answers: Sequence[Path], incomplete: bool, say: Callable[[str], None]) -> Source:
    work = path / "work"
    rows = [row for file in answers for row in read_lines(file)]
    settings = read_settings(work)
    if settings is None:
        say(
            f"{work} holds no settings: its target is taken to be --target, its {len(answers)} shard(s) to be complete"
        )
        return Source(path, rows, (_run_of_rows(rows),), None, {})
    if missing := incomplete_shards(work, settings.shards):
        what = f"{work}: shard {missing[0]}/{settings.shards} is not complete ({len(rows)} rows are there)"
        if not incomplete:
            raise UserError(f"{what}: let its command finish, or add --incomplete to take what is there")
        say(f"{what}; taking what is there")
    target = TargetIdentity(settings.target_weight_hash, settings.tokenizer_hash, settings.template_hash)
    return Source(path, rows, (_run_of_settings(settings),), target, settings.template_options)


def _read_corpus(path: Path) -> Source:
    import pyarrow.parquet as pq

    manifest = read_manifest(path)
    check_files(path, manifest)
    rows = [_as_written(row) for name in manifest.files for row in pq.read_table(path / name).to_pylist()]
    runs = manifest.runs or (
        Run(seed=manifest.seed, sampling=manifest.sampling, prompt_source=manifest.prompt_source),
    )
    target = TargetIdentity(manifest.target_weight_hash, manifest.tokenizer_hash, manifest.template_hash)
    return Source(path, rows, runs, target, manifest.template_options)


def _as_written(row: Row) -> Row:
    """A row as its run wrote it: without the empty fields that Parquet gives to all because some have them, and with
    JSON read.
    """

    def read(record: dict[str, Any], name: str) -> dict[str, Any]:
        kept = {key: value for key, value in record.items() if value is not None}
        return kept | {name: json.loads(kept[name])} if isinstance(kept.get(name), str) else kept

    return read(row, "tools") | {"messages": [read(message, "tool_calls") for message in row["messages"]]}


def _run_of_settings(settings: RunSettings) -> Run:
    sampling = Sampling(temperatures=settings.temperatures, max_new_tokens=settings.max_new_tokens)
    return Run(seed=settings.seed, sampling=sampling, prompt_source=settings.prompt_source)


def _run_of_rows(rows: Sequence[Row]) -> Run:
    """The settings of a run that stored none, from its rows: ids of self-prompted rows start with the seed."""
    seed, dash, _ = str(rows[0]["id"]).partition("-") if rows else ("", "", "")
    self_prompted = bool(dash) and seed.isdigit()
    return Run(
        seed=int(seed) if self_prompted else 0,
        sampling=Sampling(
            temperatures=tuple(sorted({row["temperature"] for row in rows})),
            max_new_tokens=max((row["tokens"] for row in rows), default=0),
        ),
        prompt_source="self-prompted (data.synthesis.seeds)" if self_prompted else "files",
    )


def _one_target(sources: Sequence[Source], identify: Callable[[], TargetIdentity]) -> TargetIdentity:
    known = [source for source in sources if source.target is not None]
    for source in known[1:]:
        for field in TargetIdentity._fields:
            first, other = getattr(known[0].target, field), getattr(source.target, field)
            if first != other:
                raise UserError(
                    f"{known[0].path} and {source.path} were written by different targets "
                    f"({field} {first} and {other})"
                )
        if found := differences(known[0].template_options, source.template_options):
            raise UserError(
                f"{known[0].path} and {source.path} were written with different chat template options ({found[0]})"
            )
    return known[0].target if known and known[0].target else identify()


def _distinct(rows: Iterable[Row]) -> tuple[list[Row], int]:
    """Rows in the order of their ids, each conversation once; and how many stood twice. Other answers to a question
    get ids `x~2`.
    """
    first: dict[str, Row] = {}
    ids: set[str] = set()
    total = 0
    for row in rows:
        total += 1
        content = json.dumps(row["messages"], sort_keys=True)
        if content not in first:
            number, name = 1, row["id"]
            while name in ids:
                number, name = number + 1, f"{row['id']}~{number + 1}"
            ids.add(name)
            first[content] = row | {"id": name}
    return sorted(first.values(), key=lambda row: row["id"]), total - len(first)


def _write_parts(rows: Sequence[Row], out: Path) -> list[Path]:
    """Parquet parts of `rows` in `out`, in place of the data files that its manifest names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        if size > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += len(json.dumps(row))
    columns = dict.fromkeys(key for row in rows for key in row)
    out.mkdir(parents=True, exist_ok=True)
    names = ["corpus.parquet"] if len(parts) == 1 else [f"corpus-{number:02d}.parquet" for number in range(len(parts))]
    old = read_manifest(out).files if (out / MANIFEST_NAME).is_file() else ()

    def write_part(path: Path, part: Sequence[Row]) -> None:
        table = pa.Table.from_pylist([{key: _column(row, key) for key in columns} for row in part])
        pq.write_table(table, path, compression="zstd", compression_level=19)

    files = [out / name for name in names]
    atomic_write_group({file: partial(write_part, part=part) for file, part in zip(files, parts, strict=True)})
    for name in set(old) - set(names):
        (out / name).unlink(missing_ok=True)
    return files


def _column(row: Row, name: str) -> Any:
    """A value as its Parquet column holds it: what has no common schema becomes JSON."""
    value = row.get(name)
    if name == "messages":
        return [stored(message) for message in row["messages"]]
    return json.dumps(value, ensure_ascii=False) if name == "tools" and isinstance(value, list) else value


def _describe(
    name: str, target: TargetIdentity, sources: Sequence[Source], rows: Sequence[Row], files: dict[str, str]
) -> Manifest:
    runs = tuple(dict.fromkeys(run for source in sources for run in source.runs))
    return Manifest(
        target=name,
        target_weight_hash=target.weight_hash,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        template_options=next((source.template_options for source in sources if source.target), {}),
        sampling=Sampling(
            temperatures=tuple(sorted({heat for run in runs for heat in run.sampling.temperatures})),
            max_new_tokens=max(run.sampling.max_new_tokens for run in runs),
        ),
        seed=runs[0].seed,
        prompt_source="; ".join(dict.fromkeys(run.prompt_source for run in runs)),
        runs=tuple(runs),
        num_rows=len(rows),
        num_truncated=sum(row["finish_reason"] == "length" for row in rows),
        num_response_tokens=sum(row["tokens"] for row in rows),
        subjects=dict(sorted(Counter(row["subject"] for row in rows).items())),
        files=files,
    )
