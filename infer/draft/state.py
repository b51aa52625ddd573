"""One running request on the drafter's side: its slots, its KV blocks, the speculation being verified, and the
speculations prepared for the outcomes of that verification.

Slots count from 0 (`drafters.eagle3_ssd.align`): with n committed tokens, slots 0..n-2 have true features, and slot
n-2, the one that embeds the newest token (the bonus token), predicts the next. In-flight slots n-1.. embed the
speculated tokens.

H drafter hidden size, K tokens of a speculation, B branches, S slots, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches, find
from infer.kernels.attention.block_pool import BlockPool
from infer.kernels.attention.paged import PagedRequest
from infer.kernels.sampling.adjust import Text
from infer.kernels.sampling.params import Sampling
from infer.text.grammar import GrammarState
from infer.text.ngram import NgramIndex


class Speculation(NamedTuple):
    """K drafted tokens with what the next round needs of them.

    `features_KH[j]` is the drafter's output at the slot before the one that embeds `tokens[j]`: that slot's feature.
    An n-gram proposal has no features (length 0) until the drafter has run over its tokens.
    """

    tokens: tuple[int, ...]
    features_KH: Tensor
    probs_KD: Tensor | None = None  # the distributions the tokens were drawn from; None: argmax or n-gram
    lowered: tuple[tuple[int, ...], ...] = ()  # per token, the tokens that Saguaro sampling lowered when it was drawn


class PreparedSpeculations(NamedTuple):
    """The speculation cache of one request and round: branch b was drafted for the outcome
    (`branches.ks[b]`, `branches.tokens[b]`).
    """

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
    """One running request on the drafter's side."""

    id: str
    tokens: list[int]  # committed; the newest one is the bonus token
    sampling: Sampling
    blocks: tuple[int, ...]
    max_tokens: int
    pending_SH: Tensor  # true features of the newest S slots, whose keys are not written yet
    prompt_tokens: int = 0  # how many of the tokens are the prompt's
    prefix_hash: Hashable = None  # of the last block in the prefix cache, or the root
    num_cached: int = 0  # how many of its blocks are in the prefix cache
    in_flight: Speculation | None = None  # what the target verifies now
    after_hit: bool = False  # whether `in_flight` came from the speculation cache
    bonus_output_H: Tensor | None = None  # output of slot n-2, once the pending slots are written
    prepared: PreparedSpeculations | None = None
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

    def no_speculation(self) -> Speculation:
        """An empty speculation: the target takes a plain one-token step."""
        return Speculation((), self.pending_SH.new_empty(0, self.pending_SH.shape[1]))

    def pending_rows(self) -> tuple[list[int], list[int]]:
        """Tokens and positions of the pending slots."""
        count = len(self.pending_SH)
        return self.tokens[len(self.tokens) - count :], list(range(self.newest_slot + 1 - count, self.newest_slot + 1))

    def rows(self, last_slot: int, count: int, mask_QL: Tensor | None = None) -> PagedRequest:
        """The last `count` slots up to `last_slot` as rows of a forward."""
        return PagedRequest(self.blocks, last_slot + 1, count, mask_QL)

    def mark_written(self, output_H: Tensor, pool: BlockPool) -> None:
        """All pending slots have their keys now; the newest one gave `output_H`."""
        self.bonus_output_H, self.pending_SH = output_H, self.pending_SH[:0]
        self.cache_blocks(pool)

    def cache_blocks(self, pool: BlockPool) -> None:
        """Put the blocks that hold only true slots into the prefix cache.

        Slot j depends on the tokens up to j+1, so the chain of blocks begins at the first token, and a block is named
        by the tokens that its slots embed: one behind its own positions.
        """
        written = self.newest_slot + 1 - len(self.pending_SH)
        while (self.num_cached + 1) * pool.block_size <= written:
            start = self.num_cached * pool.block_size
            embedded = self.tokens[start + 1 : start + 1 + pool.block_size]
            self.prefix_hash = pool.cache_block(self.blocks[self.num_cached], self.prefix_hash, embedded)
            self.num_cached += 1


def rounds_of(requests: Sequence[DraftRequest]) -> dict[str, int]:
    """The round of each request by its id, for traces."""
    return {request.id: request.round for request in requests}


Paths = Sequence[Sequence[int]]  # of one request's rows: the tokens after its committed ones that a row follows
