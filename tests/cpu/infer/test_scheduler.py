"""The scheduler: first come, first served, as far as places and blocks go, and everything back at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.errors import UserError
from infer.blocks import BlockPool
from infer.request import Request, SamplingParams
from infer.scheduler import Scheduler


def _request(name: str, max_tokens: int) -> Request:
    return Request(name, (1,), SamplingParams(), frozenset(), max_tokens, [1])


def _names(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def test_requests_join_in_order_up_to_the_batch_size() -> None:
    scheduler = Scheduler(BlockPool(10, 16), batch_size=2)
    for name in "abc":
        scheduler.submit(_request(name, 20))
    assert _names(scheduler.admit()) == ["a", "b"] and scheduler.admit() == []
    assert scheduler.blocks == {"a": (0, 1), "b": (2, 3)} and scheduler.pool.num_free == 6
    scheduler.release("a")
    assert _names(scheduler.admit()) == ["c"] and scheduler.blocks["c"] == (0, 1)


def test_a_request_that_has_to_wait_for_blocks_is_not_overtaken() -> None:
    scheduler = Scheduler(BlockPool(4, 16), batch_size=4)
    for name, size in (("small", 16), ("large", 64), ("late", 16)):
        scheduler.submit(_request(name, size))
    assert _names(scheduler.admit()) == ["small"] and _names(list(scheduler.waiting)) == ["large", "late"]
    scheduler.release("small")
    assert _names(scheduler.admit()) == ["large"]
    scheduler.release("large")
    assert _names(scheduler.admit()) == ["late"]


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(BlockPool(2, 16), batch_size=1)
    scheduler.submit(_request("fits", 32))
    with pytest.raises(UserError, match=r"request big may grow to 33 tokens, the KV pool holds 32: .* raise kv_tokens"):
        scheduler.submit(_request("big", 33))
    assert _names(list(scheduler.waiting)) == ["fits"]


def test_a_waiting_request_can_be_taken_out() -> None:
    scheduler = Scheduler(BlockPool(2, 16), batch_size=1)
    for name in "abc":
        scheduler.submit(_request(name, 16))
    scheduler.admit()
    dropped = scheduler.drop_waiting("b")
    assert dropped is not None and dropped.id == "b"
    assert scheduler.drop_waiting("a") is None, "it runs"
    assert scheduler.drop_waiting("nobody") is None and _names(list(scheduler.waiting)) == ["c"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_all_are_served_in_order_and_the_pool_is_whole_again(sizes: list[int], batch_size: int, random: object) -> None:
    scheduler = Scheduler(BlockPool(5, 16), batch_size)
    for i, size in enumerate(sizes):
        scheduler.submit(_request(str(i), size))
    served: list[str] = []
    while scheduler.waiting or scheduler.running:
        served += _names(scheduler.admit())
        assert 1 <= len(scheduler.running) <= batch_size
        owned = [block for blocks in scheduler.blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)) == 5 - scheduler.pool.num_free
        assert all(len(scheduler.blocks[r.id]) * 16 >= r.max_tokens for r in scheduler.running.values())
        scheduler.release(random.choice(sorted(scheduler.running)))  # type: ignore[attr-defined]
    assert served == [str(i) for i in range(len(sizes))] and scheduler.pool.num_free == 5 and scheduler.blocks == {}
