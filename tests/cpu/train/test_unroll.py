"""The unroll against its slow twin: every anchor by itself, one query at a time, with visibility written out as in the
specification.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drafters.eagle3_ssd.model import Eagle3Drafter
from tests.cpu.train.small import HIDDEN, TWO_ROWS, VOCAB, LargestTensor, exact_pair, packed, small_drafter
from train.objective.unroll import Rows, deeper_steps, first_step, unroll
from train.target_features.features import Features

DEPTH, LENGTH = 5, 14
Past = list[tuple[int, Tensor, Tensor]]  # (what the key belongs to, key [M, D], value [M, D])


def one_step(
    drafter: Eagle3Drafter, token: int, feature: Tensor, position: int, pasts: list[Past], label: int
) -> Tensor:
    """A step of one query; it appends its own keys to `pasts`, layer by layer, and sees exactly what is in there."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pasts[layer].append((label, key[0, 0], value[0, 0]))
        keys = torch.stack([k for _, k, _ in pasts[layer]]).repeat_interleave(2, dim=1)  # 4 query heads, 2 key heads
        values = torch.stack([v for _, _, v in pasts[layer]]).repeat_interleave(2, dim=1)
        scores = torch.einsum("nd,snd->ns", query[0, 0], keys) / math.sqrt(query.shape[-1])
        return torch.einsum("ns,snd->nd", scores.softmax(-1), values)[None, None]

    embedding = drafter.embed(torch.tensor([[token]]))
    return drafter(embedding, feature[None, None], torch.tensor([[position]]), attend)[0, 0]


def twin(
    drafter: Eagle3Drafter, features: Features, fused: Tensor, row: int, anchor: int, depth: int, window: float
) -> list[Tensor]:
    """Outputs of steps 0..depth at one anchor."""
    tokens, document = features.token_ids[row], features.document_ids[row]
    layers = drafter.config.num_hidden_layers
    slots = [j for j in range(LENGTH - 1) if document[j] == document[anchor]]
    prefix: list[Past] = [[] for _ in range(layers)]
    outputs = []
    for j in slots:  # step 0 of every slot, causally; labels are slots
        hidden = one_step(drafter, int(tokens[j + 1]), fused[row, j], int(features.positions[row, j]), prefix, j)
        if j == anchor:
            outputs.append(hidden)
    own: list[Past] = [[] for _ in range(layers)]
    for d in range(1, depth + 1):
        last_slot = anchor + max(0, d - window)
        first_step = d - window + 1
        pasts = [
            [entry for entry in prefix[layer] if entry[0] <= last_slot]
            + [entry for entry in own[layer] if entry[0] >= first_step]
            for layer in range(layers)
        ]
        hidden = one_step(
            drafter, int(tokens[anchor + 1 + d]), outputs[-1], int(features.positions[row, anchor]) + d, pasts, d
        )
        own = [[*own[layer], pasts[layer][-1]] for layer in range(layers)]
        outputs.append(hidden)
    return outputs


def rows_of(features: Features) -> Rows:
    return Rows(features.token_ids, features.positions, features.document_ids)


# (row, anchor): in the first document, in the second one after it, and at the start of a row
PLACES = [(0, 1), (0, 7), (1, 0), (1, 4)]
ANCHORS = torch.tensor([[1, 7], [0, 4]])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_unroll_equals_one_query_at_a_time(layers: int, window: int | None, recompute: bool) -> None:
    drafter, features = exact_pair(layers, TWO_ROWS, LENGTH)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(2)
    depth = {(0, 1): 4, (0, 7): 4, (1, 0): DEPTH, (1, 4): DEPTH}  # so deep that the steps stay in their document
    weights = {
        place: [torch.randn(HIDDEN, generator=generator).double() for _ in range(depth[place] + 1)] for place in PLACES
    }

    fused = drafter.fuse(features.taps)
    steps = list(unroll(drafter, rows_of(features), fused, ANCHORS, DEPTH, window, recompute))
    fast = {
        (row, anchor): [steps[0][row, anchor]] + [steps[d][row, column] for d in range(1, depth[row, anchor] + 1)]
        for (row, anchor), column in zip(PLACES, [0, 1, 0, 1], strict=True)
    }
    loss = sum(
        (weights[place][d] @ output for place in PLACES for d, output in enumerate(fast[place])),
        torch.zeros(()).double(),
    )
    fast_grads = torch.autograd.grad(loss, trained, allow_unused=True)

    fused = drafter.fuse(features.taps)
    slow = {
        (r, a): twin(drafter, features, fused, r, a, depth[r, a], math.inf if window is None else window)
        for r, a in PLACES
    }
    loss = sum(
        (weights[place][d] @ output for place in PLACES for d, output in enumerate(slow[place])),
        torch.zeros(()).double(),
    )
    slow_grads = torch.autograd.grad(loss, trained, allow_unused=True)

    for place in PLACES:
        for d, (a, b) in enumerate(zip(fast[place], slow[place], strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, p=place, d=d: f"{p} depth {d}: {m}")
    for parameter, a, b in zip(trained, fast_grads, slow_grads, strict=True):
        if a is None or b is None:
            assert a is b and parameter.shape in {(HIDDEN,), (24, HIDDEN)}, "only norm and head are unused"
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)  # norms and softmax are fp32 inside


def test_other_documents_and_later_tokens_do_not_matter() -> None:
    drafter, features = exact_pair(2, TWO_ROWS, LENGTH)
    fused = drafter.fuse(features.taps)
    before = list(unroll(drafter, rows_of(features), fused, ANCHORS, 2))
    changed = features.token_ids.clone()
    changed[0, :7] = (changed[0, :7] + 1) % VOCAB  # the first document, seen from the second
    changed[0, 11:] = (changed[0, 11:] + 1) % VOCAB  # what comes after the two steps at anchor 7
    fused = fused.clone()
    fused[0, 8:] += 1.0  # features after the anchor are never read
    after = list(unroll(drafter, rows_of(features._replace(token_ids=changed)), fused, ANCHORS, 2))
    assert torch.equal(before[2][0, 1], after[2][0, 1])
    assert not torch.equal(before[2][0, 0], after[2][0, 0])


def test_deep_steps_make_nothing_of_the_size_of_a_row_squared() -> None:
    """Fault 9: an anchor's scores are one row of the keys and its own, forward and backward."""
    length, anchors = 240, 3
    drafter, features = small_drafter(2), packed([[(length, [0] * 9 + [1] * (length - 9))]], length)
    drafter.embed_tokens.weight.data.normal_()
    rows = rows_of(features)
    with torch.no_grad():
        first = first_step(drafter, rows, drafter.fuse(features.taps))
    with LargestTensor() as largest:
        steps = list(deeper_steps(drafter, rows, first, torch.tensor([[5, 90, 200]]), DEPTH))
        torch.stack(steps).sum().backward()
    queries = anchors * drafter.config.num_attention_heads
    assert queries * length <= largest.numbers <= queries * (length + DEPTH) + 16 * length < length**2 / 4


def test_anchors_do_not_influence_each_other() -> None:
    drafter, features = exact_pair(2, TWO_ROWS, LENGTH)
    fused = drafter.fuse(features.taps)
    together = list(unroll(drafter, rows_of(features), fused, ANCHORS, 3))[3]
    alone = list(unroll(drafter, rows_of(features), fused, ANCHORS[:, 1:], 3))[3]
    torch.testing.assert_close(together[:, 1:], alone, rtol=1e-9, atol=1e-9)
