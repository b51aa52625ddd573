"""Plain twins of the drafting side of serving: one slot at a time over an explicit list of the slots it sees. Slow,
and obvious.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.outcomes import find, select
from drafters.eagle3_ssd.vocab import VocabMap
from train.validation.round_replay import FanOutPlan, Round


class Node(NamedTuple):
    """One evaluated slot of the plain twin: its keys and values by layer, and its output."""

    keys: list[Tensor]
    values: list[Tensor]
    output: Tensor


class PlainDrafter:
    """Evaluates one slot at a time over an explicit list of visible nodes. Slow, and plainly what
    infer/draft/README.md, section 3, says.
    """

    def __init__(self, model: Eagle3Drafter) -> None:
        self.model = model

    def node(self, token: int, feature_H: Tensor, position: int, sees: list[Node]) -> Node:
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key[0, 0])
            values.append(value[0, 0])
            every_key = torch.stack([n.keys[layer] for n in sees] + [key[0, 0]])  # [L, M, D]
            every_value = torch.stack([n.values[layer] for n in sees] + [value[0, 0]])
            groups = query.shape[2] // key.shape[2]
            every_key, every_value = (x.repeat_interleave(groups, dim=1) for x in (every_key, every_value))
            scores = torch.einsum("nd,lnd->nl", query[0, 0], every_key) * query.shape[-1] ** -0.5
            return torch.einsum("nl,lnd->nd", scores.softmax(-1), every_value)[None, None]

        embeds = self.model.embed(torch.tensor([[token]]))
        hidden = self.model(embeds, feature_H[None, None], torch.tensor([[position]]), attend)
        return Node(keys, values, hidden[0, 0])


class PlainRound:
    """The drafting of one request by the rules: committed slots, glue with stale features, a branch over explicit
    keys.
    """

    def __init__(self, plain: PlainDrafter, tokens: list[int], features: list[Tensor]) -> None:
        self.plain, self.tokens, self.features = plain, tokens, features

    def committed(self) -> list[Node]:
        nodes: list[Node] = []
        for slot in range(len(self.tokens) - 1):
            nodes.append(self.plain.node(self.tokens[slot + 1], self.features[slot], slot, list(nodes)))
        return nodes

    def chain(self, sees: list[Node], start: Node, tokens: list[int], position: int) -> list[Node]:
        """Slots that embed `tokens`, each fed with the output of the one before, seeing `sees` and each other."""
        nodes: list[Node] = []
        for i, token in enumerate(tokens):
            feature = (nodes[-1] if nodes else start).output
            nodes.append(self.plain.node(token, feature, position + i, [*sees, *nodes]))
        return nodes

    def glue(self, committed: list[Node], tokens: list[int], stale_KH: list[Tensor], refresh: int) -> list[Node]:
        """In-flight slots from the given features; each refresh feeds them with the outputs of the pass before."""
        first, features = len(self.tokens) - 1, stale_KH
        nodes: list[Node] = []
        for _ in range(refresh + 1):
            nodes = []
            for i, (token, feature) in enumerate(zip(tokens, features, strict=True)):
                nodes.append(self.plain.node(token, feature, first + i, [*committed, *nodes]))
            features = [committed[-1].output, *(n.output for n in nodes)][: len(tokens)]
        return nodes


class PlainDraft(NamedTuple):
    """A speculation: its tokens, the outputs that predicted them, and how sure the drafter was."""

    tokens: list[int]
    outputs: list[Tensor]
    confidences: list[float]


def plain_rounds(
    model: Eagle3Drafter,
    vocab: VocabMap,
    tokens: Sequence[int],
    features: Sequence[Tensor],
    first: int,
    plan: FanOutPlan,
    refresh: int = 0,
) -> list[Round]:
    """The rounds of a greedy answer `tokens[first:]`, by infer/draft/README.md, section 3, to the letter: whole
    speculations, drafted as served.

    Each round: the committed slots, the glue over all tokens in flight, the choice of branches, the branch of the
    outcome.
    """
    K = len(plan.after_hit) - 1
    with_true_features = PlainRound(PlainDrafter(model), list(tokens), list(features)).committed()
    committed, state, rounds = first + 1, None, []
    while committed + K < len(tokens):
        twin = PlainRound(PlainDrafter(model), list(tokens[:committed]), list(features))
        nodes = with_true_features[: committed - 1]
        anew = _draft(twin, vocab, nodes, nodes[-1], committed - 1, K)
        length = len(plan.after_miss) - 1
        missed = PlainDraft(anew.tokens[:length], anew.outputs[:length], anew.confidences[:length])
        draft = state or missed
        accepted, fresh = (_leading(d.tokens, tokens[committed:]) for d in (draft, anew))
        glue = twin.glue(nodes, draft.tokens, draft.outputs, refresh)
        logits = model.logits(torch.stack([nodes[-1].output, *(n.output for n in glue)]))
        bonus = tokens[committed + accepted]
        everything = select(logits, draft.tokens, [len(vocab)] * len(logits), vocab.draft_to_target)
        ranked = everything.tokens[everything.offsets[accepted] : everything.offsets[accepted + 1]]
        place = ranked.index(bonus) if bonus in ranked else None
        sure = tuple(draft.confidences[: accepted + 1])
        rounds.append(
            Round(
                committed - 2,
                len(draft.tokens),
                accepted,
                fresh,
                state is not None,
                place if plan.looks_up else None,
                sure,
            )
        )
        branches = select(
            logits, draft.tokens, plan.after_miss if state is None else plan.after_hit, vocab.draft_to_target
        )
        state = None
        if find(branches, accepted, bonus) is not None:
            sees = [*nodes, *glue[:accepted]]
            node = twin.chain(sees, sees[-1], [bonus], committed - 1 + accepted)[0]
            state = _draft(twin, vocab, [*sees, node], node, committed + accepted, K)
        committed += accepted + 1
    return rounds


def _draft(twin: PlainRound, vocab: VocabMap, sees: list[Node], start: Node, position: int, length: int) -> PlainDraft:
    """Draft `length` tokens after `start`; the first of them embeds at `position`."""
    tokens: list[int] = []
    outputs: list[Tensor] = []
    confidences: list[float] = []
    node, nodes = start, list(sees)
    for j in range(length):
        probs = twin.plain.model.logits(node.output).softmax(-1)
        outputs.append(node.output)
        confidences.append(float(probs.max()))
        tokens.append(int(vocab.to_target(probs.argmax())))
        node = twin.plain.node(tokens[-1], node.output, position + j, nodes)
        nodes.append(node)
    return PlainDraft(tokens, outputs, confidences)


def _leading(drafted: Sequence[int], written: Sequence[int]) -> int:
    right = [a == b for a, b in zip(drafted, written, strict=False)]
    return right.index(False) if False in right else len(right)
