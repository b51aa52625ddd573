"""The scheduler against plain rules: first come first served, chunks of prompts, who gives way, and books that are
right.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base.errors import UserError
from infer.engine.request import Request, SamplingParams
from infer.engine.scheduler import Scheduler, SchedulerOutput
from infer.kernels.attention.block_pool import BlockPool


def _request(name: str, prompt: int, max_tokens: int, first: int = 0) -> Request:
    tokens = [first, *range(1, prompt)]
    return Request(name, tuple(tokens), SamplingParams(), frozenset(), max_tokens, tokens)


def _scheduler(
    blocks: int, batch_size: int = 4, lookahead: int = 0, prefill_tokens: int = 1000, size: int = 16
) -> Scheduler:
    return Scheduler(BlockPool(blocks, size), batch_size, lookahead, prefill_tokens)


def _apply(scheduler: Scheduler, scheduled: SchedulerOutput, token: int = 9) -> None:
    """Compute what was scheduled: every request that completes gains one token."""
    for chunk in scheduled.chunks:
        computed = chunk.running.num_computed + chunk.rows
        if chunk.completes:
            chunk.request.commit([token])
        scheduler.advance(chunk.running, computed)
        if chunk.request.finish_reason:
            scheduler.release(chunk.request.id)


def _plan(scheduled: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.rows, chunk.max_drafted) for chunk in scheduled.chunks]


def test_requests_join_in_order_up_to_the_batch_size() -> None:
    scheduler = _scheduler(10, batch_size=2)
    for name in "abc":
        scheduler.submit(_request(name, 10, 20, ord(name)))
    assert _plan(scheduler.schedule()) == [("a", 10, 0), ("b", 10, 0)]
    scheduler.release("a")
    assert list(scheduler.running) == ["b"]
    scheduler.schedule()
    assert list(scheduler.running) == ["b", "c"]


def test_a_round_reads_so_many_prompt_tokens_beside_those_that_decode() -> None:
    scheduler = _scheduler(100, prefill_tokens=16)
    scheduler.submit(_request("a", 5, 99, 1))
    _apply(scheduler, scheduler.schedule())
    scheduler.submit(_request("b", 20, 99, 2))
    scheduler.submit(_request("c", 20, 99, 3))
    plans = []
    for _ in range(4):
        scheduled = scheduler.schedule()
        plans.append(_plan(scheduled))
        _apply(scheduler, scheduled)
    assert plans == [
        [("a", 1, 0), ("b", 16, 0)],
        [("a", 1, 0), ("b", 4, 0), ("c", 12, 0)],
        [("a", 1, 0), ("b", 1, 0), ("c", 8, 0)],
        [("a", 1, 0), ("b", 1, 0), ("c", 1, 0)],
    ]


def test_a_request_that_has_to_wait_for_blocks_is_not_overtaken() -> None:
    scheduler = _scheduler(4)
    for name, size in (("small", 16), ("large", 60), ("late", 15)):
        scheduler.submit(_request(name, size, 64, ord(name[0])))
    assert _plan(scheduler.schedule()) == [("small", 16, 0)]
    scheduler.release("small")
    assert _plan(scheduler.schedule()) == [("large", 60, 0)]
    scheduler.release("large")
    assert _plan(scheduler.schedule()) == [("late", 15, 0)]


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    scheduler = _scheduler(2)
    scheduler.submit(_request("fits", 4, 32))
    with pytest.raises(
        UserError, match=r"request big may grow to 33 tokens, the KV pool holds 32: .* raise kv_tokens"
    ):
        scheduler.submit(_request("big", 4, 33))
    assert [request.id for request in scheduler.waiting] == ["fits"]


def test_a_waiting_request_can_be_taken_out() -> None:
    scheduler = _scheduler(2, batch_size=1)
    for name in "abc":
        scheduler.submit(_request(name, 16, 16))
    scheduler.schedule()
    dropped = scheduler.drop_waiting("b")
    assert dropped is not None and dropped.id == "b"
    assert scheduler.drop_waiting("a") is None, "it runs"
    assert scheduler.drop_waiting("nobody") is None and [r.id for r in scheduler.waiting] == ["c"]


def test_who_came_last_gives_way_keeps_its_tokens_and_comes_back_first() -> None:
    """Five blocks of 4: a and b start with two each, and one is free for the first of them that needs a third."""
    scheduler = _scheduler(6, size=4)
    for name in "abc":
        scheduler.submit(_request(name, 7 if name != "c" else 3, 16, ord(name)))
    rounds = []
    while "a" in scheduler.running or not rounds:
        rounds.append(scheduler.schedule())
        scheduler.check()
        _apply(scheduler, rounds[-1])
    preempted = [request.id for scheduled in rounds for request in scheduled.preempted]
    assert preempted[0] == "b" and "a" not in preempted
    b = next(request for request in scheduler.waiting if request.id == "b")
    assert b.new_tokens and scheduler.waiting[0] is b and [r.id for r in scheduler.waiting] == ["b", "c"]
    tokens = list(b.tokens)
    chunk = scheduler.schedule().chunks[0]
    assert chunk.request is b and b.tokens == tokens and chunk.running.num_computed + chunk.rows == len(tokens)


@pytest.mark.parametrize(("prompt", "cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_the_next_request_with_this_beginning_computes_only_the_rest(prompt: int, cached: int) -> None:
    """Full blocks are found again, but the newest token is always computed: its logits are wanted."""
    scheduler = _scheduler(10)
    for name in "ab":
        scheduler.submit(_request(name, prompt, 99))
        scheduled = scheduler.schedule()
        assert _plan(scheduled) == [(name, prompt - (cached if name == "b" else 0), 0)]
        _apply(scheduler, scheduled)
        scheduler.release(name)
        scheduler.check()


def test_a_second_turn_finds_the_answer_too() -> None:
    scheduler = _scheduler(10)
    scheduler.submit(_request("a", 20, 33))
    while "a" in scheduler.running or scheduler.waiting:
        _apply(scheduler, scheduler.schedule())
    second = Request("b", (), SamplingParams(), frozenset(), 99, [0, *range(1, 20), *[9] * 13, 5, 5])
    scheduler.submit(second)
    assert _plan(scheduler.schedule()) == [("b", 3, 0)], "32 tokens are cached: the last of the 33 was never computed"


def test_nothing_is_found_before_its_keys_are_written() -> None:
    scheduler = _scheduler(20, prefill_tokens=20)
    for name in "ab":
        scheduler.submit(_request(name, 40, 99))
    scheduler.schedule()
    assert all(scheduler.pool.match_prefix("prompt", _request("x", 40, 99).tokens, 2) == [] for _ in "x")
    assert scheduler.running["b"].num_computed == 0


@pytest.mark.parametrize(("room", "blocks", "drafted"), [(9, 9, 5), (5, 9, 4), (1, 9, 0), (9, 1, 3), (2, 9, 1)])
def test_a_speculation_is_cut_to_what_may_come_and_to_the_blocks(room: int, blocks: int, drafted: int) -> None:
    """A prompt of 12 and one answer token leave 3 slots of the first block; `room` tokens may still come, the last one
    a bonus.
    """
    scheduler = _scheduler(blocks, lookahead=5)
    scheduler.submit(_request("a", 12, min(13 + room, blocks * 16)))
    _apply(scheduler, scheduler.schedule())
    assert _plan(scheduler.schedule()) == [("a", 1, min(drafted, 2) if blocks == 1 else drafted)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 9),
    st.data(),
)
def test_all_are_served_in_order_and_the_pool_is_whole_again(
    sizes: list[tuple[int, int]], batch_size: int, prefill_tokens: int, data: st.DataObject
) -> None:
    """Whatever is preempted: the oldest one always gains, tokens are never lost, prompts are read in order, and all
    blocks come back.
    """
    scheduler = _scheduler(13, batch_size, lookahead=2, prefill_tokens=prefill_tokens, size=4)
    requests = [
        _request(str(i), prompt, prompt + new, data.draw(st.integers(0, 1))) for i, (prompt, new) in enumerate(sizes)
    ]
    for request in requests:
        scheduler.submit(request)
    rounds = 0
    while scheduler.waiting or scheduler.running:
        before = {r.id: list(r.tokens) for r in requests}
        scheduled = scheduler.schedule()
        scheduler.check()
        order = [int(name) for name in scheduler.running]
        assert order == sorted(order) and 1 <= len(order) <= batch_size
        assert not scheduler.waiting or max(order) < int(scheduler.waiting[0].id)
        assert scheduled.chunks[0].request.id == str(order[0]), "the oldest one gets on"
        assert sum(chunk.rows for chunk in scheduled.chunks if chunk.running.num_uncomputed > 1) <= prefill_tokens
        _apply(scheduler, scheduled)
        assert all(r.tokens[: len(before[r.id])] == before[r.id] for r in requests)
        rounds += 1
        assert rounds < 2000
    assert all(len(r.tokens) == r.max_tokens for r in requests)
    assert scheduler.pool.num_free == 13
