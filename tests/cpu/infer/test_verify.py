"""Verification is lossless on every path: the tokens it commits are distributed as the target's own samples.

A target and a drafter over 5 tokens, each a table p(next | last), the drafter over 4 of them only. Requests run with
real rounds until two tokens are committed; the pairs are compared with p(x1) p(x2 | x1) by chi-square (25 cells), the
first tokens too (5).

Power, with n = 4000 requests and a test at level 1e-4: an effect of w = 0.14 (two tokens) or w = 0.11 (one token) is
found with probability 0.99, w^2 = sum (actual - target)^2 / target. The broken verifiers below have w > 0.35; they
must fail at 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import infer.engine.verify
from infer.engine.verify import RowToVerify, verify_rows
from infer.kernels.sampling import reference
from infer.kernels.sampling.accept import accept, accept_greedy
from infer.kernels.sampling.adjust import Text
from infer.kernels.sampling.keyed_random import Purpose, uniforms
from infer.kernels.sampling.params import Sampling
from infer.kernels.sampling.saguaro import tilt
from infer.kernels.sampling.sample import process_logits, sample_from
from infer.kernels.sampling.verdict import Proposal, Verdict

N, VOCAB, LOOKAHEAD, START = 4000, 5, 2, 11
DRAFT_IDS = torch.tensor([0, 1, 3, 4])  # token 2 is outside the draft vocabulary
TARGET_LOGITS = torch.tensor(
    [
        [2.0, 1.0, 0.5, 0.0, -1.0],
        [0.0, 0.0, 1.0, 1.5, 0.5],
        [1.0, -0.5, 0.0, 1.0, 1.0],
        [0.0, 2.0, 0.5, 0.0, 1.0],
        [1, 0, 0, 0, 1],
    ]
)
DRAFT_LOGITS = torch.tensor(
    [[1.5, 2.0, 0.0, 1.0], [2.0, 0.0, 0.5, 1.5], [0.0, 1.0, 1.0, 0.0], [2.5, 0.5, 0.0, 0.0], [0.0, 1.0, 2.0, 1.0]]
)
LEVEL, BROKEN_LEVEL = 1e-4, 1e-6

Drafting = Callable[[list[int], list[int], list[int]], tuple[list[tuple[int, ...]], list[Proposal | None]]]
Judge = Callable[[Tensor, Sequence[int], Proposal | None, Sequence[float], Sequence[float]], Verdict]


def draft_drawn(last: list[int], seeds: list[int], positions: list[int], c: float = 1.0, report_tilted: bool = True):
    """What a hit or a JIT answer brings: tokens drawn one after another from (tilted) q, and the rows they were drawn
    from.
    """
    tokens, rows = torch.tensor(last), []
    drafted = []
    for place in range(1, LOOKAHEAD + 1):
        probs = DRAFT_LOGITS[tokens].softmax(-1)
        tilted = tilt(probs, 2, c).probs_RD
        draws = uniforms(seeds, [position + place for position in positions], Purpose.DRAFT, [place] * len(seeds))
        tokens = DRAFT_IDS[sample_from(tilted, draws)]
        drafted.append(tokens)
        rows.append(tilted if report_tilted else probs)
    stacked = torch.stack(rows, dim=1)
    return [tuple(d) for d in torch.stack(drafted, dim=1).tolist()], [Proposal(q, DRAFT_IDS) for q in stacked]


def draft_chosen(last: list[int], seeds: list[int], positions: list[int]):
    """What an n-gram look-up or a greedy drafter brings: a function of the text, token 2 outside the draft vocabulary
    included.
    """
    drafted: list[tuple[int, ...]] = [((token + 2) % VOCAB, (token + 4) % VOCAB)[: 1 + token % 2] for token in last]
    return drafted, [None] * len(last)


def draft_drawn_unreported(last: list[int], seeds: list[int], positions: list[int]):
    """Drawn tokens whose distributions did not cross: judged as chosen they cost acceptance, but nothing else."""
    return draft_drawn(last, seeds, positions)[0], [None] * len(last)


def draft_none(last: list[int], seeds: list[int], positions: list[int]):
    return [()] * len(last), [None] * len(last)


def draft_mixed(last: list[int], seeds: list[int], positions: list[int]):
    """Every row by another path: hit or JIT, n-gram, none. Speculations of lengths 0, 1 and 2 stand side by side."""
    paths = [draft(last, seeds, positions) for draft in (draft_drawn, draft_chosen, draft_none)]
    choice = [seed % 3 for seed in seeds]
    return [paths[c][0][i] for i, c in enumerate(choice)], [paths[c][1][i] for i, c in enumerate(choice)]


def verify_with(judge: Judge) -> Callable[[Tensor, list[RowToVerify]], list[Verdict]]:
    """`verify_rows` with another rule of acceptance."""

    def verify(logits_RV: Tensor, rows: list[RowToVerify]) -> list[Verdict]:
        verdicts = []
        for row in rows:
            length = len(row.drafted) + 1
            probs = process_logits(logits_RV[row.start : row.start + length], [row.sampling] * length)
            positions, seeds = [row.position + 1 + j for j in range(length)], [row.sampling.seed] * length
            draws = [uniforms(seeds, positions, purpose).tolist() for purpose in (Purpose.ACCEPT, Purpose.BONUS)]
            verdicts.append(judge(probs, row.drafted, row.proposal, *draws))
        return verdicts

    return verify


def shifted_proposals(logits_RV: Tensor, rows: list[RowToVerify]) -> list[Verdict]:
    """Broken on purpose: drawn rows get the distributions of another drawn row, as after a request left the batch."""
    drawn = [i for i, row in enumerate(rows) if row.proposal is not None]
    swapped = list(rows)
    for i, j in zip(drawn, drawn[1:] + drawn[:1], strict=True):
        swapped[i] = replace(rows[i], proposal=rows[j].proposal)
    return verify_rows(logits_RV, swapped)


def run(draft: Drafting, sampling: Sequence[Sampling], verify: Callable = verify_rows) -> list[list[int]]:
    """The first two tokens of one request per sampling record, all in one batch; the last committed token before them
    is 0.
    """
    texts: list[list[int]] = [[0] for _ in sampling]
    while active := [i for i, text in enumerate(texts) if len(text) < 3]:
        last = [texts[i][-1] for i in active]
        positions = [START + len(texts[i]) - 1 for i in active]
        drafted, proposals = draft(last, [sampling[i].seed for i in active], positions)
        inputs, rows = [], []
        for i, token, position, tokens, proposal in zip(active, last, positions, drafted, proposals, strict=True):
            rows.append(RowToVerify(len(inputs), position, tokens, proposal, sampling[i], Text([0], texts[i][1:])))
            inputs += [token, *tokens]
        for i, row, verdict in zip(active, rows, verify(TARGET_LOGITS[inputs], rows), strict=True):
            texts[i] += [*row.drafted[: verdict.num_accepted], verdict.bonus_token]
    return [text[1:3] for text in texts]


def chi_square_p(texts: Sequence[Sequence[int]], sampling: Sampling, tokens: int) -> float:
    """P-value of the first `tokens` (1 or 2) committed tokens under the target's own distribution."""
    first, second = (_expected_rows(sampling, place) for place in (0, 1))
    expected = (first[0] if tokens == 1 else (first[0][:, None] * second).flatten()) * len(texts)
    cells = torch.tensor([text[0] if tokens == 1 else text[0] * VOCAB + text[1] for text in texts])
    counts = torch.bincount(cells, minlength=len(expected)).double()
    possible = expected > 0
    if bool((counts[~possible] > 0).any()):
        return 0.0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def _expected_rows(sampling: Sampling, place: int) -> Tensor:
    """Row t: the target's distribution after token t, which is the prompt's last token (place 0) or the answer's first
    (place 1).
    """
    answers = [[token][:place] for token in range(VOCAB)]
    rows = [
        reference.adjust_logits(TARGET_LOGITS[t][None], sampling, Text([0], answers[t]), [[]]) for t in range(VOCAB)
    ]
    return reference.process_logits(torch.cat(rows), [sampling] * VOCAB).double()


def requests(sampling: Sampling) -> list[Sampling]:
    return [replace(sampling, seed=seed) for seed in range(N)]


PATHS = {
    "drawn": draft_drawn,
    "saguaro": partial(draft_drawn, c=0.25),
    "drawn, unreported": draft_drawn_unreported,
    "chosen": draft_chosen,
    "none": draft_none,
    "mixed": draft_mixed,
}


@pytest.mark.parametrize("path", PATHS)
def test_each_path_commits_the_targets_distribution(path: str) -> None:
    sampling = Sampling(1.0)
    texts = run(PATHS[path], requests(sampling))
    assert chi_square_p(texts, sampling, 1) > LEVEL
    assert chi_square_p(texts, sampling, 2) > LEVEL


def test_filters_are_part_of_the_targets_distribution() -> None:
    sampling = Sampling(0.7, top_k=4, top_p=0.9)
    texts = run(draft_mixed, requests(sampling))
    assert chi_square_p(texts, sampling, 2) > LEVEL


PENALISED = [
    Sampling(1.0, presence_penalty=1.5),
    Sampling(1.0, frequency_penalty=-1.0),
    Sampling(1.0, repetition_penalty=2.5),
    Sampling(0.8, logit_bias=((2, 2.0), (0, -3.0))),
    Sampling(1.2, min_p=0.1, presence_penalty=0.5, repetition_penalty=1.5, logit_bias=((4, 1.0),)),
]


@pytest.mark.parametrize("sampling", PENALISED, ids=str)
def test_penalties_count_the_drafted_tokens_before(sampling: Sampling) -> None:
    assert chi_square_p(run(draft_mixed, requests(sampling)[:1500]), sampling, 2) > LEVEL


@pytest.mark.parametrize("sampling", PENALISED[:2], ids=str)
def test_penalties_over_committed_tokens_only_are_found(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: p_j without the penalties on s_1..s_j."""

    def without_path(logits: Tensor, own: Sampling, text: Text, paths: Sequence[Sequence[int]]) -> Tensor:
        return reference.adjust_logits(logits, own, text, [[]] * len(paths))

    monkeypatch.setattr(infer.engine.verify, "adjust_logits", without_path)
    assert chi_square_p(run(PATHS["drawn"], requests(sampling)[:1500]), sampling, 2) < BROKEN_LEVEL


def test_a_batch_of_mixed_settings_and_paths() -> None:
    greedy = [Sampling(0.0), Sampling(0.0, presence_penalty=2.0, logit_bias=((4, 0.6),))]
    kinds = [Sampling(1.0), Sampling(0.6), *PENALISED[:2], *greedy]
    sampling = [replace(kinds[(seed // 3) % len(kinds)], seed=seed) for seed in range(N)]
    texts = run(draft_mixed, sampling)
    for kind in kinds:
        group = [text for text, own in zip(texts, sampling, strict=True) if replace(own, seed=0) == kind]
        if not kind.greedy:
            assert chi_square_p(group, kind, 2) > LEVEL
    for kind, text in zip(greedy, [(0, 0), (0, 1)], strict=True):
        assert {tuple(got) for got, own in zip(texts, sampling, strict=True) if replace(own, seed=0) == kind} == {text}


def broken_greedy(
    p: Tensor, drafted: Sequence[int], proposal: Proposal | None, u: Sequence[float], bonus: Sequence[float]
) -> Verdict:
    """Broken on purpose: accepts while the drafted token is the argmax, then samples."""
    accepted = accept_greedy(p.argmax(-1).tolist(), drafted).num_accepted
    return Verdict(accepted, int(sample_from(p[accepted][None], torch.tensor([bonus[accepted]]))))


def broken_residual(
    p: Tensor, drafted: Sequence[int], proposal: Proposal | None, u: Sequence[float], bonus: Sequence[float]
) -> Verdict:
    """Broken on purpose: after a rejection the bonus token comes from p instead of the residual."""
    accepted = accept(p, drafted, proposal, u, bonus).num_accepted
    return Verdict(accepted, int(sample_from(p[accepted][None], torch.tensor([bonus[accepted]]))))


BROKEN = {
    "greedy acceptance": (draft_drawn, verify_with(broken_greedy)),
    "unadjusted residual": (draft_drawn, verify_with(broken_residual)),
    "unadjusted residual of a chosen token": (draft_chosen, verify_with(broken_residual)),
    "q instead of q' under Saguaro": (partial(draft_drawn, c=0.25, report_tilted=False), verify_rows),
    "proposals of another row": (draft_drawn, shifted_proposals),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_same_test_rejects_broken_verifiers(fault: str) -> None:
    draft, verify = BROKEN[fault]
    sampling = Sampling(1.0)
    assert chi_square_p(run(draft, requests(sampling), verify), sampling, 2) < BROKEN_LEVEL


def test_a_seed_repeats_its_tokens_whatever_else_is_in_the_batch() -> None:
    sampling = [Sampling(0.5 + seed % 3 / 2, top_k=4 if seed % 2 else None, seed=seed) for seed in range(60)]
    together = run(draft_mixed, sampling)
    assert together == [run(draft_mixed, [own])[0] for own in sampling]
    assert run(draft_mixed, sampling[::-1]) == together[::-1]


def test_greedy_rows_beside_sampled_ones_follow_the_argmax() -> None:
    logits = torch.full((7, VOCAB), 0.0)
    logits[torch.arange(7), torch.tensor([3, 1, 2, 4, 0, 1, 3])] = (
        1e-3  # close calls: sampling would rarely repeat them
    )
    sampled = Sampling(5.0, seed=1)
    rows = [
        RowToVerify(0, START, (3, 1)),
        RowToVerify(3, START, (), None, sampled),
        RowToVerify(4, START, (0, 0)),
    ]
    for _ in range(3):
        verdicts = verify_rows(logits, rows)
        assert (verdicts[0], verdicts[2]) == (Verdict(2, 2), Verdict(1, 1))


def test_each_row_reads_its_own_logits_in_any_order() -> None:
    """One-hot logits: every row has exactly one right answer, greedy or sampled."""
    argmax = [3, 1, 2, 4, 0, 1]
    logits = torch.full((6, VOCAB), -1e9)
    logits[torch.arange(6), torch.tensor(argmax)] = 0.0
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        first = RowToVerify(3, 5, (4, 0), None, sampling)
        last = RowToVerify(0, 7, (1,), None, sampling)
        rows = [first, RowToVerify(2, 9, (), None, Sampling(1.0)), last]
        assert verify_rows(logits, rows) == [Verdict(2, 1), Verdict(0, 2), Verdict(0, 3)]


def test_rows_beyond_the_logits_are_refused() -> None:
    with pytest.raises(AssertionError):
        verify_rows(torch.zeros(2, VOCAB), [RowToVerify(0, 5, (1, 2))])
