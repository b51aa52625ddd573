"""What the engine emits at temperature 1 is distributed as the target's own samples, on every path.

A target over 6 tokens, so that the exact distribution of an answer's first five tokens can be enumerated (7776 answers). Tokens 3
and 4 are compared one by one (6 cells) and as a pair (36 cells): by then a request has had look-ups that hit or missed. Power: with
n = 1500 answers and level 1e-5, an effect of w = 0.19 (pair) or w = 0.17 (one token) is found with probability 0.9,
w^2 = sum (actual - target)^2 / target; the broken verifier below has w > 0.3.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infer.engine
from drafters.targets import Target, load_target
from infer.config import EngineSettings, Mode
from infer.kernels.accept import Verdict, accept_greedy
from infer.kernels.paged_attention import DocumentContext
from infer.kernels.sample import greedy_ids
from infer.launch import launch
from infer.request import Request, SamplingParams, Source
from tests.tiny import save_tiny_drafter, save_tiny_target

VOCAB, ANSWERS, LENGTH, LEVEL = 6, 1500, 5, 1e-5
PROMPT = [1, 4, 3, 0, 5]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    place = tmp_path_factory.mktemp("distribution")
    target = load_target(str(save_tiny_target(place / "target", vocab_size=VOCAB, sharpness=1.2)), "float32")
    return target, save_tiny_drafter(place / "tiny-eagle3", target, draft_vocab_size=VOCAB - 1)


@pytest.fixture(scope="module")
def exact(pair: tuple[Target, Path]) -> Tensor:
    """P(token 3, token 4) [V, V] of an answer (counted from 0), by enumeration of all that may come before."""
    target = pair[0]
    answers = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    log_p = torch.zeros(len(answers), dtype=torch.float64)
    for part in torch.arange(len(answers)).split(2048):
        ids = torch.cat([torch.tensor(PROMPT).expand(len(part), -1), answers[part]], dim=1)
        context = DocumentContext(torch.ones_like(ids))
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.inference_mode():
            logits = target.model(input_ids=ids, position_ids=positions, use_cache=False, context=context).logits
        step = logits[:, len(PROMPT) - 1 : -1].double().log_softmax(-1)
        log_p[part] = step.gather(-1, answers[part][..., None])[..., 0].sum(-1)
    table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    return table.index_put_((answers[:, 3], answers[:, 4]), log_p.exp(), accumulate=True)


def _answers(pair: tuple[Target, Path], mode: Mode, **changes: Any) -> list[Request]:
    base = {"lookahead": 2, "budget": 9, "policy": "uniform", "batch_size": 16, "max_model_len": 32}
    settings = EngineSettings(target="", drafter=str(pair[1]), dtype="float32", target_devices=("cpu",), **{**base, **changes})
    ended = []
    with launch(settings, mode, pair[0], in_process=True) as engine:
        for seed in range(ANSWERS):
            engine.submit(PROMPT, SamplingParams(max_new_tokens=LENGTH + 2, temperature=1.0, seed=seed, ignore_eos=True))
        while engine.has_work:
            ended += [output.request for output in engine.step() if output.finish_reason]
    return ended


def _p_value(counts: Tensor, expected: Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64), statistic / 2))


def _p_values(requests: list[Request], exact: Tensor) -> list[float]:
    pairs = torch.tensor([request.new_tokens[3:5] for request in requests])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs), dtype=torch.float64), accumulate=True)
    expected = exact * len(requests)
    return [_p_value(counts, expected), _p_value(counts.sum(1), expected.sum(1)), _p_value(counts.sum(0), expected.sum(0))]


PATHS = {
    "sd": (Mode.SD, {}, {Source.SYNC}),
    "hit": (Mode.SSD, {"budget": 18}, {Source.HIT}),
    "jit": (Mode.SSD, {"budget": 1}, {Source.JIT}),
    "ngram": (Mode.SSD, {"budget": 1, "fallback": "ngram"}, {Source.NGRAM}),
    "none": (Mode.SSD, {"budget": 1, "fallback": "none"}, {Source.NONE}),
    "mixed": (Mode.SSD, {"budget": 7, "refresh": 1}, {Source.HIT, Source.JIT}),
    "saguaro": (Mode.SSD, {"budget": 7, "saguaro_c": 0.3}, {Source.HIT, Source.JIT}),
}


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_distributed_as_the_targets_own(pair: tuple[Target, Path], exact: Tensor, path: str) -> None:
    mode, changes, sources = PATHS[path]
    requests = _answers(pair, mode, **changes)
    seen = [r.source for request in requests for r in request.rounds if r.source is not Source.FIRST]
    assert all(seen.count(source) > 0.25 * len(seen) for source in sources), {s: seen.count(s) for s in set(seen)}
    assert any(r.accepted for request in requests for r in request.rounds) or path == "none"
    p_values = _p_values(requests, exact)
    assert min(p_values) > LEVEL, p_values


def test_greedy_acceptance_under_sampling_is_found(pair: tuple[Target, Path], exact: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference engine's fault: sampled drafts judged by the argmax."""

    def greedy(logits_RV: Tensor, rows: list[Any]) -> list[Verdict]:
        argmax = greedy_ids(logits_RV)
        return [accept_greedy(argmax[row.start : row.start + len(row.drafted) + 1], row.drafted) for row in rows]

    monkeypatch.setattr(infer.engine, "verify_rows", greedy)
    assert min(_p_values(_answers(pair, Mode.SSD), exact)) < 1e-6
