"""Packed and fused linear layers compute what `F.linear` computes, and fusing refuses what does not fit together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer.kernels.linear import cpu, reference
from infer.kernels.linear.fused import FusedFollower, FusedLeader, fuse
from infer.kernels.linear.packed import PackedLinear, pack

ROWS = [1, 2, 5, 17]


def _layer(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


class Attention(nn.Module):
    """Three projections of one input, as in transformers."""

    def __init__(self, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (_layer(48, outputs, bias, dtype) for outputs in (64, 32, 16))
        self.o_proj = _layer(64, 48, bias, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(n,) for n in ROWS] + [(1, 6), (2, 3), (0,)], ids=str)
def test_packed_is_f_linear(bias: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In bf16 too with the same bits, where it is packed."""
    layer = _layer(96, 160, bias, dtype)
    x = torch.randn(*shape, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    assert packed.packed == cpu.available(layer.weight)
    assert cpu.available(layer.weight) <= (dtype == torch.bfloat16), "only bf16 is packed"
    assert torch.equal(packed(x), reference.linear(x, layer.weight, layer.bias))
    assert torch.equal(packed(x), F.linear(x, layer.weight, layer.bias))
    other = torch.randn(*shape, 160, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = reference.linear_add(x.double(), other.double(), layer.weight.double(), _double(layer.bias))
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(packed.add_to(x, other).double(), exact, rtol=rounding, atol=rounding)


@pytest.mark.skipif(not cpu.available(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this torch has no oneDNN")
def test_packing_does_not_change_the_weight_it_was_given() -> None:
    layer = _layer(96, 160, False, torch.bfloat16)
    before = layer.weight.clone()
    packed = PackedLinear(layer.weight)
    assert torch.equal(layer.weight, before) and packed.weight.is_mkldnn
    assert (packed.in_features, packed.out_features) == (96, 160)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_fused_projections_are_the_separate_ones(bias: bool, dtype: torch.dtype, rows: int) -> None:
    plain, fused = Attention(dtype, bias), Attention(dtype, bias)
    assert fuse(fused, ["q_proj", "k_proj", "v_proj"])
    x = torch.randn(1, rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
    for ours, theirs in zip(fused(x), plain(x), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)
    assert type(fused.o_proj) is nn.Linear, "the others stay as they were"


def test_a_follower_refuses_another_input_than_its_leader_read() -> None:
    attention = Attention(torch.float32)
    fuse(attention, ["q_proj", "k_proj", "v_proj"])
    x = torch.randn(2, 48)
    attention.q_proj(x)
    assert attention.v_proj(x).shape == (2, 16)
    with pytest.raises(AssertionError, match="same tensor"):
        attention.k_proj(x.clone())


def test_fused_weights_stand_in_the_module_once() -> None:
    attention = Attention(torch.float32)
    fuse(attention, ["q_proj", "k_proj", "v_proj"])
    assert isinstance(attention.q_proj, FusedLeader) and isinstance(attention.k_proj, FusedFollower)
    assert [name for name, module in attention.named_modules() if isinstance(module, PackedLinear)] == [
        "q_proj.linear"
    ]


class Unlike(nn.Linear):
    """A subclass may compute something else, so it is left alone."""


@pytest.mark.parametrize(
    "second",
    [
        _layer(40, 32, False, torch.float32),
        _layer(48, 32, True, torch.float32),
        _layer(48, 32, False, torch.bfloat16),
        Unlike(48, 32, bias=False),
        nn.Identity(),
        None,
    ],
    ids=["input size", "bias", "dtype", "subclass", "no linear", "absent"],
)
def test_what_does_not_fit_together_is_left_alone(second: nn.Module | None) -> None:
    parent = nn.Module()
    parent.first, parent.third = _layer(48, 16, False, torch.float32), _layer(48, 16, False, torch.float32)
    if second is not None:
        parent.second = second
    before = dict(parent.named_children())
    assert fuse(parent, ["first", "second", "third"]) is False
    after = dict(parent.named_children())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_pack_replaces_what_is_plain_and_counts_it() -> None:
    attention = Attention(torch.float32)
    model = nn.Sequential(attention, nn.Embedding(4, 48), Unlike(48, 48))
    fuse(attention, ["q_proj", "k_proj"])
    x, y = torch.randn(3, 48), torch.ones(1, 64)
    before = [*attention(x), attention.o_proj(y)]
    assert pack(model) == 2  # v_proj and o_proj
    assert all(torch.equal(a, b) for a, b in zip(before, [*attention(x), attention.o_proj(y)], strict=True))
    assert type(model[2]) is Unlike and pack(model) == 0
