"""Takes the drafter's next tokens: argmax or a keyed draw for each row, under the request's sampling parameters,
grammar, and Saguaro sampling (infer/draft/README.md, section 2).

R rows, D draft vocabulary, F fan-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.vocab import VocabMap
from infer.draft.state import DraftRequest, Paths
from infer.kernels.sampling.adjust import adjust_logits, mask_logits
from infer.kernels.sampling.keyed_random import Purpose, uniforms
from infer.kernels.sampling.saguaro import tilt
from infer.kernels.sampling.sample import greedy_ids, process_logits, sample_from


class SampledTokens(NamedTuple):
    """One request's tokens of one drafting step, a token per row; `probs_RD` and `lowered` where they were drawn."""

    tokens: list[int]
    probs_RD: Tensor | None
    lowered: list[list[int]]


class Saguaro(NamedTuple):
    """Saguaro sampling: the top-F probabilities are multiplied by `c`; `fan_out[m - 1]` is F at the m-th drafted
    token. An empty `fan_out` turns it off.
    """

    c: float = 1.0
    fan_out: tuple[int, ...] = ()


class DraftSampler:
    """Draft logits in, target token ids out."""

    def __init__(self, vocab: VocabMap, saguaro: Saguaro) -> None:
        self.vocab, self.saguaro = vocab, saguaro

    def sample(
        self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int
    ) -> list[SampledTokens]:
        """The tokens that follow each path, the `place`-th after the bonus token: argmax, or a keyed draw from q'."""
        logits_RD = adjust(logits_RD, requests, paths, self.vocab)
        is_drawn = [not request.sampling.greedy for request in requests]
        if not any(is_drawn):
            return self._argmax(logits_RD, paths)
        if all(is_drawn):
            return self._draw(logits_RD, requests, paths, place)
        pieces, found = logits_RD.split([len(own) for own in paths]), dict[int, SampledTokens]()
        for kind in (False, True):
            members = [i for i, own in enumerate(is_drawn) if own is kind]
            logits, own_paths = torch.cat([pieces[i] for i in members]), [paths[i] for i in members]
            own = (
                self._draw(logits, [requests[i] for i in members], own_paths, place)
                if kind
                else self._argmax(logits, own_paths)
            )
            found |= zip(members, own, strict=True)
        return [found[i] for i in range(len(requests))]

    def _argmax(self, logits_RD: Tensor, paths: Sequence[Paths]) -> list[SampledTokens]:
        tokens = iter(self.vocab.draft_to_target[torch.tensor(greedy_ids(logits_RD))].tolist())
        return [SampledTokens([next(tokens) for _ in own], None, []) for own in paths]

    def _draw(
        self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int
    ) -> list[SampledTokens]:
        """All rows at once. The distribution is the request's own (temperature, filters), tilted where Saguaro
        sampling is on.
        """
        rows = [
            (request, len(request.tokens) + len(path))
            for request, own in zip(requests, paths, strict=True)
            for path in own
        ]
        probs = process_logits(logits_RD, [request.sampling for request, _ in rows])
        fan_out = self.saguaro.fan_out
        tilted = tilt(probs, fan_out[place - 1] if fan_out else 0, self.saguaro.c)
        seeds, positions = [request.sampling.seed for request, _ in rows], [position for _, position in rows]
        draws = uniforms(seeds, positions, Purpose.DRAFT, [place] * len(rows)).to(logits_RD.device)
        to_target, sizes = self.vocab.draft_to_target, [len(own) for own in paths]
        tokens = to_target[sample_from(tilted.probs_RD, draws)].split(sizes)
        lowered = to_target[tilted.lowered_RF].split(sizes)
        drawn = zip(tokens, tilted.probs_RD.split(sizes), lowered, strict=True)
        return [SampledTokens(t.tolist(), probs, low.tolist() if low.shape[1] else []) for t, probs, low in drawn]


def adjust(logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], vocab: VocabMap) -> Tensor:
    """Logits after each request's own bias, penalties and grammar: the target judges under them, and what is drafted
    without them is seldom accepted.
    """
    if not any(request.sampling.adjusts for request in requests):
        return logits_RD
    pieces = list(logits_RD.split([len(own) for own in paths]))
    for i, (request, own) in enumerate(zip(requests, paths, strict=True)):
        if request.sampling.adjusts:
            pieces[i] = adjust_logits(pieces[i], request.sampling, request.text, own, vocab.target_to_draft)
        if request.grammar is not None:
            mask_logits(pieces[i], request.grammar.allowed(own).to(logits_RD.device)[:, vocab.draft_to_target])
    return torch.cat(pieces)
