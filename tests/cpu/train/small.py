"""A small drafter and packed rows for the tests of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.target_features.features import Features

VOCAB, DRAFT_VOCAB, HIDDEN = 40, 24, 16


def small_config(layers: int, draft_vocab_size: int = DRAFT_VOCAB) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=layers,
        rope_theta=100.0,
        max_position_embeddings=64,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=HIDDEN,
        tap_hidden_states_ids=(1, 2, 3),
    )


def small_drafter(layers: int, seed: int = 0, draft_vocab_size: int = DRAFT_VOCAB) -> Eagle3Drafter:
    """Random, with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(small_config(layers, draft_vocab_size))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.5 / weight.shape[1] ** 0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return drafter


def packed(layout: list[list[tuple[int, list[int]]]], length: int, seed: int = 0) -> Features:
    """Rows of documents, each (size, turn ids); token ids and features are random, padding is zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(layout), length)
    turn_ids, document_ids, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for row, documents in enumerate(layout):
        start = 0
        for number, (size, turns) in enumerate(documents, start=1):
            assert len(turns) == size, (size, turns)
            turn_ids[row, start : start + size] = torch.tensor(turns)
            document_ids[row, start : start + size] = number
            positions[row, start : start + size] = torch.arange(size)
            start += size
    last_hidden = torch.randn(*shape, HIDDEN, generator=generator)
    return Features(
        token_ids=torch.randint(0, VOCAB, shape, generator=generator),
        turn_ids=turn_ids,
        document_ids=document_ids,
        positions=positions,
        taps=torch.randn(*shape, 3 * HIDDEN, generator=generator),
        last_hidden=last_hidden,
        log_normaliser=4.0 + torch.rand(shape, generator=generator),
        argmax=torch.randint(0, VOCAB, shape, generator=generator),
    )


def exact_pair(layers: int, layout: list[list[tuple[int, list[int]]]], length: int) -> tuple[Eagle3Drafter, Features]:
    """A drafter with random embeddings and rows for it, both in fp64, where a difference is no rounding."""
    drafter = small_drafter(layers).double()
    drafter.embed_tokens.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    assert drafter.embed_tokens.weight.shape == (VOCAB, HIDDEN)
    features = packed(layout, length)
    return drafter, features._replace(taps=features.taps.double())


TWO_ROWS = [
    [(7, [0, 0, 1, 1, 1, 1, 0]), (6, [0, 1, 1, 1, 1, 1])],
    [(11, [0, 0, 0, 1, 1, 0, 0, 2, 2, 2, 2])],
]


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that any operation's result holds."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor):
                self.numbers = max(self.numbers, part.numel())
        return result


class ProductRows(TorchDispatchMode):
    """Notes how many rows the products have whose left side is a batch of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.rows.append(max(args[0].shape))
        return func(*args, **(kwargs or {}))
