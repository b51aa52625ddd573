"""Keyed randomness, processing of logits, draws by inverse CDF."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.sampling import reference
from infer.kernels.sampling.keyed_random import Purpose, _mix, uniform, uniforms
from infer.kernels.sampling.params import Sampling
from infer.kernels.sampling.sample import greedy_ids, process_logits, sample_from

ALMOST_ONE = 1 - 2.0**-53


def test_uniform_depends_on_each_key_and_on_nothing_else() -> None:
    keys = [(s, p, q, m) for s in (0, 1, -1, 2**63) for p in (0, 1, 10_000) for q in Purpose for m in (0, 1, 5)]
    first = [uniform(*key) for key in keys]
    assert len(set(first)) == len(keys)
    assert first == [uniform(*key) for key in keys]
    assert all(0 <= u < 1 for u in first)


def test_the_generator_stays_what_it_is() -> None:
    """A seed repeats its tokens after an upgrade. 0xE220... is the published first output of splitmix64 from 0."""
    assert _mix(0) == 0xE220A8397B1DCDAF
    assert uniform(0, 0, Purpose.DRAFT) == 0.18436667429957676
    assert uniform(42, 17, Purpose.BONUS) == 0.6449671629856786


@pytest.mark.parametrize("axis", ["seed", "position", "place"])
def test_streams_are_uniform_and_uncorrelated(axis: str) -> None:
    """Mean of 20,000 uniforms: sd 0.002; lag-1 correlation: sd 0.007. Bounds at 4 sd."""
    values = {
        "seed": [uniform(i, 7, Purpose.ACCEPT) for i in range(20_000)],
        "position": [uniform(3, i, Purpose.ACCEPT) for i in range(20_000)],
        "place": [uniform(3, i // 8, Purpose.DRAFT, i % 8) for i in range(20_000)],
    }[axis]
    u = torch.tensor(values, dtype=torch.float64)
    assert abs(float(u.mean()) - 0.5) < 0.0082
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.028
    assert float((torch.histc(u, 20, 0, 1) - 1000).abs().max()) < 4.5 * 1000**0.5


def test_purposes_are_independent_streams() -> None:
    streams = torch.stack([uniforms([5] * 5000, range(5000), purpose) for purpose in Purpose])
    assert float((torch.corrcoef(streams) - torch.eye(3)).abs().max()) < 4 / 5000**0.5


def test_uniforms_is_uniform_row_by_row() -> None:
    got = uniforms([1, 2], [10, 20], Purpose.DRAFT, [3, 4])
    assert got.tolist() == [uniform(1, 10, Purpose.DRAFT, 3), uniform(2, 20, Purpose.DRAFT, 4)]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 1.0]])
    assert greedy_ids(logits) == greedy_ids(logits.bfloat16()) == [1, 0]


SETTINGS = [
    Sampling(1.0),
    Sampling(0.3),
    Sampling(2.0, top_k=1),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_k=5000),
    Sampling(1.0, top_p=0.1),
    Sampling(1.5, top_p=0.9),
    Sampling(20.0, top_p=0.99),  # a nucleus larger than the candidates that are fetched
    Sampling(1.0, top_k=40, top_p=0.7),
    Sampling(1.0, min_p=0.2),
    Sampling(3.0, min_p=0.01, top_k=30),
    Sampling(0.8, min_p=0.05, top_p=0.8),
    Sampling(5.0, min_p=0.3, top_p=0.95, top_k=900),
]


@pytest.mark.parametrize("size", [13, 1024, 20_000])
def test_processing_equals_its_plain_twin_in_one_mixed_batch(size: int) -> None:
    logits = torch.randn(len(SETTINGS), size, generator=torch.Generator().manual_seed(0)) * 2
    before = logits.clone()
    got, expected = process_logits(logits, SETTINGS), reference.process_logits(logits, SETTINGS)
    torch.testing.assert_close(got, expected)
    assert torch.equal(got > 0, expected > 0)
    assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(len(SETTINGS), 1024, generator=torch.Generator().manual_seed(1))
    together = process_logits(logits, SETTINGS)
    for i, row in enumerate(SETTINGS):
        assert torch.equal(together[i], process_logits(logits[i : i + 1], [row])[0])


def test_filters_by_hand() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert process_logits(logits, [Sampling(1.0, top_k=2)])[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert process_logits(logits, [Sampling(1.0, top_p=0.6)])[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert process_logits(logits, [Sampling(1.0, top_k=3, top_p=0.8)])[0].tolist() == pytest.approx(
        [4 / 9, 3 / 9, 2 / 9, 0]
    )
    assert process_logits(logits, [Sampling(1.0, min_p=0.6)])[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert process_logits(logits, [Sampling(1.0, min_p=0.4, top_p=0.7)])[0].tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert process_logits(logits, [Sampling(0.5)])[0].tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert process_logits(tied, [Sampling(1.0, top_k=2)])[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_a_tiny_temperature_is_the_argmax_and_zero_is_refused() -> None:
    logits = torch.tensor([[1.0, 2.0, -5.0]])
    assert process_logits(logits, [Sampling(1e-30)])[0].tolist() == [0, 1, 0]
    with pytest.raises(AssertionError, match="greedy"):
        process_logits(logits, [Sampling(0.0)])


@pytest.mark.parametrize("size", [1, 7, 128, 384, 1000])
@pytest.mark.parametrize("u", [0.0, 1e-300, 0.3, 0.5, ALMOST_ONE])
def test_a_draw_never_has_weight_zero(size: int, u: float) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(50, size, generator=generator) * (torch.rand(50, size, generator=generator) < 0.1)
    weights[torch.arange(50), torch.randint(size, (50,), generator=generator)] = 1e-30
    ids = sample_from(weights, torch.full((50,), u, dtype=torch.float64))
    assert bool((weights.gather(-1, ids[:, None]) > 0).all())


def test_draws_invert_the_cdf() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    at = {0.0: 1, 0.2499: 1, 0.25: 3, 0.5: 3, 0.7499: 3, 0.75: 4, ALMOST_ONE: 4}
    for u, expected in at.items():
        assert sample_from(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]


def test_two_levels_equal_one() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(200, 4096, generator=generator) ** 8
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    cdf = weights.double().cumsum(-1)
    expected = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0]
    assert (sample_from(weights, u) == expected).float().mean() > 0.98  # the rest lies within fp32 rounding of a step
    got_cdf = cdf.gather(-1, sample_from(weights, u)[:, None])[:, 0] / cdf[:, -1]
    assert bool((got_cdf >= u - 1e-6).all())


def test_frequencies_follow_the_weights() -> None:
    """20,000 draws of 5 tokens: chi-square with 4 degrees of freedom; 23.5 is its 0.9999 quantile."""
    weights = torch.tensor([0.1, 0.0, 0.5, 0.15, 0.25])
    u = uniforms(range(20_000), [0] * 20_000, Purpose.DRAFT)
    counts = torch.bincount(sample_from(weights.expand(20_000, 5), u), minlength=5)
    expected = weights * 20_000
    kept = expected > 0
    assert counts[1] == 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 23.5
