"""Time left over a curriculum, and the share of a step that its bare products would take."""

from __future__ import annotations

import pytest
import torch

from drafters.base.serving import ServingSettings
from tests.cpu.train.small import small_config
from train.config import Stage
from train.costs.plan import Forward, Product, Replayed, flops, products
from train.costs.throughput import Meter, measured_seconds, seconds_left, stage_number

CURRICULUM = (Stage(steps=10, depth=1), Stage(steps=5, depth=3))


def test_stages_are_found() -> None:
    assert [stage_number(CURRICULUM, step) for step in (0, 9, 10, 14)] == [0, 0, 1, 1]


def test_time_left_knows_that_deeper_steps_take_longer() -> None:
    def flops_of(stage: Stage) -> float:
        return 1.0 + stage.depth

    assert seconds_left(CURRICULUM, 4, {0: 1.0}, flops_of) == pytest.approx(6 * 1.0 + 5 * 2.0)
    assert seconds_left(CURRICULUM, 12, {0: 1.0, 1: 7.0}, flops_of) == pytest.approx(3 * 7.0)
    assert seconds_left(CURRICULUM, 15, {1: 7.0}, flops_of) == 0.0


def test_a_stage_to_come_is_expected_by_its_products() -> None:
    """Deep steps run at a few anchors, the first one at every slot: twice the depth is far from twice the work."""
    curriculum = (Stage(steps=2, depth=2, anchors_per_row=4), Stage(steps=10, depth=5, anchors_per_row=4))
    curriculum = (*curriculum, Stage(steps=10, depth=8, anchors_per_row=2, replay=True))
    meter = Meter(small_config(1), curriculum, ServingSettings(lookahead=2), torch.device("cpu"), torch.bfloat16)
    meter.peak = 1e9
    seen = Forward(8, 256, 4, (1000, 30, 30), 1100)
    for step in (0, 1):
        meter.share(step, [seen], 3.0)
    unrolled = Forward(8, 256, 4, (1000, *[32] * 5), 1100)
    rounds = Forward(8, 256, 2, (1000, 32, 32), 1100, Replayed(2, 5, 0))
    base, deeper, replayed = (
        flops(products(small_config(1), f)) for f in (seen._replace(predictions=(1000, 32, 32)), unrolled, rounds)
    )
    left = meter.left(2)
    assert left == pytest.approx(10 * 3.0 * (deeper + replayed) / base)
    assert left is not None and left < 75  # 150 if a stage took as long for each depth as the one before


def test_a_step_that_took_long_says_nothing_of_the_others() -> None:
    """The first one compiles kernels, another the machine sleeps through: in an average, minutes of them were hours to
    come.
    """
    meter = Meter(small_config(1), CURRICULUM, ServingSettings(), torch.device("cpu"), torch.bfloat16)
    meter.peak = 1e9
    left = []
    for step, seconds in enumerate((60.0, 1.0, 1.0, 600.0, 1.0)):
        meter.share(step, [Forward(2, 16, 4, (10, 6), 12)], seconds)
        left.append(meter.left(step + 1))
    deeper = meter.stage_flops(CURRICULUM[1]) / meter.stage_flops(CURRICULUM[0])
    assert left[0] is None and left[1:] == pytest.approx(
        [8 + 5 * deeper, 7 + 5 * deeper, 6 + 5 * deeper, 5 + 5 * deeper]
    )


def test_the_share_is_the_products_time_over_the_steps() -> None:
    config, device = small_config(1), torch.device("cpu")
    meter = Meter(config, CURRICULUM, ServingSettings(), device, torch.bfloat16)
    meter.peak = 1e9
    forward = Forward(2, 16, 4, (10, 6), 12)
    assert meter.share(0, [forward, forward], 0.5) == pytest.approx(2 * flops(products(config, forward)) / 1e9 / 0.5)


def test_products_are_timed_and_a_larger_one_takes_longer() -> None:
    device, dtype = torch.device("cpu"), torch.float32
    small, large = (measured_seconds(Product("x", m, 128, 128), device, dtype) for m in (64, 2048))
    assert 0 < 4 * small < large
    meter = Meter(small_config(1), CURRICULUM, ServingSettings(), device, dtype)
    twice = meter.product_seconds([Product("x", 512, 128, 128, calls=3)])
    assert twice == pytest.approx(3 * meter.product_seconds([Product("x", 512, 128, 128)]), rel=1e-6)


def test_the_result_of_a_timed_product_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, new pages for 44 MB took five times as long as the product, and the share of a step that did without
    came out too high.
    """
    places, matmul = [], torch.matmul

    def noted(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        places.append(out.data_ptr())
        return matmul(left, right, out=out)

    monkeypatch.setattr(torch, "matmul", noted)
    measured_seconds(Product("x", 64, 32, 16), torch.device("cpu"), torch.float32)
    assert len(places) > 2 and len(set(places)) == 1
