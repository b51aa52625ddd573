"""Data order and learning rate as functions of (seed, step) alone, so a resumed run needs no more than the step."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch

from train.config import TrainSettings


def rows_of_step(step: int, rows_per_step: int, num_rows: int, seed: int) -> list[int]:
    """The rows of a step: the epochs' permutations, one after another, in parts of `rows_per_step`."""
    places = range(step * rows_per_step, (step + 1) * rows_per_step)
    return [_permutation(place // num_rows, num_rows, seed)[place % num_rows] for place in places]


@lru_cache(maxsize=2)
def _permutation(epoch: int, num_rows: int, seed: int) -> list[int]:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def step_seed(seed: int, step: int, rank: int) -> int:
    """The state of torch's generators at the beginning of a step, so that nothing has to be kept of them."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up to `lr`, then a cosine down to `final_lr_ratio * lr` at the last step."""
    options = settings.optimizer
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, settings.total_steps - 1 - options.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return options.lr * (options.final_lr_ratio + (1 - options.final_lr_ratio) * cosine)
