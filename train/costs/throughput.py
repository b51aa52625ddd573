"""Model FLOP utilisation of a step, and the time that the rest of the curriculum takes.

The *share* (model FLOP utilisation) is the time that the bare products of a step take over the time of the step. The
products are timed in the same process on a CPU, and taken from the table on a GPU that it knows. Work is what
`plan.products` lists: recomputation, norms, softmax, copies and the optimizer are not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import torch

from drafters.base.serving import ServingSettings
from drafters.eagle3_ssd.config import DrafterConfig
from train.config import Stage
from train.costs.gpus import gpu_of_device
from train.costs.plan import Forward, Product, flops, in_stage, products

SECONDS = 0.005  # a product is timed that long
RECENT = 20  # steps whose median is a stage's time: one that the machine slept through says nothing of the others


class Meter:
    """Sees every step of this process. On a CPU a product is timed when one of its name and size is first seen."""

    def __init__(
        self,
        config: DrafterConfig,
        curriculum: Sequence[Stage],
        serving: ServingSettings,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.curriculum, self.serving, self.device, self.dtype = (
            config,
            curriculum,
            serving,
            device,
            dtype,
        )
        gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = gpu.flops if gpu is not None and dtype == torch.bfloat16 else None
        self.rates: dict[tuple[str, int], float] = {}
        self.times: dict[int, deque[float]] = {}  # of the newest steps, by stage
        self.seen: Sequence[Forward] = ()  # of the newest step

    def share(self, step: int, forwards: Sequence[Forward], seconds: float) -> float:
        """Note that optimizer step `step` ran these forwards in `seconds`; returns its share."""
        parts = [part for forward in forwards for part in products(self.config, forward)]
        if self.seen:  # a process's first step compiles and fills caches
            self.times.setdefault(stage_number(self.curriculum, step), deque(maxlen=RECENT)).append(seconds)
        self.seen = forwards
        return self.product_seconds(parts) / seconds

    def left(self, step: int) -> float | None:
        """Seconds from before `step` to the end of the curriculum, held-out measurements not counted; None after the
        first step alone.
        """
        times = {stage: median(recent) for stage, recent in self.times.items()}
        return seconds_left(self.curriculum, step, times, self.stage_flops) if times else None

    def stage_flops(self, stage: Stage) -> float:
        """FLOPs of a step of `stage` on rows like those of the newest step."""
        planned = [in_stage(forward, stage, self.serving.lookahead, self.serving.refresh) for forward in self.seen]
        return float(sum(flops(products(self.config, forward)) for forward in planned))

    def product_seconds(self, parts: Iterable[Product]) -> float:
        """What the products alone take."""
        return sum(part.flops / (self.peak or self._rate(part)) for part in parts)

    def _rate(self, part: Product) -> float:
        once = part._replace(calls=1)
        key = part.name, once.flops.bit_length()  # products of a name that differ by less than twofold share a rate
        if key not in self.rates:
            self.rates[key] = once.flops / measured_seconds(once, self.device, self.dtype)
        return self.rates[key]


def stage_number(curriculum: Sequence[Stage], step: int) -> int:
    """Which stage of the curriculum optimizer step `step` (from 0) belongs to."""
    for number, stage in enumerate(curriculum):
        if step < stage.steps:
            return number
        step -= stage.steps
    raise IndexError(f"step {step} past the end of the curriculum")


def seconds_left(
    curriculum: Sequence[Stage], step: int, times: Mapping[int, float], flops_of: Callable[[Stage], float]
) -> float:
    """Time from before `step` to the end, from step times of the stages seen.

    A stage not seen yet runs at the FLOP rate of the last one seen: 4 of 10 steps of 2 FLOPs done in 1 s each, then 5
    steps of 3 FLOPs: 6 * 1 + 5 * 1 * 3 / 2 = 13.5 s.
    """
    last = max(times)
    total, first = 0.0, 0
    for number, stage in enumerate(curriculum):
        remaining = max(0, first + stage.steps - max(step, first))
        if remaining:
            total += remaining * (
                times[number] if number in times else times[last] * flops_of(stage) / flops_of(curriculum[last])
            )
        first += stage.steps
    return total


@torch.no_grad()
def measured_seconds(part: Product, device: torch.device, dtype: torch.dtype, seconds: float = SECONDS) -> float:
    """The time of one call of a product, the fastest of as many as fit into `seconds`.

    The result has its place already: new pages for a large one can take five times as long as the product.
    """
    left = torch.ones(
        part.batch, part.m, part.k, device=device, dtype=dtype
    )  # no draw: the generators stay as they are
    right = torch.ones(part.batch, part.k, part.n, device=device, dtype=dtype)
    out = torch.empty(part.batch, part.m, part.n, device=device, dtype=dtype)
    if part.batch == 1:
        left, right, out = left[0], right[0], out[0]
    torch.matmul(left, right, out=out)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        torch.matmul(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
