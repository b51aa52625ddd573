"""Who runs, and what a round computes: places, KV blocks, chunks of prompts; who waits comes in order, and who came
last gives way.

Requests run in the order in which they came: nobody is overtaken, and the oldest one always gets on, so everybody's
turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from drafters.base.errors import UserError
from infer.engine.request import Request
from infer.kernels.attention.block_pool import BlockPool

ROOT = "prompt"  # what names the beginning of a text in the prefix cache


@dataclass
class Seat:
    """A running request with its blocks. The keys of its first `computed` tokens are written; `published` of its
    blocks can be found.
    """

    request: Request
    blocks: tuple[int, ...]
    computed: int
    published: int
    chain: Hashable  # what names the published blocks

    @property
    def missing(self) -> int:
        """Tokens whose keys are not written: 1 between two verifications (the newest one), more while a prompt is
        read.
        """
        return len(self.request.tokens) - self.computed


class Work(NamedTuple):
    """One request's part of a round: the next `rows` of its tokens, and up to `drafted` tokens of a speculation behind
    them.
    """

    seat: Seat
    rows: int
    drafted: int

    @property
    def completes(self) -> bool:
        """Whether the last row's logits give a new token."""
        return self.rows == self.seat.missing


class Round(NamedTuple):
    """What to compute, in the order of the requests, and who had to give up its place."""

    works: list[Work]
    preempted: list[Request]


class Scheduler:
    """Places and KV blocks of the running requests, and the queue of those that wait."""

    def __init__(
        self, pool: BlockPool, batch_size: int, lookahead: int, prefill_tokens: int, prefix_cache: bool = True
    ) -> None:
        self.pool, self.batch_size, self.lookahead, self.prefill_tokens = pool, batch_size, lookahead, prefill_tokens
        self.prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Seat] = {}  # in the order in which they came
        self._preempted: list[Request] = []
        self._names: set[str] = set()

    def knows(self, request_id: str) -> bool:
        """Whether a request of that name waits or runs."""
        return request_id in self._names

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit is refused at once."""
        if self.pool.blocks_for(request.max_tokens) > self.pool.num_blocks:
            holds = self.pool.num_blocks * self.pool.block_size
            raise UserError(
                f"request {request.id} may grow to {request.max_tokens} tokens, the KV pool holds {holds}: "
                "lower max_new_tokens or raise kv_tokens"
            )
        self.waiting.append(request)
        self._names.add(request.id)

    def schedule(self) -> Round:
        """Let the running ones grow, admit who fits, and share out the round's prompt tokens among those whose prompt
        is not read.
        """
        for seat in list(self.running.values()):
            if seat.request.id in self.running:
                self._grow(seat)
        while self.waiting and len(self.running) < self.batch_size and self._admit(self.waiting[0]):
            self.waiting.popleft()
        for seat in self.running.values():
            self._stretch(seat)
        works, left = [], self.prefill_tokens
        for seat in self.running.values():
            rows = 1 if seat.missing == 1 else min(seat.missing, left)
            left -= rows if seat.missing > 1 else 0
            if rows:
                works.append(Work(seat, rows, self._drafted(seat) if rows == seat.missing else 0))
        preempted, self._preempted = self._preempted, []
        return Round(works, preempted)

    def advance(self, seat: Seat, computed: int) -> None:
        """The keys of the first `computed` tokens are written: publish the blocks that became full."""
        assert seat.computed < computed <= len(seat.request.tokens), (
            seat.computed,
            computed,
            len(seat.request.tokens),
        )
        seat.computed, size = computed, self.pool.block_size
        while (seat.published + 1) * size <= computed:
            start = seat.published * size
            seat.chain = self.pool.cache_block(
                seat.blocks[seat.published], seat.chain, seat.request.tokens[start : start + size]
            )
            seat.published += 1

    def release(self, request_id: str) -> None:
        """Forget an ended request and free its blocks."""
        self.pool.free(self.running.pop(request_id).blocks)
        self._names.discard(request_id)

    def drop_waiting(self, request_id: str) -> Request | None:
        """Take a request out of the queue, if it waits there."""
        found = next((r for r in self.waiting if r.id == request_id), None)
        if found:
            self.waiting.remove(found)
            self._names.discard(request_id)
        return found

    def check(self) -> None:
        """Assert that the books are right: every block accounted for, requests inside their blocks but for the newest
        token.
        """
        self.pool.check([seat.blocks for seat in self.running.values()])
        for seat in self.running.values():
            holds = len(seat.blocks) * self.pool.block_size
            assert 0 <= seat.computed < len(seat.request.tokens) <= holds + 1, (
                seat.computed,
                len(seat.request.tokens),
                holds,
            )
            assert seat.published == seat.computed // self.pool.block_size, (seat.published, seat.computed)

    def _admit(self, request: Request) -> bool:
        """Give a request a place and blocks for all its tokens, unless there are too few.

        Those that run keep a block each to grow into: else who joins would at once be sent away again.
        """
        tokens = request.tokens
        most = (
            (len(tokens) - 1) // self.pool.block_size if self.prefix_cache else 0
        )  # the newest token has to be computed
        found = self.pool.match_prefix(ROOT, tokens, most)
        self.pool.incref(found)
        count = self.pool.blocks_for(len(tokens)) - len(found)
        room = self.pool.blocks_for(request.max_tokens) - len(found)
        new = (
            self.pool.allocate(count, room, after=found[-1] if found else None)
            if count + len(self.running) <= self.pool.num_free
            else None
        )
        if new is None:
            self.pool.free(found)
            return False
        computed, chain = len(found) * self.pool.block_size, self.pool.block_hash(found[-1]) if found else ROOT
        self.running[request.id] = Seat(request, (*found, *new), computed, len(found), chain)
        return True

    def _grow(self, seat: Seat) -> None:
        """Blocks for the newest token, if need be those of the request that came last."""
        while (count := self.pool.blocks_for(len(seat.request.tokens)) - len(seat.blocks)) > 0:
            if new := self.pool.allocate(count, after=seat.blocks[-1]):
                seat.blocks += new
            elif self._preempt_last() is seat:
                return

    def _stretch(self, seat: Seat) -> None:
        """Blocks for a speculation, where there are some: without them it is cut, and nobody has to leave for it."""
        tokens = min(len(seat.request.tokens) + self.lookahead, seat.request.max_tokens)
        wanted = self.pool.blocks_for(tokens) - len(seat.blocks)
        if seat.missing == 1 and wanted > 0 and (new := self.pool.allocate(wanted, after=seat.blocks[-1])):
            seat.blocks += new

    def _preempt_last(self) -> Seat:
        """Send the request that came last back to the head of the queue: it keeps its tokens, and computes their keys
        again.
        """
        _, seat = self.running.popitem()
        assert self.running or self.pool.num_free, f"{seat.request.id} runs alone and does not fit"
        self.pool.free(seat.blocks)
        self.waiting.appendleft(seat.request)
        self._preempted.append(seat.request)
        return seat

    def _drafted(self, seat: Seat) -> int:
        """How many drafted tokens fit behind the newest one: into the look-ahead, what may still come, and the blocks."""
        holds = len(seat.blocks) * self.pool.block_size
        return max(0, min(self.lookahead, seat.request.room - 1, holds - len(seat.request.tokens)))
