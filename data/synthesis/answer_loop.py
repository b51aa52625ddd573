"""Conversations in, rows out: every turn is asked, kept when it comes, and the finished rows are lines of a work file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from data.progress import Meter
from data.synthesis.talks import Answerer, Plan, Question, Reply, next_step, num_answers
from data.synthesis.work import mend
from drafters.base.errors import UserError

HOPELESS = 20  # refusals without an answer among them, after which a run gives up
SHOWN = 3  # reasons that are said before the rest is only counted


def write_answers(
    work: Path,
    shard: int,
    answerer: Answerer,
    plans: Sequence[Plan],
    goal: int | None,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Answer `plans` until the rows hold `goal` answer tokens (None: all of them), going on from what is in `work`
    already.

    Rows go to answers-SHARD.jsonl, turns of longer conversations meanwhile to turns-SHARD.jsonl.
    Raises `UserError` where everything is refused.
    """
    rows_file, turns_file = work / f"answers-{shard}.jsonl", work / f"turns-{shard}.jsonl"
    finished = mend(rows_file)
    tokens = sum(line["tokens"] for line in finished)
    done = {line["id"] for line in finished}
    talks = {plan.key: _Talk(plan, []) for plan in plans if plan.key not in done}
    for line in mend(turns_file):
        if line["key"] in talks:
            talks[line["key"]].replies.append(Reply(**line))
    meter = (
        Meter("conversations", len(plans), len(plans) - len(talks))
        if goal is None
        else Meter("answer tokens", goal, tokens)
    )
    with rows_file.open("a", encoding="utf-8") as rows, turns_file.open("a", encoding="utf-8") as turns, meter:
        loop = _Loop(answerer, seed, rows, meter, say, counts_tokens=goal is not None, tokens=tokens)
        if goal is None or tokens < goal:
            for talk in talks.values():
                loop.advance(talk, first=False)
        for reply in answerer.replies() if goal is None or tokens < goal else ():
            talk = talks[reply.key]
            if not reply.refused and num_answers(talk.plan) > 1:
                print(json.dumps(reply._asdict()), file=turns, flush=True)
            loop.take(talk, reply)
            if goal is not None and loop.tokens >= goal:
                break
    if loop.refused > SHOWN:
        say(f"left out: {loop.refused} conversations or later turns in all")


class _Talk:
    """A conversation under way."""

    def __init__(self, plan: Plan, replies: list[Reply]) -> None:
        self.plan, self.replies = plan, replies


class _Loop:
    """What the loop counts and writes."""

    def __init__(
        self,
        answerer: Answerer,
        seed: int,
        rows: TextIO,
        meter: Meter,
        say: Callable[[str], None],
        counts_tokens: bool,
        tokens: int,
    ) -> None:
        self.answerer, self.seed, self.rows, self.meter, self.say = answerer, seed, rows, meter, say
        self.counts_tokens, self.tokens, self.refused = counts_tokens, tokens, 0

    def take(self, talk: _Talk, reply: Reply) -> None:
        """Add a reply, and go on from there; later turns come before other conversations."""
        talk.replies.append(reply)
        if reply.refused:
            self._note_refusal(reply.key, reply.refused)
        self.advance(talk, first=True)

    def advance(self, talk: _Talk, first: bool) -> None:
        """Ask the next turn, or write the finished row."""
        step = next_step(talk.plan, talk.replies, self.seed)
        if isinstance(step, Question):
            if reason := self.answerer.ask(step, first):
                self.take(talk, Reply(talk.plan.key, {"role": "assistant", "content": ""}, False, 0, reason))
            return
        if step is not None:
            print(json.dumps(step), file=self.rows, flush=True)
            self.tokens += step["tokens"]
        self.meter.add((step["tokens"] if step else 0) if self.counts_tokens else 1)

    def _note_refusal(self, key: str, reason: str) -> None:
        self.refused += 1
        if self.refused <= SHOWN:
            self.say(f"left out: {key}: {reason}")
        if self.refused >= HOPELESS and not self.tokens:
            raise UserError(f"the first {self.refused} conversations were all refused, the last one because: {reason}")
