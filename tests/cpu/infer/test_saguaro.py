"""Saguaro sampling and the one place where ties are broken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.kernels.sampling import reference
from infer.kernels.sampling.saguaro import tilt, top_f


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 60), levels=st.integers(1, 40), count=st.integers(0, 20))
def test_top_f_equals_a_stable_sort(seed: int, size: int, levels: int, count: int) -> None:
    """Few distinct levels make many ties, inside the top and at its boundary."""
    scores = torch.randint(-levels, levels, (5, size), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(top_f(scores, count), reference.top_f(scores, count))


def test_ties_go_to_the_lower_id() -> None:
    scores = torch.zeros(1, 100)
    scores[0, 70] = 1.0
    assert top_f(scores, 3).tolist() == [[70, 0, 1]]
    scores[0, 50:60] = 0.5
    assert top_f(scores, 4).tolist() == [[70, 50, 51, 52]]


def test_a_worked_example() -> None:
    """F = 2, C = 0.5: (0.4, 0.3, 0.2, 0.1) -> (0.2, 0.15, 0.2, 0.1) / 0.65."""
    tilted, lowered = tilt(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]), 2, 0.5)
    assert lowered.tolist() == [[0, 1], [3, 2]]
    assert tilted[0].tolist() == pytest.approx([0.2 / 0.65, 0.15 / 0.65, 0.2 / 0.65, 0.1 / 0.65])
    assert tilted[1].tolist() == pytest.approx([0.1 / 0.65, 0.2 / 0.65, 0.15 / 0.65, 0.2 / 0.65])


@pytest.mark.parametrize(("fan_out", "c"), [(3, 1.0), (0, 0.5)])
def test_off_is_the_identity_bit_for_bit(fan_out: int, c: float) -> None:
    probs = torch.rand(4, 50).softmax(-1)
    tilted, lowered = tilt(probs, fan_out, c)
    assert torch.equal(tilted, probs)
    assert lowered.shape == (4, 0)


def test_lowering_everything_changes_nothing() -> None:
    probs = torch.rand(2, 6).softmax(-1)
    torch.testing.assert_close(tilt(probs, 6, 0.3).probs_RD, probs)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), fan_out=st.integers(1, 8), c=st.floats(0.01, 0.99))
def test_laws(seed: int, fan_out: int, c: float) -> None:
    """It stays a distribution; odds within the lowered and within the others stay, odds between them fall by C."""
    probs = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    tilted, lowered = tilt(probs, fan_out, c)
    ratio = (tilted / probs)[0]
    inside = torch.zeros(20, dtype=torch.bool)
    inside[lowered[0]] = True
    assert float(tilted.sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(ratio[inside], ratio[~inside][:1].expand(fan_out) * c, rtol=1e-5, atol=0)
    assert float(ratio[~inside].max() - ratio[~inside].min()) < 1e-5 * float(ratio[~inside].max())


def test_c_out_of_range_is_refused() -> None:
    with pytest.raises(AssertionError, match="saguaro_c"):
        tilt(torch.ones(1, 2) / 2, 1, 0.0)
