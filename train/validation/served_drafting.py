"""Drafting as serving does it, over packed rows and without the engine: glue pass, branches, jit answers. Greedy.

The draft round is infer/draft/README.md, section 3; what a miss gets is infer/draft/README.md, section 4.

A state is what is in flight at one place: drafted after a miss, or after a hit out of the state before it. States are
drafted and followed in batches and kept, so plans that come to the same state share its work. Only what the row's own
path takes is computed: a branch that the outcome does not name, and tokens behind the first rejected one, change
nothing.

Shapes: B rows, T positions, S states, R of them in one step, H hidden, M key-value heads, D head dimension, I own keys
of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.eagle3_ssd.align import EMBED_AHEAD, PREDICT_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from infer.kernels.sampling.sample import greedy_ids
from train.objective.unroll import Rows
from train.ops.attention.shared_prefix import attend_shared_prefix, grid_of

LOGIT_ROWS = 256  # rows that logits are made for at a time
STATES = 512  # states worked on at a time


class AnswerSpan(NamedTuple):
    """One answer: places of its first and last token in a row. Serving starts at slot first - 1, which embeds the
    first token.
    """

    row: int
    first: int
    last: int


@dataclass(eq=False)
class State:
    """What is in flight at one place of a row. `features[j]` belongs to the slot of the (j+1)-th drafted token."""

    row: int
    slot: int
    accepted: int = 0
    rejected: int | None = None  # the first drafted token that the row does not have
    features: list[Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    followed: bool = False
    place: int | None = None
    after_hit: State | None = None

    def cut(self, length: int) -> State:
        """The same speculation, of fewer tokens."""
        return State(self.row, self.slot, length, None, self.features[:length], self.confidences[:length])


class TrueSlots(NamedTuple):
    """Every slot of some rows with its true feature: outputs [B, T, H] and, for each decoder layer, [B, M, D, T] and
    [B, M, T, D].
    """

    outputs_BTH: Tensor
    keys_BMDT: list[Tensor]
    values_BMTD: list[Tensor]


class ServedDrafter:
    """A drafter in SSD's order over rows whose true slots are given: K tokens a speculation, `refresh` glue passes
    more.
    """

    def __init__(
        self, drafter: Eagle3Drafter, vocab: VocabMap, rows: Rows, slots: TrueSlots, lookahead: int, refresh: int = 0
    ) -> None:
        self.drafter, self.vocab, self.rows, self.slots = drafter, vocab, rows, slots
        self.lookahead, self.refresh = lookahead, refresh
        self._fresh: dict[tuple[int, int], State] = {}
        self._cut: dict[tuple[int, int, int], State] = {}

    def fresh(self, row: int, slot: int, length: int) -> State:
        """`length` tokens drafted from true features at a place that was given to `draft_fresh`.

        Where fewer are accepted, the tokens behind do not matter: one state stands for all lengths.
        """
        state, key = self._fresh[row, slot], (row, slot, length)
        if state.accepted < length or length == self.lookahead:
            return state
        if key not in self._cut:
            self._cut[key] = state.cut(length)
        return self._cut[key]

    def draft_fresh(self, places: Iterable[tuple[int, int]]) -> None:
        """Draft K tokens from true features at each (row, slot)."""
        new = [State(row, slot) for row, slot in dict.fromkeys(places) if (row, slot) not in self._fresh]
        for part in _parts(new):
            own = _Own(self, part)
            self._draft(part, own, torch.arange(len(part)), torch.zeros(len(part), dtype=torch.int64), own.first_SH)
        self._fresh |= {(state.row, state.slot): state for state in new}

    def follow(self, states: Iterable[State], widest: Sequence[int]) -> None:
        """Glue of each state, where its outcome stands among the candidates, and the speculation that its branch would
        serve.

        That branch is drafted only where the outcome is among the first `widest[k]` candidates.
        """
        new = [state for state in dict.fromkeys(states) if not state.followed or _lacks_branch(state, widest)]
        for part in _parts(new):
            self._follow(part, widest)

    def _follow(self, states: Sequence[State], widest: Sequence[int]) -> None:
        own = _Own(self, states)
        glue_SH = self._glue(states, own)
        for state, place in zip(states, self._places(states, glue_SH), strict=True):
            state.followed, state.place = True, place
        taken = [i for i, state in enumerate(states) if _lacks_branch(state, widest)]
        if not taken:
            return
        parents = [states[i] for i in taken]
        children = [State(p.row, p.slot + p.accepted + 1) for p in parents]
        index, accepted = torch.tensor(taken), _accepted(parents)
        hidden_RH = self._step(own, index, accepted, _slots(children), glue_SH[index])
        self._draft(children, own, index, accepted + 1, hidden_RH)
        for parent, child in zip(parents, children, strict=True):
            parent.after_hit = child

    def _draft(self, states: Sequence[State], own: _Own, index_S: Tensor, place_S: Tensor, hidden_SH: Tensor) -> None:
        """Draft from outputs that predict the first token, up to the first that the row does not have.

        `index` is where the states stand in `own`, `place` the first free one among their own keys.
        """
        active = torch.arange(len(states))
        slots = _slots(states)
        for drafted in range(self.lookahead):
            best, confidence = self._best(hidden_SH)
            tokens = self.vocab.to_target(best)
            right = (tokens == self._token(own.row[index_S[active]], slots[active] + PREDICT_AHEAD + drafted)).tolist()
            for i, row in enumerate(active.tolist()):
                state = states[row]
                state.features.append(hidden_SH[i])
                state.confidences.append(confidence[i])
                state.accepted += right[i]
                state.rejected = None if right[i] else int(tokens[i])
            go_on = torch.tensor(right).nonzero()[:, 0]
            if drafted + 1 == self.lookahead or not len(go_on):
                return
            active = active[go_on]
            hidden_SH = self._step(
                own, index_S[active], place_S[active] + drafted, slots[active] + 1 + drafted, hidden_SH[go_on]
            )

    def _glue(self, states: Sequence[State], own: _Own) -> Tensor:
        """Outputs [S, H] of the last accepted tokens' slots: a pass over the accepted slots of all states, and the
        refresh passes.
        """
        accepted = _accepted(states)
        index = torch.arange(len(states)).repeat_interleave(accepted)
        if not len(index):
            return own.first_SH
        place = torch.arange(len(index)) - (accepted.cumsum(0) - accepted)[index]
        slots = _slots(states)[index] + 1 + place
        is_first = (place == 0)[:, None].to(own.first_SH.device)
        hidden = given = torch.stack([feature for state in states for feature in state.features[: state.accepted]])
        for _ in range(self.refresh + 1):
            hidden = self._step(own, index, place, slots, given)
            given = torch.where(is_first, own.first_SH[index], hidden.roll(1, dims=0))
        moved = accepted.nonzero()[:, 0].to(hidden.device)
        return own.first_SH.index_put((moved,), hidden[accepted.cumsum(0)[accepted > 0] - 1])

    def _places(self, states: Sequence[State], glue_SH: Tensor) -> list[int | None]:
        """How many candidates stand before the bonus token, at k = accepted; equal logits are ranked by id."""
        slots = _slots(states) + _accepted(states)
        bonus = self._token(torch.tensor([state.row for state in states]), slots + PREDICT_AHEAD)
        known = self.vocab.contains(bonus)
        rejected = torch.tensor(
            [-1 if state.rejected is None else state.rejected for state in states], device=bonus.device
        )
        draft_bonus = self.vocab.to_draft(torch.where(known, bonus, self.vocab.draft_to_target[0]))
        draft_rejected = self.vocab.to_draft(torch.where(rejected >= 0, rejected, self.vocab.draft_to_target[0]))
        places = []
        for part in torch.arange(len(states), device=glue_SH.device).split(LOGIT_ROWS):
            logits = self.drafter.logits(glue_SH[part]).float()
            ids = torch.arange(logits.shape[1], device=logits.device)
            wanted, excluded = draft_bonus[part, None], draft_rejected[part, None]
            level, excluded_level = logits.gather(1, wanted), logits.gather(1, excluded)
            before = ((logits > level) | ((logits == level) & (ids < wanted))).sum(1)
            excluded_is_before = (excluded_level > level) | ((excluded_level == level) & (excluded < wanted))
            places.append(before - (excluded_is_before[:, 0] & (rejected[part] >= 0)).long())
        return [
            place if inside else None for place, inside in zip(torch.cat(places).tolist(), known.tolist(), strict=True)
        ]

    def _best(self, hidden_RH: Tensor) -> tuple[Tensor, list[float]]:
        """The likeliest draft ids and their probabilities."""
        ids, confidences = [], []
        for part in hidden_RH.split(LOGIT_ROWS):
            logits = self.drafter.logits(part).float()
            best = torch.tensor(greedy_ids(logits), device=logits.device)
            ids.append(best)
            confidences += (logits.gather(1, best[:, None])[:, 0] - logits.logsumexp(-1)).exp().tolist()
        return torch.cat(ids), confidences

    def _token(self, rows: Tensor, places: Tensor) -> Tensor:
        """Tokens of the rows; past a row's end anything, since rounds that reach there are not counted."""
        device = self.rows.token_ids.device
        return self.rows.token_ids[rows.to(device), places.clamp(max=self.rows.token_ids.shape[1] - 1).to(device)]

    def _step(self, own: _Own, index_R: Tensor, place_R: Tensor, slots_R: Tensor, features_RH: Tensor) -> Tensor:
        """Some slots of the states `index`: outputs [R, H]. Their keys are put at `place` among the state's own, and
        see those before.
        """
        device = own.row.device
        index_R, place_R, slots_R = index_R.to(device), place_R.to(device), slots_R.to(device)
        rows = own.row[index_R]
        embeds = self.drafter.embed(self._token(rows, slots_R + EMBED_AHEAD))
        positions = self.rows.positions[rows, slots_R.clamp(max=self.rows.positions.shape[1] - 1)]
        first, end = int(rows.min()), int(rows.max()) + 1
        grid, visible = grid_of(rows - first, end - first), own.visible_ST[index_R]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own_keys, own_values, seen = own.add(layer, index_R, place_R, key[0], value[0])
            prefix_keys, prefix_values = (
                self.slots.keys_BMDT[layer][first:end],
                self.slots.values_BMTD[layer][first:end],
            )
            return attend_shared_prefix(
                query[0], prefix_keys, prefix_values, visible, own_keys, own_values, seen, grid
            )[None]

        return self.drafter(embeds[None], features_RH[None], positions[None], attend)[0]


class _Own:
    """The slots in flight and the branch nodes of some states: keys and values by layer, [S, I, M, D]. `first`: the
    true slots.
    """

    def __init__(self, serving: ServedDrafter, states: Sequence[State]) -> None:
        documents_BT = serving.rows.document_ids
        device = documents_BT.device
        self.row = torch.tensor([state.row for state in states], device=device)
        self.slot = torch.tensor([state.slot for state in states], device=device)
        documents_ST = documents_BT[self.row]
        same = documents_ST == documents_ST.gather(1, self.slot[:, None])
        self.visible_ST = same & (torch.arange(documents_BT.shape[1], device=device) <= self.slot[:, None])
        self.first_SH = serving.slots.outputs_BTH[self.row, self.slot]
        self.width = 2 * serving.lookahead
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def add(
        self, layer: int, index_R: Tensor, place_R: Tensor, key_RMD: Tensor, value_RMD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write slots of the states `index`. Returns for each its state's keys and values [R, I, M, D], and which it
        sees, [R, I].
        """
        if layer not in self.keys:
            shape = (len(self.row), self.width, *key_RMD.shape[1:])
            self.keys[layer], self.values[layer] = key_RMD.new_zeros(shape), value_RMD.new_zeros(shape)
        self.keys[layer][index_R, place_R], self.values[layer][index_R, place_R] = key_RMD, value_RMD
        width = int(place_R.max()) + 1
        seen = torch.arange(width, device=place_R.device) <= place_R[:, None]
        return self.keys[layer][index_R, :width], self.values[layer][index_R, :width], seen


@torch.no_grad()
def true_slots(drafter: Eagle3Drafter, rows: Rows, features_BTH: Tensor) -> TrueSlots:
    """Run every slot with its fused target feature; attention stays inside documents. One row at a time."""
    layers = range(drafter.config.num_hidden_layers)
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    outputs = []
    for tokens, positions, documents, features in zip(*rows, features_BTH, strict=True):
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril() & (
            documents[:, None] == documents
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            keys[layer].append(key[0].transpose(1, 2))
            values[layer].append(value[0])
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        embeds = drafter.embed(tokens.roll(-EMBED_AHEAD))
        outputs.append(drafter(embeds[None], features[None], positions[None], attend)[0])
    return TrueSlots(
        torch.stack(outputs), [torch.stack(part) for part in keys], [torch.stack(part) for part in values]
    )


def fits(slot: int, lookahead: int, answer: AnswerSpan) -> bool:
    """Whether K tokens and a bonus token are left: rounds that the answer's end would cut are not counted."""
    return slot + lookahead + PREDICT_AHEAD <= answer.last


def _parts(states: Sequence[State]) -> Iterator[list[State]]:
    """In batches of neighbouring rows, so that one meets the keys of few rows."""
    ordered = sorted(states, key=lambda state: state.row)
    for first in range(0, len(ordered), STATES):
        yield ordered[first : first + STATES]


def _slots(states: Sequence[State]) -> Tensor:
    return torch.tensor([state.slot for state in states])


def _accepted(states: Sequence[State]) -> Tensor:
    return torch.tensor([state.accepted for state in states])


def _lacks_branch(state: State, widest: Sequence[int]) -> bool:
    return state.after_hit is None and state.place is not None and state.place < widest[state.accepted]
