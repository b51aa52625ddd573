"""What the draft process knows of one request, and the cache of speculations it prepared for it.

Slots count from 0 (`drafters.eagle3_ssd.align`): with n committed tokens, slots 0..n-2 have true features and slot
n-2, the one that embeds the newest token (the bonus token), predicts the next. In-flight slots n-1.. embed the
speculated tokens.

H drafter hidden size, K tokens of a speculation, B branches, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches, find
from infer.draft.fallback import NgramIndex
from infer.kernels.attention.paged import PagedRequest
from infer.kernels.sampling.adjust import Text
from infer.kernels.sampling.params import Sampling
from infer.text.grammar import GrammarState

Paths = Sequence[Sequence[int]]  # of one request's rows: the tokens after its committed ones that a row follows


class Speculation(NamedTuple):
    """K drafted tokens with what the next round needs of them.

    `features_KH[j]` is the drafter's output at the slot before the one that embeds `tokens[j]`: that slot's feature.
    """

    tokens: tuple[int, ...]
    features_KH: Tensor
    probs_KD: Tensor | None = None  # what the tokens were drawn from; None where they were chosen
    lowered: tuple[tuple[int, ...], ...] = ()  # per token, what Saguaro lowered when it was drawn


class Prepared(NamedTuple):
    """One round's cache of one request: branch b was drafted for outcome (`branches.ks[b]`, `branches.tokens[b]`)."""

    branches: Branches
    tokens_BK: list[list[int]]
    features_KBH: Tensor
    probs_KBD: Tensor | None
    lowered_KB: tuple[list[list[int]], ...]

    def look_up(self, accepted: int, bonus: int) -> Speculation | None:
        """The speculation prepared for this outcome, or None: a miss."""
        b = find(self.branches, accepted, bonus)
        if b is None:
            return None
        probs = None if self.probs_KBD is None else self.probs_KBD[:, b]
        lowered = tuple(tuple(place[b]) for place in self.lowered_KB)
        return Speculation(tuple(self.tokens_BK[b]), self.features_KBH[:, b], probs, lowered)


@dataclass
class DraftRequest:
    """One running request on the drafter's side. `DraftWorker` alone changes it."""

    id: str
    tokens: list[int]
    sampling: Sampling
    blocks: tuple[int, ...]
    max_tokens: int
    pending_SH: Tensor  # true features of the newest S slots, whose keys are not written yet
    prompt_tokens: int = 0  # how many of the tokens are the prompt's
    chain: Hashable = None  # what names the published blocks in the prefix cache
    published: int = 0  # how many of its blocks can be found
    in_flight: Speculation | None = None
    after_hit: bool = False
    bonus_output_H: Tensor | None = None  # output of slot n-2, once the pending slots are written
    prepared: Prepared | None = None
    grammar: GrammarState | None = None  # after `tokens`
    index: NgramIndex = field(default_factory=NgramIndex)

    @property
    def round(self) -> int:
        """The number of the next verification: the tokens committed before it."""
        return len(self.tokens)

    @property
    def newest_slot(self) -> int:
        """n - 2: the slot that embeds the bonus token."""
        return len(self.tokens) - 2

    @property
    def text(self) -> Text:
        """The committed tokens, as penalties see them."""
        return Text(self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens :])

    def pending_rows(self) -> tuple[list[int], list[int]]:
        """Tokens and positions of the pending slots."""
        count = len(self.pending_SH)
        return self.tokens[len(self.tokens) - count :], list(range(self.newest_slot + 1 - count, self.newest_slot + 1))

    def rows(self, last_slot: int, count: int, mask_QL: Tensor | None = None) -> PagedRequest:
        """The last `count` slots up to `last_slot` as rows of a forward."""
        return PagedRequest(self.blocks, last_slot + 1, count, mask_QL)


def tree_mask(prefix: int, glue: int, ks: Sequence[int], depth: int) -> Tensor:
    """Which keys the nodes at `depth` (1..) see, bool [B, prefix + glue + depth * B].

    Keys: `prefix` committed slots, `glue` in-flight slots, then the nodes of each depth, branch by branch. Branch b
    sees the prefix, the first ks[b] in-flight slots, and its own nodes. prefix 2, glue 2, ks (0, 2), depth 1:   branch
    0: 1 1 | 0 0 | 1 0      branch 1: 1 1 | 1 1 | 0 1
    """
    ks_B1 = torch.tensor(ks)[:, None]
    committed = torch.ones(len(ks), prefix, dtype=torch.bool)
    return torch.cat(
        [committed, torch.arange(glue)[None] < ks_B1, torch.eye(len(ks), dtype=torch.bool).repeat(1, depth)], dim=1
    )


@dataclass(frozen=True)
class Branching:
    """One request's tree while it grows: where each branch starts, and the drafter's outputs it starts from."""

    request: DraftRequest
    branches: Branches
    outputs_GH: Tensor  # of slot n-2 and the in-flight slots

    def first_paths(self) -> Paths:
        """What each branch's first drafted token follows: accepted tokens of the speculation in flight, and the bonus
        token.
        """
        flying = self.request.in_flight.tokens if self.request.in_flight else ()
        return [[*flying[:k], token] for k, token in zip(self.branches.ks, self.branches.tokens, strict=True)]

    def mask(self, depth: int) -> Tensor:
        """What the tree sees with `depth` tokens on each branch, bool (`tree_mask`)."""
        return tree_mask(self.request.newest_slot + 1, len(self.outputs_GH) - 1, self.branches.ks, depth).to(
            self.outputs_GH.device
        )

    def rows(self, mask_BL: Tensor, depth: int) -> PagedRequest:
        """The rows of tree step `depth`, with the mask of the deepest one."""
        count = len(self.branches.ks)
        last = self.request.newest_slot + len(self.outputs_GH) - 1 + depth * count
        return self.request.rows(last, count, mask_BL[:, : last + 1])
