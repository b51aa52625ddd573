"""Command that shows a data set as training sees it: loss mask, counts, what is left out, overlap with prompts."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import safe_open

from data.arguments import parse_bool
from data.chat.conversations import Conversation, read_conversations
from data.chat.messages import plain
from data.chat.render import Example, Rendered, render_all
from data.manifest import MANIFEST_NAME, check_files, provenance, read_manifest
from data.prompts import PromptOverlap, overlap_by_prompt, read_prompts
from drafters.base.errors import CommandParser, UserError, run_command
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.template import TemplateOptions

DESCRIPTION = """\
Show what training would see of a data set: tokens of the first conversations with the loss mask in colour, counts,
conversations that are left out by file and line, how much a draft vocabulary would cover, and overlap with the prompts
that are kept to measure on.

Answers, which are learnt from, are green and stand between [n> and <n], n the number of the turn. Tokens alternate in
shade.
The exit status is 1 where --against finds overlap."""
EXAMPLES = """\
  python -m data.inspection --target builtin:smollm2-135m data/corpora/smollm2-135m --against data/prompts/*.jsonl
  python -m data.inspection --target Qwen/Qwen3-8B chats.jsonl --enable-thinking false --show 10 --row-length 2048"""
SHADES = {False: ("grey50", "grey66"), True: ("green3", "bright_green")}
VOCABULARY_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LISTED = 20  # lines of one kind, before the rest is only counted


class Counts(NamedTuple):
    """Counts of a data set. `kinds` counts conversations by feature (such as tools), `temperatures` by temperature."""

    conversations: int
    truncated: int
    answers: int
    kinds: dict[str, int]
    temperatures: dict[str, int]


def main(argv: Sequence[str]) -> int:
    """The command."""
    options = _arguments(argv)
    template = TemplateOptions(enable_thinking=options.enable_thinking, tools=options.tools)
    prompts = read_prompts(options.against) if options.against else []
    rejected: list[str] = []
    conversations = [c for path in options.files for c in read_conversations(path, options.limit, rejected)]
    if not conversations:
        raise UserError(f"{', '.join(options.files)}: no row can be read; the first one: {rejected[0]}")
    from drafters.targets.identity import identify, load_tokenizer

    tokenizer = load_tokenizer(options.target)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    _check_manifests(options, identify(options.target), template, console)
    rendered = render_all(conversations, tokenizer, options.row_length, template)
    for example in rendered.examples[: options.show]:
        console.print(coloured(example, tokenizer), "")
    show_counts(console, count(conversations), rendered)
    show_list(console, "rows that cannot be read", rejected)
    show_list(console, "conversations that are left out", rendered.rejected)
    show_list(console, "single answers that are left out", rendered.skipped)
    show_coverage(console, rendered.examples, len(tokenizer), options)
    if options.probe:
        show_target_check(console, options, conversations, template)
    return show_overlap(console, overlap_by_prompt(prompts, conversations), len(prompts)) if prompts else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("python -m data.inspection", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help=".jsonl, .json or .parquet files, directories of them, or hub names"
    )
    parser.add_argument(
        "--target", required=True, metavar="T", help="directory, hub id, .gguf file or builtin:smollm2-135m"
    )
    parser.add_argument("--show", type=int, default=3, metavar="N", help="print the tokens of N examples (default: 3)")
    parser.add_argument("--limit", type=int, metavar="N", help="read at most N rows of each FILE")
    parser.add_argument(
        "--row-length", type=int, default=512, metavar="N", help="tokens after which training cuts (default: 512)"
    )
    parser.add_argument(
        "--enable-thinking", type=parse_bool, metavar="BOOL", help="for chat templates that know it, such as Qwen3's"
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools for conversations that name none")
    parser.add_argument(
        "--draft-vocab-size", type=int, metavar="N", help="show the coverage of a draft vocabulary of this size too"
    )
    parser.add_argument("--drafter", metavar="DIR", help="show what the vocabulary of this drafter covers")
    parser.add_argument(
        "--probe",
        type=int,
        metavar="N",
        help="run the target over N conversations of each temperature: did it write them itself?",
    )
    parser.add_argument(
        "--against", nargs="+", metavar="FILE", help="prompts to measure on, which the data must not hold"
    )
    return parser.parse_intermixed_args(argv)


def coloured(example: Example, tokenizer: Any) -> Text:
    """The example's text, token by token in alternating shades, answers in green between `[n>` and `<n]`."""
    text, turn = Text(), 0
    for number, (piece, of_turn) in enumerate(_pieces(example, tokenizer)):
        if of_turn != turn:
            text.append(f"<{turn}]" if turn else "", style="magenta").append(
                f"[{of_turn}>" if of_turn else "", style="magenta"
            )
            turn = of_turn
        text.append(piece, style=SHADES[of_turn > 0][number % 2])
    return text.append(f"<{turn}]" if turn else "", style="magenta")


def _pieces(example: Example, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Text and turn of each token; tokens that are only together a character come as one piece."""
    ids: list[int] = []
    for position, (token, turn) in enumerate(zip(example.token_ids, example.turn_ids, strict=True)):
        ids.append(token)
        piece = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        last = position + 1 == len(example.token_ids) or example.turn_ids[position + 1] != turn
        if not piece.endswith("\ufffd") or last:
            yield piece, turn
            ids = []


def count(conversations: Sequence[Conversation]) -> Counts:
    """Counts of the conversations as they were read."""
    kinds, temperatures = Counter[str](), Counter[str]()
    for conversation in conversations:
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        has = {
            "a system message": any(message["role"] == "system" for message in conversation.messages),
            "several answers": len(answers) > 1,
            "tools": bool(conversation.tools) or any(message.get("tool_calls") for message in answers),
            "thinking": any(
                not plain(m) and m.get("reasoning_content") or "</think>" in m["content"] for m in answers
            ),
        }
        kinds.update(kind for kind, there in has.items() if there)
        temperatures["unknown" if conversation.temperature is None else f"{conversation.temperature:g}"] += 1
    return Counts(
        conversations=len(conversations),
        truncated=sum(conversation.truncated for conversation in conversations),
        answers=sum(
            message["role"] == "assistant" for conversation in conversations for message in conversation.messages
        ),
        kinds=dict(kinds),
        temperatures=dict(sorted(temperatures.items())),
    )


def show_counts(console: Console, counts: Counts, rendered: Rendered) -> None:
    """Print a table of counts."""
    lengths = sorted(len(example.token_ids) for example in rendered.examples)
    supervised = sum(sum(example.loss_mask) for example in rendered.examples)
    turns = sum(len(set(example.turn_ids) - {0}) for example in rendered.examples)
    table = Table(show_header=False, box=None)
    rows = [
        ("conversations", f"{counts.conversations}, {len(rendered.rejected)} of them left out"),
        ("with", ", ".join(f"{kind}: {number}" for kind, number in counts.kinds.items()) or "one plain answer each"),
        (
            "truncated",
            f"{counts.truncated} ({counts.truncated / counts.conversations:.1%}): the last answer has no end",
        ),
        (
            "temperatures",
            ", ".join(f"{name}: {number / counts.conversations:.1%}" for name, number in counts.temperatures.items()),
        ),
        ("examples", f"{len(rendered.examples)}, with {turns} of {counts.answers} answers"),
    ]
    if lengths:
        middle, high = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
        rows.append(
            ("tokens", f"{sum(lengths)}; of an example: median {middle}, 95 % below {high}, longest {lengths[-1]}")
        )
        rows.append(("learnt from", f"{supervised} tokens ({supervised / sum(lengths):.1%})"))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print a list's length and its first lines; nothing for an empty list."""
    if lines:
        console.print(f"\n{title}: {len(lines)}", style="bold")
        console.print("\n".join(f"  {line}" for line in lines[:LISTED]))
        if len(lines) > LISTED:
            console.print(f"  and {len(lines) - LISTED} more")


def show_coverage(console: Console, examples: Sequence[Example], vocab_size: int, options: argparse.Namespace) -> None:
    """Print the share of supervised tokens that draft vocabularies of several sizes cover, and a drafter's own."""
    tokens = [
        token for example in examples for token, turn in zip(example.token_ids, example.turn_ids, strict=True) if turn
    ]
    if not tokens:
        return
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab_size)
    sizes = sorted({size for size in (*VOCABULARY_SIZES, options.draft_vocab_size or 0) if 0 < size < len(counts)})
    shares = [f"{size}: {VocabMap.by_frequency(counts, size).coverage(counts):.2%}" for size in sizes]
    console.print(
        f"\ndraft vocabulary: {int((counts > 0).sum())} different tokens are learnt from; a vocabulary of",
        style="bold",
    )
    console.print(f"  {', '.join(shares)} of them all")
    if options.drafter:
        vocab = _vocabulary_of(Path(options.drafter), vocab_size)
        console.print(f"  {options.drafter}: its {len(vocab)} cover {vocab.coverage(counts):.2%}")


def _vocabulary_of(drafter: Path, vocab_size: int) -> VocabMap:
    from drafters.eagle3_ssd.checkpoint import WEIGHTS_FILE

    file = drafter / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"--drafter {drafter}: no {WEIGHTS_FILE} there; give the directory of a drafter")
    with safe_open(file, "pt") as tensors:
        return VocabMap.from_offsets(tensors.get_tensor("d2t"), vocab_size)


def show_target_check(
    console: Console, options: argparse.Namespace, conversations: Sequence[Conversation], template: TemplateOptions
) -> None:
    """Print the share of answer tokens that are the target's likeliest ones, by sampling temperature."""
    from data.target_check import FOREIGN, top1_share
    from drafters.targets.target import load_target

    target = load_target(options.target)
    console.print("\nanswer tokens that are the target's own choice", style="bold")
    temperatures = {c.temperature for c in conversations}
    for temperature in sorted(temperatures, key=lambda value: -1.0 if value is None else value):
        some = [c for c in conversations if c.temperature == temperature][: options.probe]
        examples = render_all(some, target.tokenizer, options.row_length, template).examples
        tokens, share = top1_share(target, examples)
        name = "temperature unknown" if temperature is None else f"temperature {temperature:g}"
        doubt = f": has {options.target} written them, in this thinking mode?" if share < FOREIGN else ""
        console.print(f"  {name}: {share:.1%} of {tokens}{doubt}", style="yellow" if doubt else "")


def show_overlap(console: Console, found: Sequence[PromptOverlap], num_prompts: int) -> int:
    """Print the measuring prompts that the data hold. Returns the exit status: 1 if there are any."""
    exact = sum(overlap.exact for overlap in found)
    console.print(
        f"\noverlap: {len(found)} of {num_prompts} prompts share eight words in a row, {exact} stand there whole",
        style="bold",
    )
    for overlap in found[:LISTED]:
        share = "whole" if overlap.exact else f"{overlap.share:.0%} of its runs of eight"
        console.print(f"  {overlap.prompt_id} ({share}) at {overlap.source}: {overlap.words!r}")
    if len(found) > LISTED:
        console.print(f"  and {len(found) - LISTED} more")
    return 1 if found else 0


def _check_manifests(options: argparse.Namespace, identity: Any, template: TemplateOptions, console: Console) -> None:
    for path in map(Path, options.files):
        if (path / MANIFEST_NAME).is_file():
            check_files(path, read_manifest(path))
    for line in provenance(options.files, options.target, identity, template):
        console.print(f"warning: {line}", style="yellow")


if __name__ == "__main__":
    sys.exit(run_command(main))
