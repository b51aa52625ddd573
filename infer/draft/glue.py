"""The glue pass: one causal pass of the drafter over the bonus token and the speculation in flight, whose outputs are
the roots of the next tree (infer/draft/README.md, section 3).

Pending slots (newly accepted tokens and the bonus token, with true features) are written in the same forward: that
part of it is the extend. R rows, H drafter hidden size, K tokens in flight, G = K + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.draft.model import DraftModel
from infer.draft.state import DraftRequest
from infer.kernels.attention.paged import PagedRequest


def glue(model: DraftModel, requests: Sequence[DraftRequest], refresh: int) -> list[Tensor]:
    """Outputs [G, H] of each request: of slot n-2, which embeds the bonus token, and of the K in-flight slots.

    In-flight slot j takes the feature that the drafter gave when it drafted the token. Each of the `refresh` further
    passes repeats the in-flight slots, fed with what the slot before gave in the pass before.
    """
    outputs = _pass(model, requests, [r.in_flight.features_KH for r in requests if r.in_flight])
    for _ in range(refresh):
        outputs = _pass(model, requests, [outputs_GH[:-1] for outputs_GH in outputs])
    return outputs


def _pass(model: DraftModel, requests: Sequence[DraftRequest], features: Sequence[Tensor]) -> list[Tensor]:
    """One forward over pending and in-flight slots of all requests; `features[i]` [K, H] are those of the in-flight
    ones. No row at all (nothing pending, nothing in flight) takes no forward.
    """
    tokens: list[int] = []
    positions: list[int] = []
    inputs: list[Tensor] = []
    places: list[PagedRequest] = []
    for request, features_KH in zip(requests, features, strict=True):
        assert request.in_flight is not None, request.id
        in_flight = request.in_flight.tokens
        pending_tokens, pending_slots = request.pending_rows()
        count = len(pending_tokens) + len(in_flight)
        tokens += [*pending_tokens, *in_flight]
        positions += [*pending_slots, *range(request.newest_slot + 1, request.newest_slot + 1 + len(in_flight))]
        inputs += [request.pending_SH, features_KH.to(request.pending_SH)]
        if count:
            places.append(request.rows(request.newest_slot + len(in_flight), count))
    hidden_RH = model.forward(tokens, torch.cat(inputs), positions, places) if tokens else None
    outputs, start = [], 0
    for request, features_KH in zip(requests, features, strict=True):
        pending, end = len(request.pending_SH), start + len(request.pending_SH) + len(features_KH)
        own = hidden_RH[start:end] if hidden_RH is not None else features_KH
        start = end
        if pending:
            request.mark_written(own[pending - 1], model.blocks)
        assert request.bonus_output_H is not None, request.id
        outputs.append(torch.cat([request.bonus_output_H[None], own[pending:]]))
    return outputs
