"""Run by `test_head_loss_triton` in Triton's interpreter: cases against torch in closed form; prints a line
for each.

In fp16 and fp32: the interpreter takes the bits of bf16 for integers in a product.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch.nn import functional as F

from train.ops.head_loss import closed_form, triton
from train.ops.head_loss.terms import LossOptions, Teacher

N, HIDDEN, VOCAB, POSITIONS = 9, 24, 203, 7  # no size is a multiple of a tile


def compare(options: LossOptions, has_bonus: bool, dtype: torch.dtype, sharpness: float) -> None:
    """One case; torch reads the logits that the kernels would round to."""
    generator = torch.Generator().manual_seed(0)
    full = (4 * torch.randn(POSITIONS, VOCAB + 50, generator=generator)).softmax(-1)
    full[:3] = F.one_hot(torch.randint(0, VOCAB, (3,), generator=generator), VOCAB + 50).float()
    best = full.argmax(-1)
    teacher = Teacher(full[:, :VOCAB].half(), best.clamp(max=VOCAB - 1), best < VOCAB)
    assert 0 < teacher.inside.sum() < POSITIONS
    hidden = torch.randn(N, HIDDEN, generator=generator).to(dtype)
    head = (sharpness * torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype)
    rows = torch.randint(0, POSITIONS, (N,), generator=generator)
    hidden[:3] = head[teacher.best[rows[:3]]] / sharpness * 3  # they agree with the teacher, or nearly
    base, bonus = torch.rand(2, N, generator=generator)
    logits = F.linear(hidden.float(), head.float()).to(dtype).float()
    chunk = Teacher(teacher.probs[rows].float(), teacher.best[rows], teacher.inside[rows])
    stats, grad = closed_form.of_logits(logits, chunk, base, bonus if has_bonus else None, options)
    found, own_grad = triton.chunk(hidden, head, teacher, rows, base, bonus if has_bonus else None, options)
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, stats, rtol=loose, atol=loose)
    torch.testing.assert_close(own_grad.float(), grad, rtol=loose, atol=loose)
    assert 0 < stats[:, 2].sum() < N and (stats[:, 6] > 0).any() == has_bonus
    print("equal", options, has_bonus, dtype, sharpness)


if __name__ == "__main__":
    temperature = int(sys.argv[1])
    triton.ROW_BLOCK = 64  # several blocks a row
    for has_bonus, sharpness in product((False, True), (1.0, 20.0)):
        for options, dtype in (
            (LossOptions(1.0, 0.0, temperature), torch.float16),
            (LossOptions(0.7, 0.4, temperature, 2), torch.float32),
        ):
            compare(options, has_bonus, dtype, sharpness)
