"""Serving replayed in batches against a plain twin that evaluates slot by slot, and laws of its rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from tests.cpu.train.small import HIDDEN, VOCAB, small_drafter
from tests.plain_drafting import plain_rounds
from train.objective.unroll import Rows
from train.ops.attention.shared_prefix import attend_shared_prefix, grid_of
from train.validation.round_replay import FanOutPlan, Round, replay
from train.validation.served_drafting import AnswerSpan, ServedDrafter, true_slots

K, DRAFTED = 2, 4
LAYOUT, LENGTH = [[10, 13], [21, 0]], 24  # documents of two rows


def drafter_of(layers: int) -> tuple[Eagle3Drafter, VocabMap]:
    """Of four tokens, so that some are right and some are found by chance."""
    drafter = small_drafter(layers, seed=layers, draft_vocab_size=DRAFTED)
    return drafter, VocabMap(torch.arange(3, 3 + DRAFTED), VOCAB)


def rows_of(seed: int) -> tuple[Rows, torch.Tensor, list[AnswerSpan]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LAYOUT), LENGTH)
    tokens = torch.randint(3, 3 + DRAFTED, shape, generator=generator)
    tokens[torch.rand(shape, generator=generator) < 0.05] = 9  # outside the draft vocabulary
    documents, positions, answers = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), []
    for row, sizes in enumerate(LAYOUT):
        start = 0
        for number, size in enumerate(sizes, start=1):
            documents[row, start : start + size], positions[row, start : start + size] = number, torch.arange(size)
            if size:
                answers.append(AnswerSpan(row, start + 3, start + size - 1))
            start += size
    return Rows(tokens, positions, documents), torch.randn(*shape, HIDDEN, generator=generator), answers


PLANS = [
    FanOutPlan((0,) * (K + 1), (0,) * (K + 1)),
    FanOutPlan((1,) * (K + 1), (1,) * (K + 1)),
    FanOutPlan((2, 1, 2), (1, 2, 3)),
    FanOutPlan((2, 2), (2, 2, 2)),
    FanOutPlan((0, 4), (4, 4, 4)),
]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("refresh", [0, 1, K])
@torch.no_grad()
def test_rounds_are_those_of_the_plain_twin(layers: int, refresh: int) -> None:
    drafter, vocab = drafter_of(layers)
    found: list[Round] = []
    for seed in range(2):
        rows, features, answers = rows_of(seed)
        result = replay(
            ServedDrafter(drafter, vocab, rows, true_slots(drafter, rows, features), K, refresh), answers, PLANS
        )
        for plan, by_answer in zip(PLANS, result, strict=True):
            for answer, rounds in zip(answers, by_answer, strict=True):
                start = int(
                    (rows.document_ids[answer.row] == rows.document_ids[answer.row, answer.first]).nonzero()[0]
                )
                tokens = rows.token_ids[answer.row, start : answer.last + 1].tolist()
                expected = plain_rounds(
                    drafter, vocab, tokens, list(features[answer.row, start:]), answer.first - start, plan, refresh
                )
                assert [r._replace(confidences=(), slot=r.slot - start) for r in rounds] == [
                    r._replace(confidences=()) for r in expected
                ]
                for ours, theirs in zip(rounds, expected, strict=True):
                    assert ours.confidences == pytest.approx(theirs.confidences, rel=1e-4)
                found += rounds
    runs = [r for r in found if r.served_by_hit]
    assert {r.accepted for r in runs} == {0, 1, 2} and {r.place for r in found} >= {None, 0, 1, 2}, (
        "the cases that matter occur"
    )
    assert any(r.served_by_hit and r.fresh != r.accepted for r in found), "lag changes what is drafted"


@torch.no_grad()
def test_a_plan_alone_gives_what_it_gives_beside_others() -> None:
    drafter, vocab = drafter_of(1)
    rows, features, answers = rows_of(0)
    together = replay(ServedDrafter(drafter, vocab, rows, true_slots(drafter, rows, features), K), answers, PLANS)
    serving = ServedDrafter(drafter, vocab, rows, true_slots(drafter, rows, features), K)
    for plan, expected in zip(
        PLANS, together, strict=True
    ):  # one after another: later plans go on from states of earlier ones
        alone = replay(serving, answers, [plan])[0]
        assert [[r._replace(confidences=()) for r in a] for a in alone] == [
            [r._replace(confidences=()) for r in a] for a in expected
        ]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 100))
def test_attention_in_a_grid_is_attention(rows: list[int], near: int, seed: int) -> None:
    torch.manual_seed(seed)
    row, count, heads, groups, dim, length = torch.tensor(rows), len(rows), 4, 2, 6, 5
    query, keys, values = (
        torch.randn(count, heads, dim),
        torch.randn(3, groups, dim, length),
        torch.randn(3, groups, length, dim),
    )
    near_keys, near_values = torch.randn(2, count, near + 1, groups, dim)
    visible, seen = torch.rand(count, length) < 0.5, torch.rand(count, near + 1) < 0.5
    seen[:, 0] = True
    out = attend_shared_prefix(query, keys, values, visible, near_keys, near_values, seen, grid_of(row, 3))
    for i, r in enumerate(rows):
        for head in range(heads):
            group = head // (heads // groups)
            k = torch.cat((keys[r, group].T[visible[i]], near_keys[i, :, group][seen[i]]))
            v = torch.cat((values[r, group][visible[i]], near_values[i, :, group][seen[i]]))
            weights = (k @ query[i, head] * dim**-0.5).softmax(0)
            torch.testing.assert_close(out[i, head], weights @ v, atol=1e-5, rtol=1e-5)
