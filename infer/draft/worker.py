"""One drafter's work, whatever process it runs in (ssd.md, sections 5 and 6): answer outcomes, then prepare for the
next ones.

    look_up -> Speculation, or a fallback        the target waits for this
    glue -> select -> tree -> Prepared           while the target verifies

Extending (rewriting the newly accepted slots with true features) is one pass with the first step that follows it.
R rows, H drafter hidden size, K look-ahead, B branches, D draft vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.eagle3_ssd.outcomes import Branches, select_many
from infer.config import Mode
from infer.draft.draws import Drawn, Draws, prepared_of, speculation_of
from infer.draft.fallback import Fallback, NgramIndex
from infer.draft.model import DraftModel
from infer.draft.plan import DraftPlan
from infer.draft.state import Branching, DraftRequest, Prepared, Speculation
from infer.engine.request import Source
from infer.ipc.messages import Admit, Answer, FromDraft, Outcome, Ready, ToDraft
from infer.kernels.attention.paged import PagedRequest
from infer.kernels.sampling.params import Sampling
from infer.text.grammar import Grammars


class DraftWorker:
    """Holds the running requests of one drafter. `answer` and `prepare` are called in turn."""

    def __init__(self, model: DraftModel, plan: DraftPlan, grammars: Grammars | None = None) -> None:
        self.model, self.plan, self.grammars = model, plan, grammars
        self.requests: dict[str, DraftRequest] = {}
        self.draws = Draws(model, plan)
        self._answered: list[DraftRequest] = []
        self._busy = 0.0
        for length in range(plan.lookahead + 1) if plan.mode is Mode.SSD else ():
            self.draws.fan_out(length, after_hit=False)  # a card without figures is refused here, before anything runs

    @property
    def ready(self) -> Ready:
        """What this worker takes in."""
        blocks = self.model.blocks
        tokens = blocks.num_blocks * blocks.block_size
        return Ready(os.getpid(), self.plan.batch_size, tokens, blocks.block_size, self.plan.scratch_tokens)

    def warm_up(self) -> None:
        """Draft once for a made-up request, so that no real one waits for kernels to be loaded and memory to be
        touched.
        """
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
        """Fill the caches of the requests answered last: glue, choice of outcomes, tree. Of a long prompt only a part
        is read.
        """
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
        """Take in a request, with blocks for all it may ever need here. Slots that the prefix cache holds are not
        computed again.

        Slot j depends on the tokens up to j+1, so a chain begins at the first token and its blocks hold the tokens
        behind it. The newest slot is always computed: drafting begins with its output.
        """
        pool, tokens = self.model.blocks, admit.tokens
        most = (len(tokens) - 2) // pool.block_size if self.plan.prefix_cache else 0
        found = pool.match_prefix(tokens[0], tokens[1:], most)
        pool.incref(found)
        needed = pool.blocks_for(admit.max_tokens + self.plan.scratch_tokens)
        new = pool.allocate(needed - len(found), after=found[-1] if found else None)
        assert new is not None, (
            f"the drafter's pool is full: {len(self.requests)} requests hold {pool.num_blocks - pool.num_free} blocks"
        )
        pending = admit.features_SH[len(found) * pool.block_size :]
        chain = pool.block_hash(found[-1]) if found else tokens[0]
        request = DraftRequest(
            admit.request, list(tokens), admit.sampling, (*found, *new), admit.max_tokens, pending, admit.prompt_tokens
        )
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
        return (
            self.plan.mode is Mode.SSD and len(request.pending_SH) > self.plan.read_tokens and len(self.requests) > 1
        )

    def _read_on(self, request: DraftRequest) -> None:
        """Write as many of the pending slots as a round may; the rest stays pending."""
        tokens, slots = request.pending_rows()
        count = self.plan.read_tokens
        self.model.forward(
            tokens[:count], request.pending_SH[:count], slots[:count], [request.rows(slots[count - 1], count)]
        )
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
            block, embedded = (
                request.blocks[request.published],
                request.tokens[start + 1 : start + 1 + pool.block_size],
            )
            request.chain = pool.cache_block(block, request.chain, embedded)
            request.published += 1

    def _look_up(self, outcome: Outcome) -> Source:
        """Advance a request by one verification; its new speculation, where the cache holds it, is then in flight."""
        request = self.requests[outcome.request]
        assert outcome.round == request.round, (
            f"{request.id}: outcome of round {outcome.round}, expected {request.round}"
        )
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

    def chain(
        self, requests: Sequence[DraftRequest], given: Sequence[tuple[int, ...]] | None = None
    ) -> list[Speculation]:
        """Draft K tokens after the newest one of each request, or follow the `given` ones: extend, then one slot at a
        time.
        """
        if not requests:
            return []
        jit = self.plan.jit_lookahead
        lengths = (
            list(map(len, given)) if given else [max(1, min(jit, r.max_tokens - len(r.tokens) - 1)) for r in requests]
        )
        outputs = self._extend(requests)
        features: list[list[Tensor]] = [[] for _ in requests]
        drawn: list[list[Drawn]] = [[] for _ in requests]
        for place in range(1, max(lengths) + 1):
            active = [i for i, length in enumerate(lengths) if length >= place]
            logits_RD = self.model.logits(torch.stack([outputs[i] for i in active]))
            paths = [[[step.tokens[0] for step in drawn[i]]] for i in active]
            steps = self.draws.draw(logits_RD, [requests[i] for i in active], paths, place) if not given else None
            for row, i in enumerate(active):
                features[i].append(outputs[i])
                drawn[i].append(steps[row] if steps else Drawn([given[i][place - 1]], None, []))  # type: ignore[index]
            going = [i for i in active if lengths[i] > place]
            if going:
                tokens, slots = (
                    [drawn[i][-1].tokens[0] for i in going],
                    [requests[i].newest_slot + place for i in going],
                )
                rows = [requests[i].rows(slot, 1) for i, slot in zip(going, slots, strict=True)]
                hidden = self.model.forward(tokens, torch.stack([outputs[i] for i in going]), slots, rows)
                for row, i in enumerate(going):
                    outputs[i] = hidden[row]
        return [speculation_of(steps, outs) for steps, outs in zip(drawn, features, strict=True)]

    def _extend(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """Write the pending slots with their true features. Returns, and keeps, each request's output at its newest
        slot.
        """
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
        counts = [self.draws.fan_out(len(f.tokens), r.after_hit) for r, f in zip(requests, flying, strict=True)]
        paths = [[f.tokens[:k] for k in range(len(f.tokens) + 1)] for f in flying]
        logits_GD = self.draws.adjusted(self.model.logits(torch.cat(list(outputs))), requests, paths)
        lowered = [f.lowered or None for f in flying]
        return select_many(logits_GD, [f.tokens for f in flying], counts, self.model.vocab.draft_to_target, lowered)

    def _tree(self, trees: Sequence[Branching]) -> list[Prepared]:
        """K steps over all branches of all requests together."""
        tokens = [token for tree in trees for token in tree.branches.tokens]
        hidden_RH = torch.cat([tree.outputs_GH[list(tree.branches.ks)] for tree in trees])
        sizes = [len(tree.branches.ks) for tree in trees]
        deepest = [tree.mask(self.plan.lookahead) for tree in trees]
        starts = [
            [tree.request.newest_slot + 2 + k for k in tree.branches.ks] for tree in trees
        ]  # where the bonus tokens sit
        paths = [tree.first_paths() for tree in trees]
        steps: list[list[Drawn]] = []
        outputs: list[Tensor] = []
        for depth in range(1, self.plan.lookahead + 1):
            positions = [start - 2 + depth for branch_starts in starts for start in branch_starts]
            rows = [tree.rows(mask, depth) for tree, mask in zip(trees, deepest, strict=True)]
            hidden_RH = self.model.forward(tokens, hidden_RH, positions, rows)
            steps.append(self.draws.draw(self.model.logits(hidden_RH), [tree.request for tree in trees], paths, depth))
            outputs.append(hidden_RH)
            paths = [
                [[*path, token] for path, token in zip(rows, drawn.tokens, strict=True)]
                for rows, drawn in zip(paths, steps[-1], strict=True)
            ]
            tokens = [token for drawn in steps[-1] for token in drawn.tokens]
        pieces = torch.stack(outputs).split(sizes, dim=1)
        return [prepared_of(tree.branches, [step[i] for step in steps], pieces[i]) for i, tree in enumerate(trees)]
