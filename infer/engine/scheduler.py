"""First-come scheduler with chunked prefill and prefix caching; preempts the newest request when KV blocks run out.

Requests run in the order of arrival and nobody is overtaken. The oldest one is never preempted, so every request
finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from drafters.base.errors import UserError
from infer.engine.request import Request
from infer.kernels.attention.block_pool import BlockPool

ROOT = "prompt"  # the parent of a text's first block in the prefix cache


@dataclass
class RunningRequest:
    """A running request with its KV blocks. The keys of its first `num_computed` tokens are written, and its first
    `num_cached` blocks are in the prefix cache.
    """

    request: Request
    blocks: tuple[int, ...]
    num_computed: int
    num_cached: int
    prefix_hash: Hashable  # of the last cached block; `ROOT` before the first

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys are not written: 1 between two verifications (the newest one), more during prefill."""
        return len(self.request.tokens) - self.num_computed


class ScheduledChunk(NamedTuple):
    """One request's part of a round: the next `rows` of its tokens, and at most `max_drafted` tokens of a speculation
    behind them.
    """

    running: RunningRequest
    rows: int
    max_drafted: int

    @property
    def request(self) -> Request:
        return self.running.request

    @property
    def completes(self) -> bool:
        """Whether the last row's logits give a new token."""
        return self.rows == self.running.num_uncomputed


class SchedulerOutput(NamedTuple):
    """What a round computes, in the order of the requests, and which requests were preempted for it."""

    chunks: list[ScheduledChunk]
    preempted: list[Request]


class Scheduler:
    """KV blocks of the running requests, and the queue of the waiting ones."""

    def __init__(
        self, pool: BlockPool, batch_size: int, lookahead: int, prefill_tokens: int, prefix_cache: bool = True
    ) -> None:
        self.pool, self.batch_size, self.lookahead, self.prefill_tokens = pool, batch_size, lookahead, prefill_tokens
        self.prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: dict[str, RunningRequest] = {}  # in the order of arrival
        self._preempted: list[Request] = []
        self._ids: set[str] = set()

    def knows(self, request_id: str) -> bool:
        """Whether a request of that id waits or runs."""
        return request_id in self._ids

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `UserError` for one that can never fit."""
        if self.pool.blocks_for(request.max_tokens) > self.pool.num_blocks:
            holds = self.pool.num_blocks * self.pool.block_size
            raise UserError(
                f"request {request.id} may grow to {request.max_tokens} tokens, the KV pool holds {holds}: "
                "lower max_new_tokens or raise kv_tokens"
            )
        self.waiting.append(request)
        self._ids.add(request.id)

    def schedule(self) -> SchedulerOutput:
        """Give the running requests blocks for their newest tokens, admit who fits, then share out the round's
        `prefill_tokens` among the requests in prefill.
        """
        for running in list(self.running.values()):
            if running.request.id in self.running:  # not preempted by one before it
                self._allocate_newest(running)
        while self.waiting and len(self.running) < self.batch_size and self._admit(self.waiting[0]):
            self.waiting.popleft()
        for running in self.running.values():
            self._allocate_speculation(running)
        chunks, left = [], self.prefill_tokens
        for running in self.running.values():
            uncomputed = running.num_uncomputed
            rows = 1 if uncomputed == 1 else min(uncomputed, left)
            left -= rows if uncomputed > 1 else 0
            if rows:
                chunks.append(ScheduledChunk(running, rows, self._max_drafted(running) if rows == uncomputed else 0))
        preempted, self._preempted = self._preempted, []
        return SchedulerOutput(chunks, preempted)

    def advance(self, running: RunningRequest, num_computed: int) -> None:
        """The keys of the first `num_computed` tokens are written: put the blocks that became full into the prefix
        cache.
        """
        tokens, size = running.request.tokens, self.pool.block_size
        assert running.num_computed < num_computed <= len(tokens), (running.num_computed, num_computed, len(tokens))
        running.num_computed = num_computed
        while (running.num_cached + 1) * size <= num_computed:
            start = running.num_cached * size
            block = running.blocks[running.num_cached]
            running.prefix_hash = self.pool.cache_block(block, running.prefix_hash, tokens[start : start + size])
            running.num_cached += 1

    def release(self, request_id: str) -> None:
        """Forget an ended request and free its blocks."""
        self.pool.free(self.running.pop(request_id).blocks)
        self._ids.discard(request_id)

    def drop_waiting(self, request_id: str) -> Request | None:
        """Take a request out of the queue, if it waits there."""
        found = next((r for r in self.waiting if r.id == request_id), None)
        if found:
            self.waiting.remove(found)
            self._ids.discard(request_id)
        return found

    def check(self) -> None:
        """Assert that every block is accounted for, and that each request's keys lie in its blocks."""
        self.pool.check([running.blocks for running in self.running.values()])
        for running in self.running.values():
            tokens, holds = len(running.request.tokens), len(running.blocks) * self.pool.block_size
            assert 0 <= running.num_computed < tokens <= holds + 1, (running.num_computed, tokens, holds)
            assert running.num_cached == running.num_computed // self.pool.block_size, running

    def _admit(self, request: Request) -> bool:
        """Give a request blocks for all its tokens, unless there are too few.

        A block for each running request has to stay free, to grow into: else the newcomer would be preempted at once.
        """
        tokens, size = request.tokens, self.pool.block_size
        most = (len(tokens) - 1) // size if self.prefix_cache else 0  # the newest token is always computed
        found = self.pool.match_prefix(ROOT, tokens, most)
        self.pool.incref(found)
        count = self.pool.blocks_for(len(tokens)) - len(found)
        room = self.pool.blocks_for(request.max_tokens) - len(found)
        new = None
        if count + len(self.running) <= self.pool.num_free:
            new = self.pool.allocate(count, room, after=found[-1] if found else None)
        if new is None:
            self.pool.free(found)
            return False
        prefix_hash = self.pool.block_hash(found[-1]) if found else ROOT
        self.running[request.id] = RunningRequest(request, (*found, *new), len(found) * size, len(found), prefix_hash)
        return True

    def _allocate_newest(self, running: RunningRequest) -> None:
        """Blocks for the newest token, if need be by preempting the request that came last."""
        while (count := self.pool.blocks_for(len(running.request.tokens)) - len(running.blocks)) > 0:
            if new := self.pool.allocate(count, after=running.blocks[-1]):
                running.blocks += new
            elif self._preempt_last() is running:
                return

    def _allocate_speculation(self, running: RunningRequest) -> None:
        """Blocks for a speculation, where some are free: without them it is cut, and nobody is preempted for it."""
        tokens = min(len(running.request.tokens) + self.lookahead, running.request.max_tokens)
        wanted = self.pool.blocks_for(tokens) - len(running.blocks)
        if running.num_uncomputed == 1 and wanted > 0:
            running.blocks += self.pool.allocate(wanted, after=running.blocks[-1]) or ()

    def _preempt_last(self) -> RunningRequest:
        """Preempt the request that came last: it goes to the head of the queue, keeps its tokens, and will compute
        their keys again.
        """
        _, running = self.running.popitem()
        assert self.running or self.pool.num_free, f"{running.request.id} runs alone and does not fit"
        self.pool.free(running.blocks)
        self.waiting.appendleft(running.request)
        self._preempted.append(running.request)
        return running

    def _max_drafted(self, running: RunningRequest) -> int:
        """How many drafted tokens fit behind the newest one: by the look-ahead, the tokens that may still come, and
        the blocks.
        """
        holds = len(running.blocks) * self.pool.block_size
        return max(0, min(self.lookahead, running.request.room - 1, holds - len(running.request.tokens)))
