"""Chooses the outcomes (accepted length, bonus token) that a round prepares speculations for
(infer/draft/README.md, section 1).

The policy is set here and nowhere else: `OutcomePolicy.fan_out` says how many bonus tokens are prepared behind each
accepted length, `choose_outcomes` takes the likeliest ones of the glue distributions. The arithmetic of both, and the
numbering of branches, is `drafters.eagle3_ssd.outcomes`, which training uses too.

H drafter hidden size, G = K + 1 glue rows of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.outcomes import Branches, OutcomeStatistics, fan_out, select_many, statistics_of
from infer.draft.model import DraftModel
from infer.draft.sampler import adjust
from infer.draft.settings import DraftSettings
from infer.draft.state import DraftRequest


class OutcomePolicy:
    """How the budget of branches is spread over the accepted lengths: by `policy` and the drafter card's figures."""

    def __init__(self, settings: DraftSettings, card: DrafterCard) -> None:
        self.settings = settings
        self.statistics: dict[bool, OutcomeStatistics] = {hit: statistics_of(card, hit) for hit in (False, True)}

    def fan_out(self, length: int, after_hit: bool) -> tuple[int, ...]:
        """F_0..F_length: how many bonus tokens are prepared behind each of 0..`length` accepted tokens.

        Features are older after a hit, so the card holds separate figures for it. Raises `UserError` where the policy
        needs figures and the card has none.
        """
        return fan_out(self.settings.policy, length, self.settings.budget, self.statistics[after_hit])


def choose_outcomes(
    model: DraftModel, policy: OutcomePolicy, requests: Sequence[DraftRequest], glue_outputs: Sequence[Tensor]
) -> list[Branches]:
    """The branches of each request, from the outputs [G, H] of its glue pass; one top-F over all requests.

    The glue distributions stand under the request's own bias, penalties and grammar. A token that Saguaro sampling
    lowered when the next speculated one was drawn comes before the others: the residual lives on those tokens.
    """
    in_flight = [request.in_flight for request in requests if request.in_flight is not None]
    fan_outs = [policy.fan_out(len(f.tokens), r.after_hit) for r, f in zip(requests, in_flight, strict=True)]
    paths = [[f.tokens[:k] for k in range(len(f.tokens) + 1)] for f in in_flight]
    logits_GD = adjust(model.logits(torch.cat(list(glue_outputs))), requests, paths, model.vocab)
    lowered = [f.lowered or None for f in in_flight]
    return select_many(logits_GD, [f.tokens for f in in_flight], fan_outs, model.vocab.draft_to_target, lowered)
