"""What the engine emits is distributed as the target's own samples after the request's own processing, on every path.

A target over 6 tokens, so that the exact distribution of an answer's first five tokens can be enumerated (1555
contexts, processed by the plain twins). Tokens 3 and 4 are compared one by one (6 cells) and as a pair (36 cells): by
then a request has had look-ups that hit or missed. Power at level 1e-5, w^2 = sum (actual - target)^2 / target: an
effect is found with probability 0.9 where n w^2 = 54 (pair) or 43 (one token), that is w = 0.23 and 0.21 with n = 1000
answers; the broken verifier below has w > 0.3. Cells of which fewer than three answers are expected count as one:
alone, one answer too many there would weigh too much at this level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infer.engine.engine
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import Request, SamplingParams
from infer.ipc.messages import Source
from infer.kernels.attention.context import DocumentContext
from infer.kernels.sampling import reference
from infer.kernels.sampling.accept import accept_greedy
from infer.kernels.sampling.adjust import Text
from infer.kernels.sampling.sample import greedy_ids
from infer.kernels.sampling.verdict import Verdict
from infer.launch import launch
from tests.tiny import save_tiny_drafter, save_tiny_target
from tests.trained import drain

VOCAB, ANSWERS, LENGTH, LEVEL = 6, 1000, 5, 1e-5
PROMPT = [1, 4, 3, 0, 5]
Exact = Callable[[SamplingParams], Tensor]  # P(token 3, token 4) of an answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    place = tmp_path_factory.mktemp("distribution")
    target = load_target(str(save_tiny_target(place / "target", vocab_size=VOCAB, sharpness=1.2)), "float32")
    return target, save_tiny_drafter(place / "tiny-eagle3", target, draft_vocab_size=VOCAB - 1)


@pytest.fixture(scope="module")
def exact(pair: tuple[Target, Path]) -> Exact:
    return cache(partial(_exact, _logits(pair[0])))


def _logits(target: Target) -> list[Tensor]:
    """The target's logits after the prompt and each possible answer of 0..4 tokens, [V^n, V] in the order of
    `product`.
    """
    tables = []
    for length in range(LENGTH):
        answers = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)), dtype=torch.int64)
        ids = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.inference_mode():
            context = DocumentContext(torch.ones_like(ids))
            tables.append(
                target.model(input_ids=ids, position_ids=positions, use_cache=False, context=context).logits[:, -1]
            )
    return tables


def _exact(logits: list[Tensor], params: SamplingParams) -> Tensor:
    """P(token 3, token 4) [V, V] of an answer (counted from 0), by enumeration of all that may come before."""
    weights = torch.ones(1, dtype=torch.float64)
    for length, table in enumerate(logits):
        texts = [Text(PROMPT, answer) for answer in itertools.product(range(VOCAB), repeat=length)]
        sampling = params.sampling
        rows = [
            reference.adjust_logits(row[None], sampling, text, [[]]) for row, text in zip(table, texts, strict=True)
        ]
        probs = reference.process_logits(torch.cat(rows), [sampling] * len(rows)).double()
        weights = (weights[:, None] * probs).flatten()
    return weights.view(-1, VOCAB, VOCAB).sum(0)


PLAIN = SamplingParams(temperature=1.0, max_new_tokens=LENGTH + 2, ignore_eos=True)


def _answers(pair: tuple[Target, Path], mode: Mode, asked: Sequence[SamplingParams], **changes: Any) -> list[Request]:
    """Finished requests in the order of `asked`; each has its place as seed, unless it names one. They leave the batch
    one by one.
    """
    base = {"lookahead": 2, "budget": 9, "policy": "uniform", "batch_size": 64, "max_model_len": 32}
    settings = EngineSettings(
        target="", drafter=str(pair[1]), dtype="float32", target_devices=("cpu",), **{**base, **changes}
    )
    with launch(settings, mode, pair[0], in_process=True) as engine:
        names = [engine.submit(PROMPT, _with_place(params, place)) for place, params in enumerate(asked)]
        ended = drain(engine)
    return [ended[name] for name in names]


def _with_place(params: SamplingParams, place: int) -> SamplingParams:
    seed = place if params.seed is None else params.seed
    return replace(params, seed=seed, max_new_tokens=params.max_new_tokens + place % 3)


def _chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, over the cells that can come."""
    rare = expected < 3
    counts, expected = (torch.cat([cells[~rare], cells[rare].sum()[None]]) for cells in (counts, expected))
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum()), int(possible.sum()) - 1


def _p_value(counts: Tensor, expected: Tensor) -> float:
    """Of a chi-square test; 0 where something came that cannot come."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    statistic, freedom = _chi_square(counts, expected)
    return (
        float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))
        if freedom
        else 1.0
    )


def _p_values(requests: list[Request], exact: Tensor) -> list[float]:
    pairs = torch.tensor([request.new_tokens[3:5] for request in requests])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs), dtype=torch.float64), accumulate=True)
    expected = exact * len(requests)
    return [
        _p_value(counts, expected),
        _p_value(counts.sum(1), expected.sum(1)),
        _p_value(counts.sum(0), expected.sum(0)),
    ]


PATHS = {
    "sd": (Mode.SD, {}, {Source.SYNC}),
    "hit": (Mode.SSD, {"budget": 18}, {Source.HIT}),
    "jit": (Mode.SSD, {"budget": 1}, {Source.JIT}),
    "ngram": (Mode.SSD, {"budget": 1, "fallback": "ngram"}, {Source.NGRAM}),
    "none": (Mode.SSD, {"budget": 1, "fallback": "none"}, {Source.NONE}),
    "mixed": (Mode.SSD, {"budget": 7, "refresh": 1}, {Source.HIT, Source.JIT}),
    "saguaro": (Mode.SSD, {"budget": 7, "saguaro_c": 0.3}, {Source.HIT, Source.JIT}),
}


def _check_sources(requests: list[Request], sources: set[Source]) -> None:
    seen = [r.source for request in requests for r in request.rounds if r.source is not Source.FIRST]
    assert all(seen.count(source) > 0.2 * len(seen) for source in sources), {s: seen.count(s) for s in set(seen)}
    assert any(r.accepted for request in requests for r in request.rounds) or sources == {Source.NONE}


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_distributed_as_the_targets_own(pair: tuple[Target, Path], exact: Exact, path: str) -> None:
    mode, changes, sources = PATHS[path]
    asked = (
        replace(PLAIN, seed=3).choices(ANSWERS) if path == "mixed" else [PLAIN] * ANSWERS
    )  # also as n answers to one prompt
    requests = _answers(pair, mode, asked, **changes)
    _check_sources(requests, sources)
    p_values = _p_values(requests, exact(PLAIN))
    assert min(p_values) > LEVEL, p_values


KINDS = {
    "temperature": replace(PLAIN, temperature=0.4),
    "top_k": replace(PLAIN, top_k=2),
    "top_p": replace(PLAIN, top_p=0.6),
    "min_p": replace(PLAIN, min_p=0.4),
    "presence": replace(PLAIN, presence_penalty=2.0),
    "frequency": replace(PLAIN, frequency_penalty=-1.5),
    "repetition": replace(PLAIN, repetition_penalty=0.4),
    "bias": replace(PLAIN, logit_bias=((2, 1.5), (0, -2.0))),
}
KINDS["all"] = replace(
    PLAIN,
    temperature=0.8,
    top_k=5,
    top_p=0.95,
    min_p=0.02,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias=((2, 2.0),),
)
FEW = 150  # an effect of w = 0.6 is found with probability 0.9


def test_each_sampling_parameter_in_a_batch_that_mixes_them_and_greedy(
    pair: tuple[Target, Path], exact: Exact
) -> None:
    """Every kind has to be told from plain sampling, or the test would pass with the parameter ignored."""
    greedy = [
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5),
    ]
    kinds = [*KINDS.values(), *greedy]
    requests = _answers(pair, Mode.SSD, kinds * FEW, budget=7)
    _check_sources(requests, {Source.HIT, Source.JIT})
    plain = exact(PLAIN)
    for i, (name, params) in enumerate(KINDS.items()):
        own = exact(params)
        assert bool((plain[own == 0] > 0).any()) or _chi_square(plain * FEW, own * FEW)[0] > 54, name
        p_values = _p_values(requests[i :: len(kinds)], own)
        assert min(p_values) > LEVEL, (name, p_values)
    for i, alone in enumerate(_answers(pair, Mode.AR, greedy), start=len(KINDS)):
        answers = [request.new_tokens[:LENGTH] for request in requests[i :: len(kinds)]]
        assert answers == [alone.new_tokens[:LENGTH]] * FEW


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_each_sampling_parameter_alone_on_each_path(
    pair: tuple[Target, Path], exact: Exact, path: str, kind: str
) -> None:
    mode, changes, _ = PATHS[path]
    p_values = _p_values(_answers(pair, mode, [KINDS[kind]] * FEW, **changes), exact(KINDS[kind]))
    assert min(p_values) > LEVEL, p_values


def test_greedy_acceptance_under_sampling_is_found(
    pair: tuple[Target, Path], exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference engine's fault: sampled drafts judged by the argmax."""

    def greedy(logits_RV: Tensor, rows: list[Any]) -> list[Verdict]:
        argmax = greedy_ids(logits_RV)
        return [accept_greedy(argmax[row.rows], row.drafted) for row in rows]

    monkeypatch.setattr(infer.engine.engine, "verify_rows", greedy)
    assert min(_p_values(_answers(pair, Mode.SSD, [PLAIN] * ANSWERS), exact(PLAIN))) < 1e-6
