"""Drafting in sequence: rewrite the newest slots with true features (extend), then draft one token at a time behind
them. Mode sd drafts so; in mode ssd it answers the misses of fallback jit (infer/draft/README.md, sections 3 and 4).

Requests go through each forward together. R rows, H drafter hidden size, K tokens of a speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.draft.model import DraftModel
from infer.draft.sampler import DraftSampler, SampledTokens
from infer.draft.state import DraftRequest, Speculation
from infer.tracing.spans import span

Steps = list[list[SampledTokens]]  # of each request, the tokens taken so far
# (requests that go on, outputs of all, steps of all, place of the next token) -> the next token of those that go on
NextTokens = Callable[[list[int], list[Tensor], Steps, int], list[SampledTokens]]


def draft_in_sequence(
    model: DraftModel, sampler: DraftSampler, requests: Sequence[DraftRequest], lengths: Sequence[int]
) -> list[Speculation]:
    """Draft `lengths[i]` >= 1 tokens after the newest one of each request. Takes max(lengths) forwards, the first of
    which extends.
    """

    def sample(active: list[int], outputs: list[Tensor], steps: Steps, place: int) -> list[SampledTokens]:
        logits_RD = model.logits(torch.stack([outputs[i] for i in active]))
        paths = [[[step.tokens[0] for step in steps[i]]] for i in active]
        return sampler.sample(logits_RD, [requests[i] for i in active], paths, place)

    return _in_sequence(model, requests, lengths, sample)


def run_over(
    model: DraftModel, requests: Sequence[DraftRequest], proposals: Sequence[tuple[int, ...]]
) -> list[Speculation]:
    """Run the drafter over tokens that it did not draft (an n-gram proposal for each request), for their features."""

    def take(active: list[int], outputs: list[Tensor], steps: Steps, place: int) -> list[SampledTokens]:
        return [SampledTokens([proposals[i][place - 1]], None, []) for i in active]

    return _in_sequence(model, requests, list(map(len, proposals)), take)


def extend(model: DraftModel, requests: Sequence[DraftRequest]) -> list[Tensor]:
    """Write the pending slots with their true features, in one forward. Returns each request's output [H] at its
    newest slot, and keeps it.
    """
    rows = [request.pending_rows() for request in requests]
    tokens, positions = [t for r in rows for t in r[0]], [p for r in rows for p in r[1]]
    places = [r.rows(r.newest_slot, len(r.pending_SH)) for r in requests]
    hidden_RH = model.forward(tokens, torch.cat([r.pending_SH for r in requests]), positions, places)
    ends = torch.tensor([len(r.pending_SH) for r in requests]).cumsum(0).tolist()
    for request, end in zip(requests, ends, strict=True):
        request.mark_written(hidden_RH[end - 1], model.blocks)
    return [hidden_RH[end - 1] for end in ends]


def extend_in_part(model: DraftModel, request: DraftRequest, count: int) -> None:
    """Write the oldest `count` pending slots of a long prompt; the rest stays pending."""
    tokens, slots = request.pending_rows()
    rows = [request.rows(slots[count - 1], count)]
    model.forward(tokens[:count], request.pending_SH[:count], slots[:count], rows)
    request.pending_SH = request.pending_SH[count:]
    request.cache_blocks(model.blocks)


def _in_sequence(
    model: DraftModel, requests: Sequence[DraftRequest], lengths: Sequence[int], next_tokens: NextTokens
) -> list[Speculation]:
    """Extend, then one slot at a time, each fed with the output of the slot before it."""
    if not requests:
        return []
    with span("extend"):
        outputs = extend(model, requests)
    features: list[list[Tensor]] = [[] for _ in requests]
    steps: Steps = [[] for _ in requests]
    for place in range(1, max(lengths) + 1):
        active = [i for i, length in enumerate(lengths) if length >= place]
        for i, taken in zip(active, next_tokens(active, outputs, steps, place), strict=True):
            features[i].append(outputs[i])
            steps[i].append(taken)
        if going := [i for i in active if lengths[i] > place]:
            tokens = [steps[i][-1].tokens[0] for i in going]
            slots = [requests[i].newest_slot + place for i in going]
            rows = [requests[i].rows(slot, 1) for i, slot in zip(going, slots, strict=True)]
            with span("draft step"):
                hidden_RH = model.forward(tokens, torch.stack([outputs[i] for i in going]), slots, rows)
            for row, i in enumerate(going):
                outputs[i] = hidden_RH[row]
    return [_speculation(taken, outs) for taken, outs in zip(steps, features, strict=True)]


def _speculation(steps: Sequence[SampledTokens], features: Sequence[Tensor]) -> Speculation:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    lowered = tuple(tuple(step.lowered[0]) for step in steps if step.lowered)
    tokens = tuple(step.tokens[0] for step in steps)
    return Speculation(tokens, torch.stack(list(features)), torch.cat(drawn) if drawn else None, lowered)
