"""Compiled layers in a drafter: the same values, gradients and state as the plain model, whatever is done to it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.eagle3_ssd.model import MLP, Attention, Eagle3Drafter, RMSNorm
from drafters.targets.head import TargetHead
from tests.cpu.train.small import DRAFT_VOCAB, HIDDEN, VOCAB, small_drafter
from train.config import LossSettings
from train.objective import accelerate as module
from train.objective.accelerate import COMPILED, accelerate
from train.objective.objective import Objective


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def run(drafter: Eagle3Drafter) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the gradients of their mean square by name."""
    generator = torch.Generator().manual_seed(0)
    embeds, features = torch.randn(2, 2, 7, HIDDEN, generator=generator)
    hidden = drafter(embeds, features, torch.arange(7).expand(2, 7), causal)
    logits = drafter.logits(hidden)
    (hidden.square().mean() + logits.square().mean()).backward()
    return logits, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def kinds(drafter: Eagle3Drafter) -> set[type]:
    return {type(part) for part in drafter.modules()} & {*COMPILED, *COMPILED.values()}


def test_values_and_gradients_are_those_of_the_plain_model() -> None:
    plain, fast = small_drafter(2), small_drafter(2)
    accelerate(fast)
    (expected, expected_grads), (found, grads) = run(plain), run(fast)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)


def test_every_norm_mlp_and_attention_is_replaced_and_the_state_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = small_drafter(2)
    before, parameters = drafter.state_dict(), list(drafter.parameters())
    assert kinds(drafter) == {RMSNorm, MLP, Attention}
    accelerate(drafter)
    accelerate(drafter)
    assert kinds(drafter) == set(COMPILED.values()) == kinds(copy.deepcopy(drafter))
    assert all(new is old for new, old in zip(drafter.parameters(), parameters, strict=True))
    assert drafter.state_dict().keys() == before.keys()
    small_drafter(2, seed=1).load_state_dict(drafter.state_dict(), strict=True)
    called: list[str] = []

    def counted(name: str) -> Callable[..., Tensor]:
        real = getattr(module.op, name)
        return lambda *given: (called.append(name), real(*given))[1]

    for name in ("rms_norm", "silu_mul", "rotate"):
        monkeypatch.setattr(module.op, name, counted(name))
    run(drafter)
    assert {name: called.count(name) for name in called} == {"rms_norm": 6, "rotate": 4, "silu_mul": 2}


def test_the_objective_accelerates_its_drafter() -> None:
    drafter = small_drafter(1)
    head = TargetHead(torch.zeros(DRAFT_VOCAB, HIDDEN))
    Objective(drafter, head, torch.arange(VOCAB), LossSettings(), torch.float32)
    assert kinds(drafter) == set(COMPILED.values())
