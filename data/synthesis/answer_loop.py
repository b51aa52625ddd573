"""Answer loop of a corpus run: asks the turns of all dialogues and stores replies and finished rows as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from data.synthesis.dialogue import Answerer, Dialogue, Question, Reply, next_step, num_answers
from data.synthesis.work_directory import read_and_repair
from drafters.base.errors import UserError
from drafters.base.progress import ProgressDisplay

HOPELESS = 20  # refusals without one answer, after which a run gives up
SHOWN = 3  # reasons that are printed; further ones are only counted


def write_answers(
    work: Path,
    shard: int,
    answerer: Answerer,
    dialogues: Sequence[Dialogue],
    goal: int | None,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Answer `dialogues` until the rows hold `goal` answer tokens (None: all of them), going on from what is in `work`
    already.

    Rows go to answers-SHARD.jsonl, turns of longer conversations meanwhile to turns-SHARD.jsonl.
    Raises `UserError` where everything is refused.
    """
    rows_file, turns_file = work / f"answers-{shard}.jsonl", work / f"turns-{shard}.jsonl"
    finished = read_and_repair(rows_file)
    tokens = sum(line["tokens"] for line in finished)
    done = {line["id"] for line in finished}
    under_way = {dialogue.key: _Exchange(dialogue, []) for dialogue in dialogues if dialogue.key not in done}
    for line in read_and_repair(turns_file):
        if line["key"] in under_way:
            under_way[line["key"]].replies.append(Reply(**line))
    progress = (
        ProgressDisplay("conversations", len(dialogues), len(dialogues) - len(under_way))
        if goal is None
        else ProgressDisplay("answer tokens", goal, tokens)
    )
    with rows_file.open("a", encoding="utf-8") as rows, turns_file.open("a", encoding="utf-8") as turns, progress:
        loop = _Loop(answerer, seed, rows, progress, say, counts_tokens=goal is not None, tokens=tokens)
        if goal is None or tokens < goal:
            for exchange in under_way.values():
                loop.advance(exchange, first=False)
        for reply in answerer.replies() if goal is None or tokens < goal else ():
            exchange = under_way[reply.key]
            if not reply.refused and num_answers(exchange.dialogue) > 1:
                print(json.dumps(reply._asdict()), file=turns, flush=True)
            loop.take(exchange, reply)
            if goal is not None and loop.tokens >= goal:
                break
    if loop.refused > SHOWN:
        say(f"left out: {loop.refused} conversations or later turns in all")


class _Exchange:
    """A dialogue and the replies to it so far."""

    def __init__(self, dialogue: Dialogue, replies: list[Reply]) -> None:
        self.dialogue, self.replies = dialogue, replies


class _Loop:
    """Counters and files of the loop."""

    def __init__(
        self,
        answerer: Answerer,
        seed: int,
        rows: TextIO,
        progress: ProgressDisplay,
        say: Callable[[str], None],
        counts_tokens: bool,
        tokens: int,
    ) -> None:
        self.answerer, self.seed, self.rows, self.progress, self.say = answerer, seed, rows, progress, say
        self.counts_tokens, self.tokens, self.refused = counts_tokens, tokens, 0

    def take(self, exchange: _Exchange, reply: Reply) -> None:
        """Add a reply, and go on from there; later turns come before other conversations."""
        exchange.replies.append(reply)
        if reply.refused:
            self._note_refusal(reply.key, reply.refused)
        self.advance(exchange, first=True)

    def advance(self, exchange: _Exchange, first: bool) -> None:
        """Ask the next turn, or write the finished row."""
        step = next_step(exchange.dialogue, exchange.replies, self.seed)
        if isinstance(step, Question):
            if reason := self.answerer.ask(step, first):
                self.take(
                    exchange, Reply(exchange.dialogue.key, {"role": "assistant", "content": ""}, False, 0, reason)
                )
            return
        if step is not None:
            print(json.dumps(step), file=self.rows, flush=True)
            self.tokens += step["tokens"]
        self.progress.advance((step["tokens"] if step else 0) if self.counts_tokens else 1)

    def _note_refusal(self, key: str, reason: str) -> None:
        self.refused += 1
        if self.refused <= SHOWN:
            self.say(f"left out: {key}: {reason}")
        if self.refused >= HOPELESS and not self.tokens:
            raise UserError(f"the first {self.refused} conversations were all refused, the last one because: {reason}")
