"""fp32, greedy: AR, SD and SSD write the same tokens under every policy, fallback, number of refreshes and batch size,
all combined.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.ipc.messages import Source
from tests.trained import random_prompts, run

NEW = 24
POLICIES, FALLBACKS, REFRESHES, BATCHES = ("uniform", "geometric"), ("jit", "ngram", "none"), (0, 1, 3), (1, 4, 16)
ALL = list(itertools.product(POLICIES, FALLBACKS, REFRESHES, BATCHES))


@pytest.fixture(scope="module")
def prompts(pair: tuple[Target, Path]) -> list[list[int]]:
    """Sixteen: a full batch of the largest size; half of them the drafter was trained on."""
    vocab = pair[0].facts.vocab_size
    return random_prompts(48, 4, vocab, seed=5)[:8] + [
        random_prompts(1, n, vocab, seed=n)[0] for n in (1, 2, 15, 16, 17, 31, 32, 33)
    ]


def _settings(pair: tuple[Target, Path], **changes: Any) -> EngineSettings:
    devices: dict[str, Any] = {"target_devices": ("cpu",), "draft_devices": ("cpu",)}
    base = {"lookahead": 3, "budget": 20, "max_model_len": 96, "prefill_tokens": 40}
    return EngineSettings(target="", drafter=str(pair[1]), dtype="float32", **devices, **{**base, **changes})


@pytest.mark.long
def test_every_combination_writes_the_same_tokens(pair: tuple[Target, Path], prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW)
    expected = [r.new_tokens for r in run(_settings(pair), Mode.AR, pair[0], prompts, params)]
    wrong = {}
    for batch_size in BATCHES:
        for mode in (Mode.AR, Mode.SD):
            if [
                r.new_tokens for r in run(_settings(pair, batch_size=batch_size), mode, pair[0], prompts, params)
            ] != expected:
                wrong[mode, batch_size] = "differs"
    for policy, fallback, refresh, batch_size in ALL:
        settings = _settings(pair, policy=policy, fallback=fallback, refresh=refresh, batch_size=batch_size)
        requests = run(settings, Mode.SSD, pair[0], prompts, params)
        if [r.new_tokens for r in requests] != expected:
            wrong[policy, fallback, refresh, batch_size] = "differs"
        sources = {record.source for request in requests for record in request.rounds}
        assert {Source.HIT, Source(fallback)} <= sources, (policy, fallback, refresh, batch_size, sources)
    assert not wrong, wrong


@pytest.mark.long
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_forced_misses_change_no_token(pair: tuple[Target, Path], prompts: list[list[int]], fallback: str) -> None:
    """A budget of one branch for four outcomes' places misses nearly always."""
    params = SamplingParams(max_new_tokens=NEW)
    expected = [r.new_tokens for r in run(_settings(pair), Mode.AR, pair[0], prompts, params)]
    for batch_size, kv_tokens in ((1, None), (4, 160), (16, 320)):
        settings = _settings(pair, budget=1, fallback=fallback, batch_size=batch_size, kv_tokens=kv_tokens)
        requests = run(settings, Mode.SSD, pair[0], prompts, params)
        assert [r.new_tokens for r in requests] == expected
        sources = [record.source for request in requests for record in request.rounds]
        assert sources.count(Source(fallback)) > 2 * sources.count(Source.HIT)
