"""Time left over a curriculum, and the share of a step that its bare products would take."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.train.small import small_config
from train.config import Stage
from train.plan import Forward, Product, flops, products
from train.throughput import Meter, measured_seconds, seconds_left, stage_number

CURRICULUM = (Stage(steps=10, depth=1), Stage(steps=5, depth=3))


def test_stages_are_found() -> None:
    assert [stage_number(CURRICULUM, step) for step in (0, 9, 10, 14)] == [0, 0, 1, 1]


def test_time_left_knows_that_deeper_steps_take_longer() -> None:
    assert seconds_left(CURRICULUM, 4, {0: 1.0}) == pytest.approx(6 * 1.0 + 5 * 2.0)
    assert seconds_left(CURRICULUM, 12, {0: 1.0, 1: 7.0}) == pytest.approx(3 * 7.0)
    assert seconds_left(CURRICULUM, 15, {1: 7.0}) == 0.0 and seconds_left(CURRICULUM, 0, {}) == 0.0


def test_the_share_is_the_products_time_over_the_steps() -> None:
    config, device = small_config(1), torch.device("cpu")
    meter = Meter(config, CURRICULUM, device, torch.bfloat16)
    meter.peak = 1e9
    forward = Forward(2, 16, 4, (10, 6), 12)
    assert meter.share(0, [forward, forward], 0.5) == pytest.approx(2 * flops(products(config, forward)) / 1e9 / 0.5)
    meter.share(1, [forward], 1.5)
    assert meter.left(2) == pytest.approx(8 * 0.6 + 5 * 1.2)


def test_products_are_timed_and_a_larger_one_takes_longer() -> None:
    device, dtype = torch.device("cpu"), torch.float32
    small, large = (measured_seconds(Product("x", m, 128, 128), device, dtype) for m in (64, 2048))
    assert 0 < 4 * small < large
    meter = Meter(small_config(1), CURRICULUM, device, dtype)
    twice = meter.product_seconds([Product("x", 512, 128, 128, calls=3)])
    assert twice == pytest.approx(3 * meter.product_seconds([Product("x", 512, 128, 128)]), rel=1e-6)
