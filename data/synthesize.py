"""Command that writes a training corpus with the target: user turns and answers (data/README.md, section 3).

Interrupted runs are resumed: each finished piece is a line in OUT/work/, and every draw is keyed by seed and row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.arguments import parse_bool
from data.chat.conversations import Conversation, DataError, read_conversations
from data.prompts import read_prompts
from data.synthesis.answer_loop import write_answers
from data.synthesis.dialogue import Dialogue, draw_seed
from data.synthesis.seeds import opening
from data.synthesis.work_directory import RunSettings, mark_complete, read_and_repair, store_settings
from drafters.base.errors import CommandParser, UserError, run_command
from drafters.base.progress import ProgressDisplay
from drafters.targets.identity import TargetIdentity
from drafters.targets.template import TemplateOptions

DESCRIPTION = """\
Write a training corpus with the target itself: it writes user turns, or takes the conversations of --prompts, and
answers them. Half of the answers are greedy, half are sampled at temperature 0.8. Answers that the conversations hold
are written anew, turn by turn; assistant messages that call tools stay as they are, without being learnt from, because
their results follow.

The target runs in this process, or behind --server: any OpenAI-compatible one, such as vLLM (start it with
--generation-config vllm, so that no sampling setting of the model's own applies) or SGLang.

Writes DIR/corpus.parquet and DIR/manifest.json. After an interruption the same command goes on from DIR/work/."""
EXAMPLES = """\
  python -m data.synthesize --target builtin:smollm2-135m --out data/corpora/mine --response-tokens 300000
  python -m data.synthesize --target Qwen/Qwen3-8B --out DIR --prompts chats.jsonl --enable-thinking false \\
      --server http://localhost:8000 --model Qwen/Qwen3-8B --concurrency 64
  two processes side by side, then their parts together:
  python -m data.synthesize --target T --out DIR --shard 0/2 &
  python -m data.synthesize --target T --out DIR --shard 1/2; wait
  python -m data.synthesize --target T --out DIR --merge
  a corpus grown by a second run, without questions that are kept for measuring:
  python -m data.synthesize --target T --out data/corpora/mine --merge --from data/corpora/mine runs/more \\
      --exclude data/prompts/*.jsonl"""
ANSWER_TEMPERATURES = (0.0, 0.8)  # half of the answers each: served greedily and sampled
MAX_PROMPT_TOKENS = 160  # of a user turn that the target writes
RESPONSE_TOKENS = 300_000
TOKENS_PER_ANSWER_GUESS = 120  # low, so that the prompts do not run out before the tokens asked for are there


def main(argv: Sequence[str]) -> int:
    options = _arguments(argv)
    template = TemplateOptions(enable_thinking=options.enable_thinking, tools=options.tools)
    template.read_tools()
    measuring = read_prompts(options.exclude) if options.exclude else []
    if options.merge:
        return _merge(options, measuring)
    chats = (
        _read_chats(options.prompts) if options.prompts else None
    )  # mistakes in files come before the target is loaded
    from drafters.targets.identity import identify

    work = Path(options.out) / "work"
    goal = options.response_tokens and options.response_tokens // options.count
    identity = identify(options.target)
    store_settings(work, _settings(options, identity, template, chats), print)
    mark_complete(work, options.index, False)
    with _sigterm_interrupts():
        answerer, target = _answerer(options, template)
        dialogues = (
            _dialogues(options, chats)
            if chats is not None
            else _write_prompts(options, target, answerer.generator, work)
        )
        write_answers(work, options.index, answerer, dialogues, goal, options.seed, print)
    mark_complete(work, options.index, True)
    if options.count == 1:
        return _merge(options, measuring)
    print(f"shard {options.shard} is complete; when all are: the same command with --merge")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("python -m data.synthesize", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--target", required=True, metavar="T", help="directory, hub id, .gguf file or builtin:smollm2-135m"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the corpus, made where it is missing"
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="conversations to answer (default: the target writes its own prompts)",
    )
    parser.add_argument(
        "--response-tokens",
        type=int,
        metavar="N",
        help=f"stop after N answer tokens (default: {RESPONSE_TOKENS}; with --prompts, all)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default: 256)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=512, metavar="N", help="leave out longer prompts (default: 512)"
    )
    parser.add_argument(
        "--prompt-temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="at which the target writes user turns (default: 0.8)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="requests decoded together (default: 64)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the choice of prompts and of the sampling (default: 0)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32", "float16"),
        help="of the target (default: bfloat16)",
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    parser.add_argument(
        "--enable-thinking", type=parse_bool, metavar="BOOL", help="for chat templates that know it, such as Qwen3's"
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools for conversations that name none")
    parser.add_argument(
        "--server", metavar="URL", help="let an OpenAI-compatible server answer; needs --prompts and --model"
    )
    parser.add_argument("--model", metavar="NAME", help="the target's name at the server")
    parser.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="requests under way at the server (default: 32)"
    )
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")
    parser.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help="write the I-th of N parts, I from 0; then --merge (default: 0/1)",
    )
    parser.add_argument("--merge", action="store_true", help="only put together what the shards wrote")
    parser.add_argument(
        "--from",
        nargs="+",
        dest="sources",
        metavar="DIR",
        help="with --merge: OUT directories of runs, or corpora (default: --out)",
    )
    parser.add_argument(
        "--incomplete", action="store_true", help="with --merge: take what is there where shards are not complete"
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        metavar="FILE",
        help="prompts to measure on: what shares eight words with one is left out of the corpus",
    )
    return _checked(parser.parse_args(argv))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    index, _, count = options.shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shard {options.shard!r}: write I/N with I below N, for example 0/2")
    options.index, options.count = int(index), int(count)
    for name in ("response_tokens", "max_new_tokens", "max_prompt_tokens", "batch_size", "concurrency"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: has to be at least 1")
    if not options.prompts and options.response_tokens is None:
        options.response_tokens = RESPONSE_TOKENS
    if options.server and not (options.prompts and options.model):
        missing = "--model NAME" if options.prompts else "--prompts FILE"
        raise UserError(
            f"--server needs {missing}: a server answers conversations that are given, as the model of that name"
        )
    if options.api_key_env and options.api_key_env not in os.environ:
        raise UserError(f"--api-key-env {options.api_key_env}: there is no such environment variable")
    return options


def _read_chats(paths: Sequence[str]) -> list[Conversation]:
    """The conversations to answer. Raises `DataError` for an id that stands twice, since rows go by their ids."""
    chats = [conversation for path in paths for conversation in read_conversations(path)]
    sources: dict[str, str] = {}
    for chat in chats:
        if chat.id in sources:
            raise DataError(
                f"{chat.source}: the id {chat.id!r} stands at {sources[chat.id]} already: "
                "give each conversation its own id"
            )
        sources[chat.id] = chat.source
    return chats


def _settings(
    options: argparse.Namespace,
    target: TargetIdentity,
    template: TemplateOptions,
    chats: Sequence[Conversation] | None,
) -> RunSettings:
    given = [(chat.id, chat.messages, chat.tools) for chat in chats or ()]
    return RunSettings(
        target=options.target,
        target_weight_hash=target.weight_hash,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        template_options=template.recorded(),
        model=options.model if options.server else None,
        seed=options.seed,
        temperatures=ANSWER_TEMPERATURES,
        prompt_temperature=options.prompt_temperature,
        max_new_tokens=options.max_new_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        dtype=options.dtype,
        prompts=hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16] if chats is not None else "",
        prompt_source="files: " + ", ".join(options.prompts)
        if options.prompts
        else "self-prompted (data.synthesis.seeds)",
        shards=options.count,
    )


def _answerer(options: argparse.Namespace, template: TemplateOptions) -> tuple[Any, Any]:
    """The answerer, and the target where it runs in this process."""
    if options.server:
        from data.synthesis.server_answers import ServerAnswerer

        key = os.environ[options.api_key_env] if options.api_key_env else None
        server = ServerAnswerer(
            options.server, options.model, options.max_new_tokens, options.concurrency, template, key
        )
        server.check()
        return server, None
    import torch

    from data.synthesis.answerers import TargetAnswerer
    from data.synthesis.generation import BatchGenerator
    from drafters.targets.target import load_target

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no GPU is visible to torch; use --device cpu")
    target = load_target(options.target, options.dtype, device)
    generator = BatchGenerator(target, options.batch_size, options.max_prompt_tokens + options.max_new_tokens)
    return TargetAnswerer(target, generator, options.max_prompt_tokens, options.max_new_tokens, template), target


def _dialogues(options: argparse.Namespace, chats: Sequence[Conversation]) -> list[Dialogue]:
    mine = chats[options.index :: options.count]
    return [Dialogue(chat.id, "file", chat.messages, chat.tools, _temperature(i)) for i, chat in enumerate(mine)]


def _write_prompts(options: argparse.Namespace, target: Any, generator: Any, work: Path) -> list[Dialogue]:
    """All user turns of this shard, drawn from `data.synthesis.seeds` and completed by the target."""
    from data.synthesis.generation import Continuation

    share = options.response_tokens // options.count
    drawn = {}
    for i in range(options.index, options.count * (share // TOKENS_PER_ANSWER_GUESS + 1), options.count):
        drawn[f"{options.seed}-{i:06d}"] = opening(random.Random(f"{options.seed}:{i}"))
    file = work / f"prompts-{options.index}.jsonl"
    done = {line["key"]: line for line in read_and_repair(file)}
    asks = [
        Continuation(
            key,
            _user_turn(target.tokenizer, o.text),
            options.prompt_temperature,
            MAX_PROMPT_TOKENS,
            draw_seed(options.seed, key, "prompt"),
        )
        for key, o in drawn.items()
        if o.continues and key not in done
    ]
    with file.open("a", encoding="utf-8") as out, ProgressDisplay("prompts", len(asks)) as progress:
        for answer in generator.run(asks):
            text = target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            done[answer.key] = {"key": answer.key, "text": text, "ended": answer.ended}
            print(json.dumps(done[answer.key]), file=out, flush=True)
            progress.advance()
    dialogues = []
    for position, (key, o) in enumerate(drawn.items()):
        text = (o.text + done[key]["text"] if o.continues else o.text).strip()
        if text and (not o.continues or done[key]["ended"]):  # a turn that never ended is no prompt
            dialogues.append(
                Dialogue(key, o.subject, ({"role": "user", "content": text},), (), _temperature(position))
            )
    return dialogues


def _merge(options: argparse.Namespace, measuring: Sequence[Any]) -> int:
    """Put the rows of the directories `--from` into OUT/*.parquet with a manifest."""
    from data.synthesis.merge import merge
    from drafters.targets.identity import identify

    out = Path(options.out)
    sources = [Path(path) for path in options.sources or [out]]
    merge(options.target, sources, out, measuring, lambda: identify(options.target), print, options.incomplete)
    return 0


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM stops the run as Ctrl-C does; every finished line is on disk by then."""

    def on_signal(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _user_turn(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of the template up to the start of a user turn and of the turn's first words, for the target to
    continue.
    """
    marker = "\u2063"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return tuple(tokenizer(whole[: whole.index(marker)] + text, add_special_tokens=False).input_ids)


def _temperature(position: int) -> float:
    return ANSWER_TEMPERATURES[position % len(ANSWER_TEMPERATURES)]


if __name__ == "__main__":
    sys.exit(run_command(main))
