"""Random lives of an engine against a plain model of what must hold.

Requests come, are cancelled, preempted and find beginnings again; the drafter stalls, dies and comes back, in any
order. After every step: shown tokens are the ones that have to come, in order, none twice; both sides' books are
right; at the end everything is free. Reads that find a wrong key fail where they happen (`simulation`).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import infer.engine.draft_client as drafting_module
from drafters.base.errors import UserError
from infer.config import Mode
from infer.engine.draft_client import DraftState
from infer.engine.request import FinishReason, SamplingParams
from tests.cpu.infer.simulation import END, Simulation, answer
from tests.trained import drain

ROUNDS = 600  # more than any of these requests needs, alone or in company


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class EngineLife(RuleBasedStateMachine):
    """What may happen to an engine between two rounds, and the plain model: what each request has to answer, and what
    it has shown.
    """

    steps = 0  # of all lives

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        drafting_module.time = self.clock  # type: ignore[assignment]
        self.expected: dict[str, list[int]] = {}
        self.shown: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.running: list[str] = []
        self.cancelled: set[str] = set()
        self.count = 0

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        changes: dict[str, Any] = {
            "mode": data.draw(st.sampled_from([Mode.SSD, Mode.SSD, Mode.SSD, Mode.SD, Mode.AR])),
            "target_blocks": data.draw(st.sampled_from([8, 9, 12, 30])),
            "batch_size": data.draw(st.integers(1, 4)),
            "prefill_tokens": data.draw(st.sampled_from([1, 3, 7, 50])),
            "fallback": data.draw(st.sampled_from(["jit", "ngram", "none"])),
            "refresh": data.draw(st.integers(0, 2)),
        }
        self.sim = Simulation(**changes)

    @rule(
        beginning=st.integers(0, 2),
        shared=st.integers(0, 17),
        own=st.lists(st.integers(0, END - 1), max_size=4),
        most=st.integers(1, 20),
        ignore_eos=st.booleans(),
    )
    def submit(self, beginning: int, shared: int, own: list[int], most: int, ignore_eos: bool) -> None:
        """Prompts share beginnings of any length, around the blocks of 4 tokens."""
        prompt = [(beginning + i * i) % END for i in range(shared)] + own
        self._submit(prompt, most, ignore_eos)

    @precondition(lambda self: self.shown)
    @rule(data=st.data(), more=st.integers(0, 3), most=st.integers(1, 9))
    def another_turn(self, data: st.DataObject, more: int, most: int) -> None:
        """A prompt that goes on where an earlier request is, or has ended."""
        name = data.draw(st.sampled_from(sorted(self.shown)))
        self._submit([*self.prompts[name], *self.shown[name], *range(more)], most, False)

    @rule(rounds=st.integers(1, 4))
    def step(self, rounds: int) -> None:
        for _ in range(rounds):
            self._step()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running))
        self.sim.engine.cancel(name)
        self.cancelled.add(name)
        self._check()

    @rule()
    def drafter_stalls(self) -> None:
        if self.sim.draft_client.state is not DraftState.NONE:
            self.sim.channel.silent = True

    @rule()
    def drafter_speaks_again(self) -> None:
        if self.sim.draft_client.state is not DraftState.NONE:
            self.sim.channel.silent = False

    @rule()
    def drafter_dies(self) -> None:
        if self.sim.draft_client.state is not DraftState.NONE:
            self.sim.channel.dead = True

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def rest(self) -> None:
        self.sim.engine.check_idle()

    @invariant()
    def count_steps(self) -> None:
        EngineLife.steps += 1

    def teardown(self) -> None:
        """Whatever happened, everybody is answered, and then both pools are as empty as at the start."""
        if not hasattr(self, "sim"):
            return
        for _ in range(ROUNDS):
            if not self.sim.engine.has_work:
                break
            self._step()
        assert not self.running and not self.sim.engine.has_work, self.running
        assert self.sim.runner.blocks.num_free == self.sim.runner.blocks.num_blocks
        if self.sim.draft_client.state is not DraftState.NONE:
            self.drafter_speaks_again()
            for _ in range(8):
                self.clock.now += 61.0 if self.sim.draft_client.state is not DraftState.SERVING else 0.1
                self.sim.engine.check_idle()
            assert self.sim.draft_client.state is DraftState.SERVING
            assert not self.sim.worker.requests
            assert self.sim.worker.model.blocks.num_free == self.sim.worker.model.blocks.num_blocks

    def _submit(self, prompt: list[int], most: int, ignore_eos: bool) -> None:
        name = str(self.count)
        self.count += 1
        limit = self.sim.settings.max_model_len
        params = SamplingParams(max_new_tokens=most, ignore_eos=ignore_eos)
        if not prompt or len(prompt) >= limit:
            with pytest.raises(UserError, match="the prompt"):
                self.sim.engine.submit(prompt, params, name)
            return
        self.sim.engine.submit(prompt, params, name)
        self.expected[name] = answer(
            prompt, min(most, limit - len(prompt)), frozenset() if ignore_eos else frozenset({END})
        )
        self.shown[name], self.prompts[name] = [], prompt
        self.running.append(name)

    def _step(self) -> None:
        for output in self.sim.engine.step():
            name = output.request_id
            assert name in self.running, f"{name} has ended"
            self.shown[name] += output.new_token_ids
            expected = self.expected[name]
            assert self.shown[name] == expected[: len(self.shown[name])] == output.request.new_tokens
            if output.finish_reason is None:
                assert len(self.shown[name]) < len(expected)
                continue
            self.running.remove(name)
            if name in self.cancelled:
                assert output.finish_reason is FinishReason.CANCEL
            else:
                assert self.shown[name] == expected
                stopped = expected[-1] == END and END in output.request.stop_ids
                assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        self._check()

    def _check(self) -> None:
        self.sim.check()
        scheduler = self.sim.engine.scheduler
        order = [*map(int, scheduler.running), *(int(request.id) for request in scheduler.waiting)]
        assert order == sorted(order), "somebody was overtaken"


def _live(lives: int, steps: int) -> None:
    before = drafting_module.time
    too_slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    how = settings(
        max_examples=lives, stateful_step_count=steps, deadline=None, suppress_health_check=too_slow, database=None
    )
    try:
        run_state_machine_as_test(EngineLife, settings=how)
    finally:
        drafting_module.time = before


def test_random_lives() -> None:
    _live(lives=10, steps=30)


@pytest.mark.long
def test_ten_thousand_random_steps() -> None:
    until = EngineLife.steps + 10_000
    while EngineLife.steps < until:
        _live(lives=100, steps=50)


def test_the_simulation_finds_keys_that_were_never_written() -> None:
    """Power: a scheduler that publishes one block too many hands out keys that are not there."""
    sim = Simulation(mode=Mode.AR)
    scheduler = sim.engine.scheduler
    advance = scheduler.advance

    def too_early(running: Any, computed: int) -> None:
        advance(running, computed)
        if (running.num_cached + 1) * 4 <= len(running.request.tokens) and running.num_cached * 4 >= computed - 3:
            tokens = running.request.tokens[running.num_cached * 4 : running.num_cached * 4 + 4]
            running.prefix_hash = scheduler.pool.cache_block(
                running.blocks[running.num_cached], running.prefix_hash, tokens
            )
            running.num_cached += 1

    scheduler.advance = too_early  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        for name in "ab":
            sim.engine.submit(list(range(9)), SamplingParams(max_new_tokens=6, ignore_eos=True), name)
            sim.engine.step()
        drain(sim.engine)
