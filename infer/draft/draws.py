"""How a drafter takes its next tokens: argmax or a keyed draw for each row, under the request's own sampling
parameters and grammar.

R rows, H drafter hidden size, K tokens of a speculation, B branches, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches, OutcomeStatistics, fan_out, statistics_of
from infer.config import Mode
from infer.draft.model import DraftModel
from infer.draft.plan import DraftPlan
from infer.draft.state import DraftRequest, Paths, Prepared, Speculation
from infer.kernels.sampling.adjust import adjust_logits, mask_logits
from infer.kernels.sampling.keyed_random import Purpose, uniforms
from infer.kernels.sampling.saguaro import tilt
from infer.kernels.sampling.sample import greedy_ids, process_logits, sample_from


class Drawn(NamedTuple):
    """One request's tokens of one drafting step; `probs_RD` and `lowered` where they were sampled."""

    tokens: list[int]
    probs_RD: Tensor | None
    lowered: list[list[int]]


class Draws:
    """The drawing side of one drafter: its head's logits in, tokens out."""

    def __init__(self, model: DraftModel, plan: DraftPlan) -> None:
        self.model, self.plan = model, plan
        self.statistics: dict[bool, OutcomeStatistics] = {hit: statistics_of(model.card, hit) for hit in (False, True)}

    def fan_out(self, length: int, after_hit: bool) -> tuple[int, ...]:
        """How many bonus tokens are prepared behind each of 0..`length` accepted tokens."""
        return fan_out(self.plan.policy, length, self.plan.budget, self.statistics[after_hit])

    def draw(
        self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int
    ) -> list[Drawn]:
        """The tokens that follow each path, the `place`-th after the bonus token: argmax, or a keyed draw from q'."""
        logits_RD = self.adjusted(logits_RD, requests, paths)
        sampled = [not request.sampling.greedy for request in requests]
        if not any(sampled):
            return self._argmax(logits_RD, paths)
        if all(sampled):
            return self._sample(logits_RD, requests, paths, place)
        pieces, drawn = logits_RD.split([len(own) for own in paths]), {}
        for kind in (False, True):
            members = [i for i, own in enumerate(sampled) if own is kind]
            logits, own_paths = torch.cat([pieces[i] for i in members]), [paths[i] for i in members]
            own = (
                self._sample(logits, [requests[i] for i in members], own_paths, place)
                if kind
                else self._argmax(logits, own_paths)
            )
            drawn |= zip(members, own, strict=True)
        return [drawn[i] for i in range(len(requests))]

    def adjusted(self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths]) -> Tensor:
        """Logits after each request's own bias, penalties and grammar: what is drafted without them is seldom accepted
        under them.
        """
        if not any(request.sampling.adjusts for request in requests):
            return logits_RD
        pieces, vocab = list(logits_RD.split([len(own) for own in paths])), self.model.vocab
        for i, (request, own) in enumerate(zip(requests, paths, strict=True)):
            if request.sampling.adjusts:
                pieces[i] = adjust_logits(pieces[i], request.sampling, request.text, own, vocab.target_to_draft)
            if request.grammar is not None:
                mask_logits(pieces[i], request.grammar.allowed(own).to(logits_RD.device)[:, vocab.draft_to_target])
        return torch.cat(pieces)

    def _argmax(self, logits_RD: Tensor, paths: Sequence[Paths]) -> list[Drawn]:
        tokens = iter(self.model.vocab.draft_to_target[torch.tensor(greedy_ids(logits_RD))].tolist())
        return [Drawn([next(tokens) for _ in own], None, []) for own in paths]

    def _sample(
        self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int
    ) -> list[Drawn]:
        """All rows at once. The distribution is the request's own (temperature, filters), tilted where Saguaro
        sampling is on.
        """
        rows = [
            (request, len(request.tokens) + len(path))
            for request, own in zip(requests, paths, strict=True)
            for path in own
        ]
        counts = (
            self.fan_out(self.plan.lookahead, True) if self.plan.mode is Mode.SSD and self.plan.saguaro_c < 1 else ()
        )
        probs = process_logits(logits_RD, [request.sampling for request, _ in rows])
        tilted = tilt(probs, counts[place - 1] if counts else 0, self.plan.saguaro_c)
        seeds, positions = [request.sampling.seed for request, _ in rows], [position for _, position in rows]
        draws = uniforms(seeds, positions, Purpose.DRAFT, [place] * len(rows)).to(logits_RD.device)
        to_target, sizes = self.model.vocab.draft_to_target, [len(own) for own in paths]
        tokens = to_target[sample_from(tilted.probs_RD, draws)].split(sizes)
        lowered = to_target[tilted.lowered_RF].split(sizes)
        drawn = zip(tokens, tilted.probs_RD.split(sizes), lowered, strict=True)
        return [Drawn(t.tolist(), probs, low.tolist() if low.shape[1] else []) for t, probs, low in drawn]


def speculation_of(steps: Sequence[Drawn], features: Sequence[Tensor]) -> Speculation:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    lowered = tuple(tuple(step.lowered[0]) for step in steps if step.lowered)
    tokens = tuple(step.tokens[0] for step in steps)
    return Speculation(tokens, torch.stack(list(features)), torch.cat(drawn) if drawn else None, lowered)


def prepared_of(branches: Branches, steps: Sequence[Drawn], features_KBH: Tensor) -> Prepared:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    tokens_BK = [list(tokens) for tokens in zip(*(step.tokens for step in steps), strict=True)]
    return Prepared(
        branches,
        tokens_BK,
        features_KBH,
        torch.stack(drawn) if drawn else None,
        tuple(s.lowered for s in steps if s.lowered),
    )
