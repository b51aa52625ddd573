"""The engine under load gives the tokens it gives alone: chunked prompts, a pool too small for all, cached beginnings,
cancels, limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.engine import Engine
from infer.engine.request import FinishReason, Request, SamplingParams
from infer.launch import launch
from tests.trained import drain, random_prompts, run

NEW, BLOCK = 24, 16
GREEDY = SamplingParams(max_new_tokens=NEW)


@pytest.fixture(scope="module")
def prompts(pair: tuple[Target, Path]) -> list[list[int]]:
    """Lengths around blocks and chunks of 16; the first three the drafter was trained on."""
    vocab = pair[0].facts.vocab_size
    return random_prompts(6, 4, vocab, seed=5)[:3] + [
        random_prompts(1, n, vocab, seed=n)[0] for n in (15, 16, 17, 40, 47, 48, 49)
    ]


@pytest.fixture(scope="module")
def expected(pair: tuple[Target, Path], prompts: list[list[int]]) -> list[list[int]]:
    return [r.new_tokens for r in run(_settings(pair, prefill_tokens=999), Mode.AR, pair[0], prompts, GREEDY)]


def _settings(pair: tuple[Target, Path], **changes: Any) -> EngineSettings:
    base = {"lookahead": 3, "budget": 24, "max_model_len": 96, "target_devices": ("cpu",), "draft_devices": ("cpu",)}
    return EngineSettings(target="", drafter=str(pair[1]), dtype="float32", **{**base, **changes})


def _engine(pair: tuple[Target, Path], mode: Mode = Mode.SSD, **changes: Any) -> Engine:
    return launch(_settings(pair, **changes), mode, pair[0], in_process=True)


def _answer(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> Request:
    name = engine.submit(prompt, params)
    return drain(engine)[name]


def _drafter_is_idle(engine: Engine) -> bool:
    """Asks the drafter, as an idle engine does: its requests are gone and its blocks free."""
    for _ in range(2):  # the ping goes out, and its answer is taken in; what is wrong there ends the drafter
        engine.check_idle()
    return engine.draft_alive


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("prefill_tokens", [1, 7, 16])
def test_prompts_read_in_chunks_beside_decoding_requests_change_no_token(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], mode: Mode, prefill_tokens: int
) -> None:
    requests = run(_settings(pair, batch_size=4, prefill_tokens=prefill_tokens), mode, pair[0], prompts, GREEDY)
    assert [r.new_tokens for r in requests] == expected


def test_the_first_token_is_shown_in_the_round_that_sampled_it(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with _engine(pair, prefill_tokens=16) as engine:
        engine.submit(prompts[6], GREEDY)
        shown = [[list(output.new_token_ids) for output in engine.step()] for _ in range(3)]
        assert shown == [[], [], [expected[6][:1]]], (
            "40 tokens are three chunks; the last one's forward gives the first token"
        )
        assert engine.draft_client._channel.worker.requests == {}, "it is shown before its speculation is drafted"  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_pool_too_small_for_all_loses_and_repeats_no_token(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], mode: Mode
) -> None:
    """Seven blocks, and ten requests of up to five: who came last starts over, and its answer goes on where it was."""
    preempted = []
    with _engine(pair, mode, batch_size=4, kv_tokens=7 * BLOCK) as engine:
        preempt = engine.scheduler._preempt_last
        engine.scheduler._preempt_last = lambda: preempted.append(running := preempt()) or running  # type: ignore[method-assign]
        names = [engine.submit(prompt, GREEDY) for prompt in prompts]
        ended: dict[str, Request] = {}
        shown: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            for output in engine.step():
                shown[output.request_id] += output.new_token_ids
                if output.finish_reason:
                    ended[output.request_id] = output.request
            engine.check()
        assert mode is Mode.AR or _drafter_is_idle(engine)
    assert [ended[name].new_tokens for name in names] == [shown[name] for name in names] == expected
    assert any(len(running.request.prompt_ids) < running.num_computed for running in preempted), (
        "nobody was sent away in the middle of an answer"
    )


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_prompt_that_was_there_before_is_computed_from_its_last_full_block_on(
    pair: tuple[Target, Path], mode: Mode, length: int
) -> None:
    prompt = random_prompts(1, length, pair[0].facts.vocab_size, seed=length)[0]
    alone = run(_settings(pair, prefix_cache=False), mode, pair[0], [prompt], GREEDY)[0].new_tokens
    with _engine(pair, mode) as engine:
        assert _answer(engine, prompt).new_tokens == alone
        engine.submit(prompt, GREEDY, "again")
        chunks = engine.scheduler.schedule().chunks
        assert chunks[0].rows == length - (length - 1) // BLOCK * BLOCK
        assert drain(engine)["again"].new_tokens == alone
        if mode is not Mode.AR:
            worker = engine.draft_client._channel.worker  # type: ignore[union-attr]
            found = worker.model.blocks.match_prefix(prompt[0], prompt[1:], 9)
            assert len(found) == (length - 1) // BLOCK, (
                "the drafter keeps what the target keeps: full blocks of true slots"
            )
            assert _drafter_is_idle(engine)


def test_a_second_turn_hits_on_both_sides_and_changes_no_token(
    pair: tuple[Target, Path], prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with _engine(pair) as engine:
        first = _answer(engine, prompts[6], params)
        second = [*first.tokens, 7, 8, 9]
        worker = engine.draft_client._channel.worker  # type: ignore[union-attr]
        pools = (
            engine.runner.blocks.match_prefix("prompt", second, 9),
            worker.model.blocks.match_prefix(second[0], second[1:], 9),
        )
        assert [len(found) for found in pools] == [3, 3], "40 + 24 tokens: 63 were computed, so three full blocks"
        cached = _answer(engine, second, params)
    with _engine(pair, prefix_cache=False) as engine:
        fresh = _answer(engine, second, params)
    assert cached.new_tokens == fresh.new_tokens
    assert [r.accepted for r in cached.rounds] == [r.accepted for r in fresh.rounds], (
        "its speculations are the same too"
    )


def test_a_beginning_that_only_the_target_has_is_drafted_from_its_kept_features(
    pair: tuple[Target, Path], prompts: list[list[int]]
) -> None:
    """A drafter that was started again knows nothing; the target's cache has keys and features."""
    with _engine(pair) as engine:
        first = _answer(engine, prompts[6])
        engine.draft_client._give_up("a test wants it so")
        engine.draft_client._next_start = 0.0
        engine.check_idle()
        assert engine.draft_alive
        again = _answer(engine, prompts[6])
        assert again.new_tokens == first.new_tokens
        assert [r.accepted for r in again.rounds] == [r.accepted for r in first.rounds]


@pytest.mark.parametrize("moment", range(6))
def test_a_cancel_at_any_round_leaves_nothing_behind(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], moment: int
) -> None:
    """Between two steps a speculation may be asked for, prepared, or on its way: moment 0 is before anything ran."""
    with _engine(pair, batch_size=2, prefill_tokens=16) as engine:
        names = [engine.submit(prompts[i], GREEDY) for i in (6, 0, 1)]
        for _ in range(moment):
            engine.step()
        engine.cancel(names[0])
        engine.check()
        ended = drain(engine)
        assert ended[names[0]].finish_reason is FinishReason.CANCEL
        assert expected[6][: len(ended[names[0]].new_tokens)] == ended[names[0]].new_tokens
        assert [ended[names[1]].new_tokens, ended[names[2]].new_tokens] == expected[:2]
        assert _drafter_is_idle(engine)


@pytest.mark.parametrize("mode", [Mode.SD, Mode.SSD])
def test_every_length_around_the_context_limit(pair: tuple[Target, Path], mode: Mode) -> None:
    """Prompts of max_len - K - 2 .. max_len + 1 tokens: the answer is AR's, exactly as long as fits; what leaves no
    room is refused.
    """
    limit, lookahead = 48, 5
    params = SamplingParams(max_new_tokens=99, ignore_eos=True)
    changes = {"max_model_len": limit, "lookahead": lookahead, "batch_size": 4}
    prompts = [random_prompts(1, n, pair[0].facts.vocab_size, seed=n)[0] for n in range(limit - lookahead - 2, limit)]
    alone = [r.new_tokens for r in run(_settings(pair, **changes), Mode.AR, pair[0], prompts, params)]
    requests = run(_settings(pair, **changes), mode, pair[0], prompts, params)
    assert [r.new_tokens for r in requests] == alone
    assert [len(r.tokens) for r in requests] == [limit] * len(prompts)
    with _engine(pair, mode, **changes) as engine:
        for length in (limit, limit + 1):
            with pytest.raises(Exception, match=f"the prompt has {length} tokens, max_model_len is {limit}"):
                engine.submit(list(range(3, 3 + length)), params)


def test_a_drafter_with_little_memory_drafts_for_whom_it_can_hold(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """It says so when it is ready; the others go on without speculations until there is room."""
    with _engine(pair, batch_size=3) as engine:
        ready = engine.draft_client._ready
        assert ready is not None
        short = type(ready)(ready.pid, 1, ready.tokens, ready.block_size, ready.scratch_tokens)
        engine.draft_client._ready = short
        worker = engine.draft_client._channel.worker  # type: ignore[union-attr]
        names, most = [engine.submit(prompt, GREEDY) for prompt in prompts[:6]], 0
        ended: dict[str, Request] = {}
        while engine.has_work:
            ended |= {o.request_id: o.request for o in engine.step() if o.finish_reason}
            most = max(most, len(worker.requests))
        assert most == 1
    assert [ended[name].new_tokens for name in names] == expected[:6]
