"""Tree steps: draft K tokens on every branch, all branches of all requests in one forward per depth
(infer/draft/README.md, section 3).

A tree is drawn once and grows by one node per branch and step; its nodes are KV slots behind the in-flight ones.
B branches of a request, R of all requests, H drafter hidden size, G = K + 1 glue outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches
from infer.draft.model import DraftModel
from infer.draft.sampler import DraftSampler, SampledTokens
from infer.draft.state import DraftRequest, Paths, PreparedSpeculations
from infer.kernels.attention.paged import PagedRequest
from infer.tracing.spans import span


def tree_mask(prefix: int, glue: int, ks: Sequence[int], depth: int) -> Tensor:
    """Which keys the nodes at `depth` (1..) see, bool [B, prefix + glue + depth * B].

    Keys: `prefix` committed slots, `glue` in-flight slots, then the nodes of each depth, branch by branch. Branch b
    sees the prefix, the first ks[b] in-flight slots, and its own nodes. prefix 2, glue 2, ks (0, 2), depth 1:

        branch 0:   1 1 | 0 0 | 1 0
        branch 1:   1 1 | 1 1 | 0 1
    """
    ks_B1 = torch.tensor(ks)[:, None]
    committed = torch.ones(len(ks), prefix, dtype=torch.bool)
    in_flight = torch.arange(glue)[None] < ks_B1
    return torch.cat([committed, in_flight, torch.eye(len(ks), dtype=torch.bool).repeat(1, depth)], dim=1)


@dataclass(frozen=True)
class Tree:
    """One request's tree: the outcomes its branches stand for, and the glue outputs they start from."""

    request: DraftRequest
    branches: Branches
    outputs_GH: Tensor  # of slot n-2 and the in-flight slots

    @property
    def roots_BH(self) -> Tensor:
        """The feature that each branch starts with: the glue output behind its accepted tokens."""
        return self.outputs_GH[list(self.branches.ks)]

    def first_paths(self) -> Paths:
        """What each branch's first drafted token follows: the accepted tokens in flight, and the bonus token."""
        in_flight = self.request.in_flight.tokens if self.request.in_flight else ()
        return [[*in_flight[:k], token] for k, token in zip(self.branches.ks, self.branches.tokens, strict=True)]

    def positions(self, depth: int) -> list[int]:
        """Rotary positions of the nodes at `depth` (1..): the first node sits behind k in-flight slots."""
        return [self.request.newest_slot + k + depth for k in self.branches.ks]

    def mask(self, depth: int) -> Tensor:
        """What the tree sees with `depth` nodes on each branch, bool (`tree_mask`)."""
        mask = tree_mask(self.request.newest_slot + 1, len(self.outputs_GH) - 1, self.branches.ks, depth)
        return mask.to(self.outputs_GH.device)

    def rows(self, mask_BL: Tensor, depth: int) -> PagedRequest:
        """The rows of tree step `depth`, with the mask of the deepest one."""
        count = len(self.branches.ks)
        last = self.request.newest_slot + len(self.outputs_GH) - 1 + depth * count
        return self.request.rows(last, count, mask_BL[:, : last + 1])


def draft_trees(
    model: DraftModel, sampler: DraftSampler, trees: Sequence[Tree], lookahead: int
) -> list[PreparedSpeculations]:
    """Draft `lookahead` = K tokens on each branch, in K forwards: the speculation for each branch's outcome."""
    tokens = [token for tree in trees for token in tree.branches.tokens]
    hidden_RH = torch.cat([tree.roots_BH for tree in trees])
    deepest = [tree.mask(lookahead) for tree in trees]
    paths = [tree.first_paths() for tree in trees]
    steps: list[list[SampledTokens]] = []
    outputs: list[Tensor] = []
    for depth in range(1, lookahead + 1):
        positions = [position for tree in trees for position in tree.positions(depth)]
        rows = [tree.rows(mask, depth) for tree, mask in zip(trees, deepest, strict=True)]
        with span("tree step"):
            hidden_RH = model.forward(tokens, hidden_RH, positions, rows)
            outputs.append(hidden_RH)
            steps.append(sampler.sample(model.logits(hidden_RH), [tree.request for tree in trees], paths, depth))
        paths = [
            [[*path, token] for path, token in zip(own, taken.tokens, strict=True)]
            for own, taken in zip(paths, steps[-1], strict=True)
        ]
        tokens = [token for taken in steps[-1] for token in taken.tokens]
    features = torch.stack(outputs).split([len(tree.branches.ks) for tree in trees], dim=1)
    return [_prepared(tree.branches, [step[i] for step in steps], features[i]) for i, tree in enumerate(trees)]


def _prepared(branches: Branches, steps: Sequence[SampledTokens], features_KBH: Tensor) -> PreparedSpeculations:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    tokens_BK = [list(tokens) for tokens in zip(*(step.tokens for step in steps), strict=True)]
    lowered = tuple(step.lowered for step in steps if step.lowered)
    return PreparedSpeculations(branches, tokens_BK, features_KBH, torch.stack(drawn) if drawn else None, lowered)
