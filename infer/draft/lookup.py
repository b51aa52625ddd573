"""Looks up a verification's outcome among the prepared speculations, and answers a miss by the fallback
(infer/draft/README.md, section 4).
"""

from __future__ import annotations

import torch

from infer.config import Mode
from infer.draft.settings import DraftSettings, Fallback
from infer.draft.state import DraftRequest
from infer.ipc.messages import Outcome, Source


def look_up(request: DraftRequest, outcome: Outcome, settings: DraftSettings) -> Source:
    """Advance a request by one verification, and put its next speculation in flight: the prepared one on a hit, else
    that of the fallback (`fall_back`). Returns where the speculation comes from.
    """
    assert outcome.round == request.round, f"{request.id}: outcome of round {outcome.round}, expected {request.round}"
    prepared = request.prepared
    found = prepared.look_up(outcome.accepted, outcome.bonus) if prepared else None
    _advance(request, outcome, settings)
    request.in_flight, request.after_hit = found, found is not None
    if found:
        return Source.HIT
    fall_back(request, settings)
    if settings.mode is Mode.SD:
        return Source.SYNC
    return Source(settings.fallback.value) if prepared else Source.FIRST


def fall_back(request: DraftRequest, settings: DraftSettings) -> None:
    """Put in flight what a miss gets at once. `jit` leaves nothing there: the worker then drafts for all missed
    requests together.
    """
    if settings.fallback is Fallback.NONE:
        request.in_flight = request.no_speculation()
    elif settings.fallback is Fallback.NGRAM:
        proposed = request.index.propose(settings.lookahead)
        kept = len(proposed) if request.grammar is None else request.grammar.valid(proposed)
        request.in_flight = request.no_speculation()._replace(tokens=tuple(proposed[:kept]))


def _advance(request: DraftRequest, outcome: Outcome, settings: DraftSettings) -> None:
    """Take in the committed tokens and their true features. What was prepared for this verification is void."""
    accepted = request.in_flight.tokens[: outcome.accepted] if request.in_flight else ()
    committed = [*accepted, outcome.bonus]
    request.tokens += committed
    if request.grammar is not None:
        request.grammar.advance(committed)
    if settings.fallback is Fallback.NGRAM:
        request.index.extend(committed)
    request.pending_SH = torch.cat([request.pending_SH, outcome.features_SH.to(request.pending_SH)])
    request.prepared, request.bonus_output_H = None, None
