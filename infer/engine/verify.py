"""Verification of a batch: from the logits of one forward and the speculations to one verdict per request
(infer/README.md, section 2).

R rows of logits (all requests, one after another), V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.engine.request import Request
from infer.kernels.sampling.accept import accept, accept_greedy
from infer.kernels.sampling.adjust import Text, adjust_logits, mask_logits
from infer.kernels.sampling.keyed_random import Purpose, uniform
from infer.kernels.sampling.logprobs import token_logprobs
from infer.kernels.sampling.params import Sampling
from infer.kernels.sampling.sample import greedy_ids, process_logits
from infer.kernels.sampling.verdict import Proposal, Verdict

if TYPE_CHECKING:
    from infer.text.grammar import GrammarState


@dataclass(frozen=True)
class RowToVerify:
    """One request's part of a verification.

    Its logits are rows `start .. start + len(drafted)`: the newest committed token, then the drafted ones. `position`
    is the absolute position (from 0) of that newest committed token, so drafted token j = 1..K sits at `position + j`.
    """

    start: int
    position: int
    drafted: tuple[int, ...] = ()
    proposal: Proposal | None = None  # None: the tokens were chosen, not drawn (argmax, n-gram, nothing drafted)
    sampling: Sampling = field(default_factory=Sampling)
    text: Text = Text()  # read where `sampling` has penalties
    grammar: GrammarState | None = None  # after the committed tokens
    logprobs: int | None = None  # how many of the likeliest tokens to report beside each committed one

    @property
    def rows(self) -> slice:
        """The request's own rows."""
        return slice(self.start, self.start + len(self.drafted) + 1)


def row_of(request: Request, start: int, drafted: Sequence[int] = (), proposal: Proposal | None = None) -> RowToVerify:
    """A running request's part of the verification whose rows begin at `start`."""
    sampling = request.params.sampling
    text = Text(request.prompt_ids, request.new_tokens) if sampling.penalised else Text()
    position, logprobs = len(request.tokens) - 1, request.params.logprobs
    return RowToVerify(start, position, tuple(drafted), proposal, sampling, text, request.grammar, logprobs)


def verify_rows(logits_RV: Tensor, rows: Sequence[RowToVerify]) -> list[Verdict]:
    """Judge every request of a mixed batch: greedy or sampled; with drawn, point-mass or empty speculations of any
    length.

    A verdict depends only on the request's own logits, text, tokens, proposal, sampling and position, so a seed
    repeats its tokens whatever else is in the batch.
    """
    assert all(row.start >= 0 and row.start + len(row.drafted) < len(logits_RV) for row in rows), (
        rows,
        logits_RV.shape,
    )
    adjusted = {row.start: _adjusted(logits_RV, row) for row in rows if row.sampling.adjusts}
    argmax_R = greedy_ids(logits_RV) if any(row.sampling.greedy and row.start not in adjusted for row in rows) else []
    probs = _target_probs(logits_RV, adjusted, [row for row in rows if not row.sampling.greedy])
    verdicts = []
    for row in rows:
        if not row.sampling.greedy:
            verdicts.append(_accept_sampled(probs[row.start], row))
        elif row.start in adjusted:
            verdicts.append(accept_greedy(greedy_ids(adjusted[row.start]), row.drafted))
        else:
            verdicts.append(accept_greedy(argmax_R[row.rows], row.drafted))
    return [_with_logprobs(logits_RV, row, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


def _with_logprobs(logits_RV: Tensor, row: RowToVerify, verdict: Verdict) -> Verdict:
    """The verdict with the log-probabilities of its tokens, where the request asks for them."""
    if row.logprobs is None:
        return verdict
    tokens = [*row.drafted[: verdict.num_accepted], verdict.bonus_token]
    return verdict._replace(
        logprobs=token_logprobs(logits_RV[row.start : row.start + len(tokens)], tokens, row.logprobs)
    )


def _adjusted(logits_RV: Tensor, row: RowToVerify) -> Tensor:
    """The request's logits after its bias, penalties and grammar, each row's state including the drafted tokens before
    it.
    """
    paths = [row.drafted[:j] for j in range(len(row.drafted) + 1)]
    adjusted = adjust_logits(logits_RV[row.rows], row.sampling, row.text, paths)
    if row.grammar is not None:
        mask_logits(adjusted, row.grammar.allowed(paths).to(adjusted.device))
    return adjusted


def _target_probs(logits_RV: Tensor, adjusted: Mapping[int, Tensor], rows: Sequence[RowToVerify]) -> dict[int, Tensor]:
    """Processed distributions [K+1, V] of the sampled requests, by the row they start at; softmax runs once over all
    of them.
    """
    if not rows:
        return {}
    lengths = [len(row.drafted) + 1 for row in rows]
    sampling = [row.sampling for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    pieces = [adjusted.get(row.start, logits_RV[row.rows]) for row in rows]
    sampled_RV = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    parts = process_logits(sampled_RV, sampling).split(lengths)
    return {row.start: part for row, part in zip(rows, parts, strict=True)}


def _accept_sampled(target_probs_LV: Tensor, row: RowToVerify) -> Verdict:
    positions = range(row.position + 1, row.position + len(row.drafted) + 2)
    seed = row.sampling.seed
    return accept(
        target_probs_LV,
        row.drafted,
        row.proposal,
        accept_uniforms=[uniform(seed, position, Purpose.ACCEPT) for position in positions],
        bonus_uniforms=[uniform(seed, position, Purpose.BONUS) for position in positions],
    )
