"""Acceptance of one request's speculation: against the plain twin, by hand, and at the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infer.kernels.sampling import reference
from infer.kernels.sampling.accept import accept, accept_greedy
from infer.kernels.sampling.verdict import Proposal, Verdict

ALL_IDS = torch.arange(4)
HALF = [0.5] * 4


def dist(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def random_case(seed: int, drawn: bool) -> tuple[Tensor, list[int], Proposal | None]:
    """K = 3, V = 7, D = 4; target probabilities with zeros in them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, 7, generator=generator) ** 3 * (torch.rand(4, 7, generator=generator) < 0.7)
    weights[:, 0] += 0.01
    ids = torch.randperm(7, generator=generator)[:4].sort().values
    q = torch.rand(3, 4, generator=generator).softmax(-1)
    drafted = ids[torch.multinomial(q, 1, generator=generator)[:, 0]].tolist()
    return weights / weights.sum(-1, keepdim=True), drafted, Proposal(q, ids) if drawn else None


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    drawn=st.booleans(),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8),
)
def test_accept_equals_its_plain_twin(seed: int, drawn: bool, draws: list[float]) -> None:
    p, drafted, proposal = random_case(seed, drawn)
    got = accept(p, drafted, proposal, draws[:4], draws[4:])
    expected = reference.accept(p, drafted, proposal, draws[:4], draws[4:])
    assert got.num_accepted == expected.num_accepted
    if got != expected:  # both draws lie at one step of the CDF, within fp32 rounding
        nudged = [[min(max(u + step, 0.0), 1 - 1e-16) for u in draws[4:]] for step in (-1e-6, 1e-6)]
        assert got in {reference.accept(p, drafted, proposal, draws[:4], bonus) for bonus in nudged}
    assert p[got.num_accepted, got.bonus_token] > 0


def test_a_worked_example() -> None:
    """p/q' of the drafted tokens: 0.4/0.5, 0.1/0.8. u = 0.7: 0.35 < 0.4 accepted, 0.56 < 0.1 rejected.

    Residual there: (0.2, 0.1, 0.6, 0.1) - (0.1, 0.8, 0.1, 0) = (0.1, 0, 0.5, 0.1), total 0.7; u = 0.5 falls on token
    2.
    """
    p = dist([0.4, 0.3, 0.2, 0.1], [0.2, 0.1, 0.6, 0.1], [0.0, 0.0, 0.0, 1.0])
    proposal = Proposal(dist([0.5, 0.5, 0.0, 0.0], [0.1, 0.8, 0.1, 0.0]), ALL_IDS)
    for judge in (accept, reference.accept):
        assert judge(p, [0, 1], proposal, [0.7, 0.7], HALF) == Verdict(1, 2)
        assert judge(p, [0, 1], proposal, [0.7, 0.7], [0.5, 0.1, 0.5]) == Verdict(1, 0)
        assert judge(p, [0, 1], proposal, [0.7, 0.7], [0.5, 0.9, 0.5]) == Verdict(1, 3)
        assert judge(p, [0, 1], proposal, [0.7, 0.1], HALF) == Verdict(2, 3)
        assert judge(p, [0, 1], proposal, [0.9, 0.1], [0.0, 0.5, 0.5]) == Verdict(0, 2)


def test_a_point_mass_is_accepted_with_its_probability_and_removed_when_rejected() -> None:
    p = dist([0.4, 0.3, 0.2, 0.1], [1.0, 0.0, 0.0, 0.0])
    for judge in (accept, reference.accept):
        assert judge(p, [1], None, [0.29, 0.0], HALF) == Verdict(1, 0)
        assert judge(p, [1], None, [0.31, 0.0], [0.56, 0.0]) == Verdict(0, 0)
        assert judge(p, [1], None, [0.31, 0.0], [0.58, 0.0]) == Verdict(0, 2)


def accept_not_strict(
    p: Tensor, drafted: list[int], proposal: Proposal | None, u: list[float], bonus: list[float]
) -> Verdict:
    """Broken on purpose: `<=` instead of `<`."""
    for k, token in enumerate(drafted):
        q = 1.0 if proposal is None else float(proposal.probs_KD[k, token])
        if not u[k] * q <= float(p[k, token]):
            return Verdict(k, int(p[k].argmax()))
    return Verdict(len(drafted), int(p[-1].argmax()))


@pytest.mark.parametrize("drawn", [True, False])
def test_a_token_of_probability_zero_is_never_accepted_not_even_at_u_zero(drawn: bool) -> None:
    p = dist([0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25])
    proposal = Proposal(dist([0.7, 0.3, 0.0, 0.0]), ALL_IDS) if drawn else None
    for judge in (accept, reference.accept):
        assert judge(p, [0], proposal, [0.0, 0.0], [0.0, 0.0]) == Verdict(0, 1)
    assert accept_not_strict(p, [0], proposal, [0.0, 0.0], [0.0, 0.0]).num_accepted == 1


def test_any_token_of_positive_probability_is_accepted_at_u_zero() -> None:
    p = dist([1e-38, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0])
    proposal = Proposal(dist([1.0, 0.0, 0.0, 0.0]), ALL_IDS)
    for judge in (accept, reference.accept):
        assert judge(p, [0], proposal, [0.0, 0.0], HALF) == Verdict(1, 2)


def test_without_residual_the_bonus_comes_from_p() -> None:
    """p = q' up to rounding, and u * q' rounds to p: rejected, yet nothing is left of p - q'."""
    p = dist([0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0])
    proposal = Proposal(p[:1] * (1 + 2**-23), ALL_IDS)
    for judge in (accept, reference.accept):
        assert judge(p, [3], proposal, [1 - 2**-53, 0.0], [0.6, 0.0]) == Verdict(0, 2)


def test_outside_the_draft_vocabulary_the_residual_is_p() -> None:
    """Draft vocabulary {1, 3} of 4: residual (0.3, 0, 0.2, 0.1), total 0.6."""
    p = dist([0.3, 0.2, 0.2, 0.3], [1.0, 0.0, 0.0, 0.0])
    proposal = Proposal(dist([0.8, 0.2]), torch.tensor([1, 3]))
    for judge in (accept, reference.accept):
        assert judge(p, [1], proposal, [0.24, 0.0], HALF) == Verdict(1, 0)
        assert [judge(p, [1], proposal, [0.26, 0.0], [u, 0.0]).bonus_token for u in (0.0, 0.49, 0.51, 0.83, 0.84)] == [
            0,
            0,
            2,
            2,
            3,
        ]


def test_nothing_drafted_is_one_plain_step() -> None:
    for judge in (accept, reference.accept):
        assert judge(dist([0.0, 0.5, 0.5, 0.0]), [], None, [0.0], [0.75]) == Verdict(0, 2)


@pytest.mark.parametrize("agreeing", range(4))
def test_greedy_accepts_while_equal(agreeing: int) -> None:
    argmax = [5, 6, 7, 8]
    drafted = [token if i < agreeing else 0 for i, token in enumerate(argmax[:3])]
    assert accept_greedy(argmax, drafted) == Verdict(agreeing, argmax[agreeing])


def test_greedy_does_not_resume_after_a_rejection() -> None:
    assert accept_greedy([1, 2, 3, 4], [9, 2, 3]) == Verdict(0, 1)
    assert accept_greedy([1], []) == Verdict(0, 1)


def test_lengths_that_do_not_fit_are_refused() -> None:
    p = dist([0.25] * 4, [0.25] * 4)
    with pytest.raises(AssertionError):
        accept(p, [0, 1], None, HALF, HALF)
    with pytest.raises(AssertionError):
        accept(p, [0], Proposal(dist([0.25] * 4, [0.25] * 4), ALL_IDS), HALF, HALF)
