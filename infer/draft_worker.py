"""One drafter's work, whatever process it runs in (ssd.md, sections 5 and 6): answer outcomes, then prepare for the next ones.

    look_up -> Speculation, or a fallback        the target waits for this
    glue -> select -> tree -> Prepared           while the target verifies

Extending (rewriting the newly accepted slots with true features) is one pass with the first step that follows it.
R rows, H drafter hidden size, K look-ahead, B branches, D draft vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches, OutcomeStatistics, fan_out, select_many, statistics_of
from infer.config import EngineSettings, Mode
from infer.draft_model import DraftModel
from infer.draft_state import DraftRequest, Prepared, Speculation, tree_mask
from infer.fallback import Fallback, NgramIndex
from infer.grammar import Grammars
from infer.kernels.adjust import adjust_logits, mask_logits
from infer.kernels.paged_attention import PagedRequest
from infer.kernels.saguaro import tilt
from infer.kernels.sample import Purpose, Sampling, greedy_ids, process_logits, sample_from, uniforms
from infer.messages import Admit, Answer, FromDraft, Outcome, Ready, ToDraft
from infer.request import Source


class DraftPlan(NamedTuple):
    """The settings a drafter works by. In mode sd it drafts when asked and prepares nothing."""

    mode: Mode
    lookahead: int
    jit_lookahead: int  # tokens drafted while the target waits: each costs it a step, so fewer may serve better
    budget: int
    policy: str
    fallback: Fallback
    refresh: int
    saguaro_c: float
    batch_size: int
    max_model_len: int
    prefix_cache: bool = True
    prefill_tokens: int = 256

    @staticmethod
    def of(settings: EngineSettings, mode: Mode) -> DraftPlan:
        """The drafter's part of the engine's settings; a synchronous drafter answers everything by drafting now."""
        fallback = Fallback.JIT if mode is Mode.SD else Fallback(settings.fallback)
        jit = settings.lookahead if mode is Mode.SD else settings.fallback_lookahead or settings.lookahead
        shared = {name: getattr(settings, name) for name in DraftPlan._fields if name not in ("mode", "fallback", "jit_lookahead")}
        return DraftPlan(mode=mode, fallback=fallback, jit_lookahead=jit, **shared)

    @property
    def scratch_tokens(self) -> int:
        """Keys that a request needs behind its own: the in-flight slots, and a tree."""
        return self.lookahead * (1 + self.budget)

    @property
    def read_tokens(self) -> int:
        """Slots of a prompt that are written while others wait; never less than what a verification may add."""
        return max(self.prefill_tokens, 2 * (self.lookahead + 1))

    @property
    def region_tokens(self) -> int:
        """Keys of the longest request."""
        return self.max_model_len + self.scratch_tokens


Paths = Sequence[Sequence[int]]  # of one request's rows: the tokens after its committed ones that a row follows


class Drawn(NamedTuple):
    """One request's tokens of one drafting step; `probs_RD` and `lowered` where they were sampled."""

    tokens: list[int]
    probs_RD: Tensor | None
    lowered: list[list[int]]


@dataclass(frozen=True)
class Branching:
    """One request's tree while it grows: where each branch starts, and the drafter's outputs it starts from."""

    request: DraftRequest
    branches: Branches
    outputs_GH: Tensor  # of slot n-2 and the in-flight slots

    def first_paths(self) -> Paths:
        """What each branch's first drafted token follows: accepted tokens of the speculation in flight, and the bonus token."""
        flying = self.request.in_flight.tokens if self.request.in_flight else ()
        return [[*flying[:k], token] for k, token in zip(self.branches.ks, self.branches.tokens, strict=True)]


class DraftWorker:
    """Holds the running requests of one drafter. `answer` and `prepare` are called in turn."""

    def __init__(self, model: DraftModel, plan: DraftPlan, grammars: Grammars | None = None) -> None:
        self.model, self.plan, self.grammars = model, plan, grammars
        self.requests: dict[str, DraftRequest] = {}
        self.statistics: dict[bool, OutcomeStatistics] = {hit: statistics_of(model.card, hit) for hit in (False, True)}
        self._answered: list[DraftRequest] = []
        self._busy = 0.0
        for length in range(plan.lookahead + 1) if plan.mode is Mode.SSD else ():
            self._fan_out(length, after_hit=False)  # a card without figures is refused here, before anything runs

    @property
    def ready(self) -> Ready:
        """What this worker takes in."""
        blocks = self.model.blocks
        tokens = blocks.num_blocks * blocks.block_size
        return Ready(os.getpid(), self.plan.batch_size, tokens, blocks.block_size, self.plan.scratch_tokens)

    def warm_up(self) -> None:
        """Draft once for a made-up request, so that no real one waits for kernels to be loaded and memory to be touched."""
        features_SH = self.model.embeddings.new_zeros(1, self.model.config.hidden_size)
        self.answer(ToDraft(admits=(Admit("warm-up", (0, 0), features_SH, 2 + self.plan.lookahead, Sampling()),)))
        self.prepare()
        self.answer(ToDraft(outcomes=(Outcome("warm-up", 2, 0, 0, features_SH),)))
        self.answer(ToDraft(retires=("warm-up",)))
        self._busy = 0.0

    @torch.inference_mode()
    def answer(self, message: ToDraft) -> FromDraft:
        """Take in what happened, and give each request named in it a speculation: from the cache, or by the fallback."""
        started = time.perf_counter()
        for retired in message.retires:
            self._retire(retired)
        sources = {admit.request: self._admit(admit) for admit in message.admits}
        sources |= {o.request: self._look_up(o) for o in message.outcomes if o.request in self.requests}
        self._answered = [self.requests[request] for request in sources]
        for request in filter(self._is_behind, self._answered):
            request.in_flight = request.in_flight or self._no_speculation(request)
        drafted_now = [r for r in self._answered if r.in_flight is None]
        for request, speculation in zip(drafted_now, self.chain(drafted_now), strict=True):
            request.in_flight = speculation
        answers = [self._answer_of(request, sources[request.id]) for request in self._answered]
        busy, self._busy = self._busy + time.perf_counter() - started, 0.0
        if not self.requests:
            self.check()
        blocks = self.model.blocks
        return FromDraft(tuple(answers), busy, len(self.requests), blocks.num_blocks - blocks.num_free, message.ping)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Fill the caches of the requests answered last: glue, choice of outcomes, tree. Of a long prompt only a part is read."""
        if self.plan.mode is not Mode.SSD or not self._answered:
            return
        started = time.perf_counter()
        behind = list(filter(self._is_behind, self._answered))
        if behind:
            self._read_on(behind[0])
        if requests := [request for request in self._answered if request not in behind]:
            self._fill(requests)
        self._busy += time.perf_counter() - started

    def _fill(self, requests: Sequence[DraftRequest]) -> None:
        proposed = [r for r in requests if r.in_flight and r.in_flight.tokens and not len(r.in_flight.features_KH)]
        given = [r.in_flight.tokens for r in proposed if r.in_flight]
        for request, speculation in zip(proposed, self.chain(proposed, given), strict=True):
            request.in_flight = speculation  # the n-gram's tokens, now with the drafter's own features
        outputs = self._glue(requests)
        chosen = self._select(requests, outputs)
        trees = [Branching(r, b, o) for r, b, o in zip(requests, chosen, outputs, strict=True)]
        for tree, prepared in zip(trees, self._tree(trees), strict=True):
            tree.request.prepared = prepared

    def check(self) -> None:
        """Assert that the books are right: every block is some request's, or free."""
        self.model.blocks.check([request.blocks for request in self.requests.values()])

    def _retire(self, request_id: str) -> None:
        if request := self.requests.pop(request_id, None):
            self.model.blocks.free(request.blocks)

    def _admit(self, admit: Admit) -> Source:
        """Take in a request, with blocks for all it may ever need here. Slots that the prefix cache holds are not computed again.

        Slot j depends on the tokens up to j+1, so a chain begins at the first token and its blocks hold the tokens behind it. The newest
        slot is always computed: drafting begins with its output.
        """
        pool, tokens = self.model.blocks, admit.tokens
        most = (len(tokens) - 2) // pool.block_size if self.plan.prefix_cache else 0
        found = pool.find(tokens[0], tokens[1:], most)
        pool.hold(found)
        needed = pool.blocks_for(admit.max_tokens + self.plan.scratch_tokens)
        new = pool.allocate(needed - len(found), after=found[-1] if found else None)
        assert new is not None, f"the drafter's pool is full: {len(self.requests)} requests hold {pool.num_blocks - pool.num_free} blocks"
        pending = admit.features_SH[len(found) * pool.block_size :]
        chain = pool.identity(found[-1]) if found else tokens[0]
        request = DraftRequest(admit.request, list(tokens), admit.sampling, (*found, *new), admit.max_tokens, pending, admit.prompt_tokens)
        request.chain, request.published = chain, len(found)
        request.index = NgramIndex(tokens if self.plan.fallback is Fallback.NGRAM else ())
        if admit.sampling.grammar is not None:
            assert self.grammars is not None, "this drafter was made without a vocabulary for grammars"
            request.grammar = self.grammars.start(admit.sampling.grammar)
            request.grammar.advance(tokens[admit.prompt_tokens :])
        self.requests[request.id] = request
        self._fall_back(request)
        return Source.SYNC if self.plan.mode is Mode.SD else Source.FIRST

    def _is_behind(self, request: DraftRequest) -> bool:
        """Whether so much of a prompt is still to be read that others would have to wait for it."""
        return self.plan.mode is Mode.SSD and len(request.pending_SH) > self.plan.read_tokens and len(self.requests) > 1

    def _read_on(self, request: DraftRequest) -> None:
        """Write as many of the pending slots as a round may; the rest stays pending."""
        tokens, slots = request.pending_rows()
        count = self.plan.read_tokens
        self.model.forward(tokens[:count], request.pending_SH[:count], slots[:count], [request.rows(slots[count - 1], count)])
        request.pending_SH = request.pending_SH[count:]
        self._publish(request)

    def _written(self, request: DraftRequest, output_H: Tensor) -> None:
        """All pending slots are written; the newest one gave `output_H`."""
        request.bonus_output_H, request.pending_SH = output_H, request.pending_SH[:0]
        self._publish(request)

    def _publish(self, request: DraftRequest) -> None:
        """Let others find the blocks that hold true slots only."""
        pool, written = self.model.blocks, request.newest_slot + 1 - len(request.pending_SH)
        while (request.published + 1) * pool.block_size <= written:
            start = request.published * pool.block_size
            block, embedded = request.blocks[request.published], request.tokens[start + 1 : start + 1 + pool.block_size]
            request.chain = pool.publish(block, request.chain, embedded)
            request.published += 1

    def _look_up(self, outcome: Outcome) -> Source:
        """Advance a request by one verification; its new speculation, where the cache holds it, is then in flight."""
        request = self.requests[outcome.request]
        assert outcome.round == request.round, f"{request.id}: outcome of round {outcome.round}, expected {request.round}"
        prepared = request.prepared
        found = prepared.look_up(outcome.accepted, outcome.bonus) if prepared else None
        accepted = request.in_flight.tokens[: outcome.accepted] if request.in_flight else ()
        request.tokens += [*accepted, outcome.bonus]
        if request.grammar is not None:
            request.grammar.advance([*accepted, outcome.bonus])
        if self.plan.fallback is Fallback.NGRAM:
            request.index.extend([*accepted, outcome.bonus])
        request.pending_SH = torch.cat([request.pending_SH, outcome.features_SH.to(request.pending_SH)])
        request.prepared, request.bonus_output_H = None, None
        request.in_flight, request.after_hit = found, found is not None
        if found:
            return Source.HIT
        self._fall_back(request)
        if self.plan.mode is Mode.SD:
            return Source.SYNC
        return Source(self.plan.fallback.value) if prepared else Source.FIRST

    def _fall_back(self, request: DraftRequest) -> None:
        """What a miss gets at once; `jit` is left to be drafted, for all missed requests together."""
        if self.plan.fallback is Fallback.NONE:
            request.in_flight = self._no_speculation(request)
        elif self.plan.fallback is Fallback.NGRAM:
            proposed = request.index.propose(self.plan.lookahead)
            kept = len(proposed) if request.grammar is None else request.grammar.valid(proposed)
            request.in_flight = self._no_speculation(request)._replace(tokens=tuple(proposed[:kept]))

    def _no_speculation(self, request: DraftRequest) -> Speculation:
        return Speculation((), request.pending_SH.new_empty(0, self.model.config.hidden_size))

    def _answer_of(self, request: DraftRequest, source: Source) -> Answer:
        assert request.in_flight is not None, request.id
        return Answer(request.id, request.round, source, request.in_flight.tokens, request.in_flight.probs_KD)

    def chain(self, requests: Sequence[DraftRequest], given: Sequence[tuple[int, ...]] | None = None) -> list[Speculation]:
        """Draft K tokens after the newest one of each request, or follow the `given` ones: extend, then one slot at a time."""
        if not requests:
            return []
        jit = self.plan.jit_lookahead
        lengths = list(map(len, given)) if given else [max(1, min(jit, r.max_tokens - len(r.tokens) - 1)) for r in requests]
        outputs = self._extend(requests)
        features: list[list[Tensor]] = [[] for _ in requests]
        drawn: list[list[Drawn]] = [[] for _ in requests]
        for place in range(1, max(lengths) + 1):
            active = [i for i, length in enumerate(lengths) if length >= place]
            logits_RD = self.model.logits(torch.stack([outputs[i] for i in active]))
            paths = [[[step.tokens[0] for step in drawn[i]]] for i in active]
            steps = self._draw(logits_RD, [requests[i] for i in active], paths, place) if not given else None
            for row, i in enumerate(active):
                features[i].append(outputs[i])
                drawn[i].append(steps[row] if steps else Drawn([given[i][place - 1]], None, []))  # type: ignore[index]
            going = [i for i in active if lengths[i] > place]
            if going:
                tokens, slots = [drawn[i][-1].tokens[0] for i in going], [requests[i].newest_slot + place for i in going]
                rows = [requests[i].rows(slot, 1) for i, slot in zip(going, slots, strict=True)]
                hidden = self.model.forward(tokens, torch.stack([outputs[i] for i in going]), slots, rows)
                for row, i in enumerate(going):
                    outputs[i] = hidden[row]
        return [_speculation(steps, outs) for steps, outs in zip(drawn, features, strict=True)]

    def _extend(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """Write the pending slots with their true features. Returns, and keeps, each request's output at its newest slot."""
        rows = [request.pending_rows() for request in requests]
        tokens, positions = [t for r in rows for t in r[0]], [p for r in rows for p in r[1]]
        places = [r.rows(r.newest_slot, len(r.pending_SH)) for r in requests]
        hidden_RH = self.model.forward(tokens, torch.cat([r.pending_SH for r in requests]), positions, places)
        ends = torch.tensor([len(r.pending_SH) for r in requests]).cumsum(0).tolist()
        for request, end in zip(requests, ends, strict=True):
            self._written(request, hidden_RH[end - 1])
        return [hidden_RH[end - 1] for end in ends]

    def _glue(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """One causal pass over pending and in-flight slots: outputs [K + 1, H] of slot n-2 and of the in-flight slots.

        Each refresh pass repeats the in-flight slots, fed with what the slot before gave in the pass before.
        """
        outputs = self._in_flight_pass(requests, [r.in_flight.features_KH for r in requests if r.in_flight])
        for _ in range(self.plan.refresh):
            outputs = self._in_flight_pass(requests, [out[:-1] for out in outputs])
        return outputs

    def _in_flight_pass(self, requests: Sequence[DraftRequest], features: Sequence[Tensor]) -> list[Tensor]:
        tokens: list[int] = []
        positions: list[int] = []
        inputs: list[Tensor] = []
        places: list[PagedRequest] = []
        for request, features_KH in zip(requests, features, strict=True):
            assert request.in_flight is not None, request.id
            flying = request.in_flight.tokens
            pending_tokens, pending_slots = request.pending_rows()
            count = len(pending_tokens) + len(flying)
            tokens += [*pending_tokens, *flying]
            positions += [*pending_slots, *range(request.newest_slot + 1, request.newest_slot + 1 + len(flying))]
            inputs += [request.pending_SH, features_KH.to(request.pending_SH)]
            if count:
                places.append(request.rows(request.newest_slot + len(flying), count))
        hidden_RH = self.model.forward(tokens, torch.cat(inputs), positions, places) if tokens else None
        outputs, start = [], 0
        for request, features_KH in zip(requests, features, strict=True):
            pending, flying = len(request.pending_SH), len(features_KH)
            own = hidden_RH[start : start + pending + flying] if hidden_RH is not None else features_KH
            start += pending + flying
            if pending:
                self._written(request, own[pending - 1])
            assert request.bonus_output_H is not None, request.id
            outputs.append(torch.cat([request.bonus_output_H[None], own[pending:]]))
        return outputs

    def _select(self, requests: Sequence[DraftRequest], outputs: Sequence[Tensor]) -> list[Branches]:
        flying = [r.in_flight for r in requests if r.in_flight]
        counts = [self._fan_out(len(f.tokens), r.after_hit) for r, f in zip(requests, flying, strict=True)]
        paths = [[f.tokens[:k] for k in range(len(f.tokens) + 1)] for f in flying]
        logits_GD = self._adjusted(self.model.logits(torch.cat(list(outputs))), requests, paths)
        lowered = [f.lowered or None for f in flying]
        return select_many(logits_GD, [f.tokens for f in flying], counts, self.model.vocab.draft_to_target, lowered)

    def _fan_out(self, length: int, after_hit: bool) -> tuple[int, ...]:
        return fan_out(self.plan.policy, length, self.plan.budget, self.statistics[after_hit])

    def _tree(self, trees: Sequence[Branching]) -> list[Prepared]:
        """K steps over all branches of all requests together."""
        tokens = [token for tree in trees for token in tree.branches.tokens]
        hidden_RH = torch.cat([tree.outputs_GH[list(tree.branches.ks)] for tree in trees])
        sizes = [len(tree.branches.ks) for tree in trees]
        deepest = [self._mask(tree, self.plan.lookahead) for tree in trees]
        starts = [[tree.request.newest_slot + 2 + k for k in tree.branches.ks] for tree in trees]  # where the bonus tokens sit
        paths = [tree.first_paths() for tree in trees]
        steps: list[list[Drawn]] = []
        outputs: list[Tensor] = []
        for depth in range(1, self.plan.lookahead + 1):
            positions = [start - 2 + depth for branch_starts in starts for start in branch_starts]
            rows = [self._rows(tree, mask, depth) for tree, mask in zip(trees, deepest, strict=True)]
            hidden_RH = self.model.forward(tokens, hidden_RH, positions, rows)
            steps.append(self._draw(self.model.logits(hidden_RH), [tree.request for tree in trees], paths, depth))
            outputs.append(hidden_RH)
            paths = [
                [[*path, token] for path, token in zip(rows, drawn.tokens, strict=True)]
                for rows, drawn in zip(paths, steps[-1], strict=True)
            ]
            tokens = [token for drawn in steps[-1] for token in drawn.tokens]
        pieces = torch.stack(outputs).split(sizes, dim=1)
        return [_prepared(tree.branches, [step[i] for step in steps], pieces[i]) for i, tree in enumerate(trees)]

    def _mask(self, tree: Branching, depth: int) -> Tensor:
        mask = tree_mask(tree.request.newest_slot + 1, len(tree.outputs_GH) - 1, tree.branches.ks, depth)
        return mask.to(tree.outputs_GH.device)

    def _rows(self, tree: Branching, mask_BL: Tensor, depth: int) -> PagedRequest:
        count = len(tree.branches.ks)
        last = tree.request.newest_slot + len(tree.outputs_GH) - 1 + depth * count
        return tree.request.rows(last, count, mask_BL[:, : last + 1])

    def _draw(self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int) -> list[Drawn]:
        """The tokens that follow each path, the `place`-th after the bonus token: argmax, or a keyed draw from q'."""
        logits_RD = self._adjusted(logits_RD, requests, paths)
        sampled = [not request.sampling.greedy for request in requests]
        if not any(sampled):
            return self._argmax(logits_RD, paths)
        if all(sampled):
            return self._sample(logits_RD, requests, paths, place)
        pieces, drawn = logits_RD.split([len(own) for own in paths]), {}
        for kind in (False, True):
            members = [i for i, own in enumerate(sampled) if own is kind]
            logits, own_paths = torch.cat([pieces[i] for i in members]), [paths[i] for i in members]
            own = self._sample(logits, [requests[i] for i in members], own_paths, place) if kind else self._argmax(logits, own_paths)
            drawn |= zip(members, own, strict=True)
        return [drawn[i] for i in range(len(requests))]

    def _adjusted(self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths]) -> Tensor:
        """Logits after each request's own bias, penalties and grammar: what is drafted without them is seldom accepted under them."""
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

    def _sample(self, logits_RD: Tensor, requests: Sequence[DraftRequest], paths: Sequence[Paths], place: int) -> list[Drawn]:
        """All rows at once. The distribution is the request's own (temperature, filters), tilted where Saguaro sampling is on."""
        rows = [(request, len(request.tokens) + len(path)) for request, own in zip(requests, paths, strict=True) for path in own]
        counts = self._fan_out(self.plan.lookahead, True) if self.plan.mode is Mode.SSD and self.plan.saguaro_c < 1 else ()
        probs = process_logits(logits_RD, [request.sampling for request, _ in rows])
        tilted = tilt(probs, counts[place - 1] if counts else 0, self.plan.saguaro_c)
        seeds, positions = [request.sampling.seed for request, _ in rows], [position for _, position in rows]
        draws = uniforms(seeds, positions, Purpose.DRAFT, [place] * len(rows)).to(logits_RD.device)
        to_target, sizes = self.model.vocab.draft_to_target, [len(own) for own in paths]
        tokens = to_target[sample_from(tilted.probs_RD, draws)].split(sizes)
        lowered = to_target[tilted.lowered_RF].split(sizes)
        drawn = zip(tokens, tilted.probs_RD.split(sizes), lowered, strict=True)
        return [Drawn(t.tolist(), probs, low.tolist() if low.shape[1] else []) for t, probs, low in drawn]


def _speculation(steps: Sequence[Drawn], features: Sequence[Tensor]) -> Speculation:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    lowered = tuple(tuple(step.lowered[0]) for step in steps if step.lowered)
    tokens = tuple(step.tokens[0] for step in steps)
    return Speculation(tokens, torch.stack(list(features)), torch.cat(drawn) if drawn else None, lowered)


def _prepared(branches: Branches, steps: Sequence[Drawn], features_KBH: Tensor) -> Prepared:
    drawn = [step.probs_RD for step in steps if step.probs_RD is not None]
    tokens_BK = [list(tokens) for tokens in zip(*(step.tokens for step in steps), strict=True)]
    return Prepared(branches, tokens_BK, features_KBH, torch.stack(drawn) if drawn else None, tuple(s.lowered for s in steps if s.lowered))
