"""Write a training corpus with the target itself: it writes (or completes) user turns, then answers them.

Interrupted runs go on where they stopped: each finished piece is a line in OUT/work/, and every draw is keyed by seed and row.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from data.prompts import read_prompts
from data.seeds import opening
from data.work import mend
from drafters.errors import CommandParser, UserError, run_command

DESCRIPTION = """\
Write a training corpus with the target itself: it writes user turns, or takes yours from --prompts, and answers them.
Half of the answers are greedy, half are sampled at temperature 0.8.

Writes DIR/corpus.parquet and DIR/manifest.json. After an interruption the same command goes on from DIR/work/."""
EXAMPLES = """\
  python -m data.synthesize --target builtin:smollm2-135m --out data/corpora/mine --response-tokens 300000
  two processes side by side, then their parts together:
  python -m data.synthesize --target T --out DIR --shard 0/2 & python -m data.synthesize --target T --out DIR --shard 1/2; wait
  python -m data.synthesize --target T --out DIR --merge
  a corpus grown by a second run, without questions that are kept for measuring:
  python -m data.synthesize --target T --out data/corpora/mine --merge --from data/corpora/mine runs/more --exclude data/prompts/*.jsonl"""
ANSWER_TEMPERATURES = (0.0, 0.8)  # half of the answers each: served greedily and sampled
MAX_PROMPT_TOKENS = 160
TOKENS_PER_ANSWER_GUESS = 120  # low, so that the prompts do not run out before the tokens asked for are there


class Row(NamedTuple):
    """A user turn to answer, with the temperature of its answer."""

    key: str
    subject: str
    prompt: str
    temperature: float


def main(argv: Sequence[str]) -> int:
    options = _arguments(argv)
    if options.merge:
        return _merge(options)
    work = Path(options.out) / "work"
    work.mkdir(parents=True, exist_ok=True)
    from data.batch_generate import BatchGenerator
    from drafters.targets import load_target

    target = load_target(options.target, options.dtype)
    generator = BatchGenerator(target, options.batch_size, 512 + options.max_new_tokens)
    with Progress() as progress:
        rows = _write_prompts(options, target, generator, work, progress)
        _write_answers(options, target, generator, rows, work, progress)
    _finish(options, target, work)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("python -m data.synthesize", DESCRIPTION, EXAMPLES)
    parser.add_argument("--target", required=True, metavar="T", help="directory, hub id, .gguf file or builtin:smollm2-135m")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the corpus, made where it is missing")
    parser.add_argument(
        "--prompts", nargs="+", metavar="FILE", help="files of single questions to answer (default: the target writes its own)"
    )
    parser.add_argument("--response-tokens", type=int, default=300_000, metavar="N", help="stop after N answer tokens (default: 300000)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default: 256)")
    parser.add_argument(
        "--prompt-temperature", type=float, default=0.8, metavar="X", help="at which the target writes user turns (default: 0.8)"
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="requests decoded together (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the choice of prompts and of the sampling (default: 0)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"), help="of the target (default: bfloat16)")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="write the I-th of N parts, I from 0; then --merge (default: 0/1)")
    parser.add_argument("--merge", action="store_true", help="only put together what the shards wrote")
    parser.add_argument(
        "--from", nargs="+", dest="sources", metavar="DIR", help="with --merge: OUT directories of runs, or corpora (default: --out)"
    )
    parser.add_argument(
        "--exclude", nargs="+", metavar="FILE", help="with --merge: prompts to measure on; what shares eight words with one is left out"
    )
    options = parser.parse_args(argv)
    index, _, count = options.shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shard {options.shard!r}: write I/N with I below N, for example 0/2")
    options.index, options.count = int(index), int(count)
    for name in ("response_tokens", "max_new_tokens", "batch_size"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: has to be at least 1")
    return options


def _write_prompts(options: argparse.Namespace, target: Any, generator: Any, work: Path, progress: Progress) -> list[Row]:
    """All rows of this shard: read from files, or drawn from `data.seeds` and completed by the target."""
    from data.batch_generate import Ask

    if options.prompts:
        prompts = [prompt for prompt in read_prompts(options.prompts) if len(prompt.messages) == 1]
        mine = prompts[options.index :: options.count]
        return [Row(p.id, "file", p.messages[0]["content"], _temperature(i)) for i, p in enumerate(mine)]
    share = options.response_tokens // options.count
    drawn = {}
    for i in range(options.index, options.count * (share // TOKENS_PER_ANSWER_GUESS + 1), options.count):
        drawn[f"{options.seed}-{i:06d}"] = opening(random.Random(f"{options.seed}:{i}"))
    file = work / f"prompts-{options.index}.jsonl"
    done = {line["key"]: line for line in mend(file)}
    asks = [
        Ask(key, _user_turn(target.tokenizer, o.text), options.prompt_temperature, MAX_PROMPT_TOKENS, _seed(options.seed, key, "prompt"))
        for key, o in drawn.items()
        if o.continues and key not in done
    ]
    task = progress.add_task("prompts", total=len(asks))
    with file.open("a", encoding="utf-8") as out:
        for answer in generator.run(asks):
            text = target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            done[answer.key] = {"key": answer.key, "text": text, "ended": answer.ended}
            print(json.dumps(done[answer.key]), file=out, flush=True)
            progress.advance(task)
    rows = []
    for position, (key, o) in enumerate(drawn.items()):
        text = (o.text + done[key]["text"] if o.continues else o.text).strip()
        if text and (not o.continues or done[key]["ended"]):  # a turn that never ended is no prompt
            rows.append(Row(key, o.subject, text, _temperature(position)))
    return rows


def _write_answers(options: argparse.Namespace, target: Any, generator: Any, rows: list[Row], work: Path, progress: Progress) -> None:
    from data.batch_generate import Ask
    from data.render import render_prompt

    file = work / f"answers-{options.index}.jsonl"
    finished = mend(file)
    done, tokens = {line["id"] for line in finished}, sum(line["tokens"] for line in finished)
    goal = options.response_tokens // options.count
    by_key = {row.key: row for row in rows}

    def asks() -> Iterator[Ask]:
        for row in rows:
            ids = tuple(render_prompt([{"role": "user", "content": row.prompt}], target.tokenizer))
            if row.key not in done and len(ids) <= 512:
                yield Ask(row.key, ids, row.temperature, options.max_new_tokens, _seed(options.seed, row.key, "answer"))

    task = progress.add_task("answer tokens", total=goal, completed=min(tokens, goal))
    with file.open("a", encoding="utf-8") as out:
        for answer in generator.run(asks()) if tokens < goal else ():
            row = by_key[answer.key]
            text = target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if not text.strip():
                continue
            messages = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": text}]
            line = {"id": row.key, "messages": messages, "finish_reason": "stop" if answer.ended else "length"}
            line |= {"subject": row.subject, "temperature": row.temperature, "tokens": len(answer.token_ids)}
            print(json.dumps(line), file=out, flush=True)
            tokens += line["tokens"]
            progress.update(task, completed=min(tokens, goal))
            if tokens >= goal:
                break


def _finish(options: argparse.Namespace, target: Any, work: Path) -> None:
    facts = {key: getattr(target.facts, key) for key in ("weight_hash", "tokenizer_hash", "template_hash")}
    (work / f"target-{options.index}.json").write_text(json.dumps({"name": options.target, **facts}))
    if options.count == 1:
        _merge(options)
    else:
        print(f"shard {options.shard} is complete; when all are: the same command with --merge")


def _merge(options: argparse.Namespace) -> int:
    """Put rows of the directories `--from` into OUT/*.parquet with a manifest."""
    from data.merge import TargetIdentity, merge

    def identify() -> TargetIdentity:
        from drafters.targets import load_target

        facts = load_target(options.target, options.dtype, fuse_layers=False).facts
        return TargetIdentity(facts.weight_hash, facts.tokenizer_hash, facts.template_hash)

    out = Path(options.out)
    merge(
        options.target,
        [Path(path) for path in options.sources or [out]],
        out,
        read_prompts(options.exclude) if options.exclude else [],
        identify,
        print,
    )
    return 0


def _user_turn(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The template up to the start of a user turn, and the turn's first words: the target writes on from there."""
    marker = "\u2063"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return tuple(tokenizer(whole[: whole.index(marker)] + text, add_special_tokens=False).input_ids)


def _temperature(position: int) -> float:
    return ANSWER_TEMPERATURES[position % len(ANSWER_TEMPERATURES)]


def _seed(seed: int, key: str, purpose: str) -> int:
    return random.Random(f"{seed}:{key}:{purpose}").getrandbits(48)


if __name__ == "__main__":
    sys.exit(run_command(main))
