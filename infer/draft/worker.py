"""The drafter's half of a round, whatever process it runs in: answer outcomes with speculations, then prepare the
speculations for the next outcomes while the target verifies (infer/draft/README.md, section 3).

    answer    lookup.look_up -> a prepared speculation, or the fallback        the target waits for this
    prepare   glue.glue -> outcomes.choose_outcomes -> tree.draft_trees        while the target verifies
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from infer.config import Mode
from infer.draft.glue import glue
from infer.draft.lookup import fall_back, look_up
from infer.draft.model import DraftModel
from infer.draft.outcomes import OutcomePolicy, choose_outcomes
from infer.draft.sampler import DraftSampler, Saguaro
from infer.draft.sequential import draft_in_sequence, extend_in_part, run_over
from infer.draft.settings import DraftSettings, Fallback
from infer.draft.state import DraftRequest, Speculation, rounds_of
from infer.draft.tree import Tree, draft_trees
from infer.ipc.messages import Admit, FromDraft, Outcome, Ready, ServedSpeculation, Source, ToDraft
from infer.kernels.sampling.params import Sampling
from infer.text.grammar import Grammars
from infer.text.ngram import NgramIndex
from infer.tracing.spans import span


class DraftWorker:
    """Holds the running requests of one drafter. `answer` and `prepare` are called in turn."""

    def __init__(self, model: DraftModel, settings: DraftSettings, grammars: Grammars | None = None) -> None:
        self.model, self.settings, self.grammars = model, settings, grammars
        self.requests: dict[str, DraftRequest] = {}
        self.policy = OutcomePolicy(settings, model.card)
        self._answered: list[DraftRequest] = []
        self._busy = 0.0
        if settings.mode is Mode.SSD:  # a card without the figures that the policy needs is refused before a request
            for length in range(settings.lookahead + 1):
                self.policy.fan_out(length, after_hit=False)
        self.sampler = DraftSampler(model.vocab, self._saguaro())

    @property
    def ready(self) -> Ready:
        """What this worker takes in."""
        blocks = self.model.blocks
        tokens = blocks.num_blocks * blocks.block_size
        return Ready(os.getpid(), self.settings.batch_size, tokens, blocks.block_size, self.settings.scratch_tokens)

    def warm_up(self) -> None:
        """Draft once for a made-up request, so that no real one waits for kernels to be loaded and memory to be
        touched.
        """
        features_SH = self.model.embeddings.new_zeros(1, self.model.config.hidden_size)
        self.answer(ToDraft(admits=(Admit("warm-up", (0, 0), features_SH, 2 + self.settings.lookahead, Sampling()),)))
        self.prepare()
        self.answer(ToDraft(outcomes=(Outcome("warm-up", 2, 0, 0, features_SH),)))
        self.answer(ToDraft(retires=("warm-up",)))
        self._busy = 0.0

    @torch.inference_mode()
    def answer(self, message: ToDraft) -> FromDraft:
        """Take in what happened, and serve each request named in it a speculation: prepared, or by the fallback."""
        started = time.perf_counter()
        for retired in message.retires:
            self._retire(retired)
        sources = {admit.request: self._admit(admit) for admit in message.admits}
        for outcome in message.outcomes:
            if outcome.request in self.requests:
                with span("look up", lambda outcome=outcome: {outcome.request: outcome.round}) as traced:
                    source = look_up(self.requests[outcome.request], outcome, self.settings)
                    traced.note(source=source)
                sources[outcome.request] = source
        self._answered = [self.requests[request] for request in sources]
        for request in filter(self._is_behind, self._answered):
            request.in_flight = request.in_flight or request.no_speculation()
        missed = [request for request in self._answered if request.in_flight is None]
        for request, speculation in zip(missed, self.draft_now(missed), strict=True):
            request.in_flight = speculation
        served = tuple(_served(request, sources[request.id]) for request in self._answered)
        busy, self._busy = self._busy + time.perf_counter() - started, 0.0
        if not self.requests:
            self.check()
        blocks = self.model.blocks
        return FromDraft(served, busy, len(self.requests), blocks.num_blocks - blocks.num_free, message.ping)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Fill the speculation caches of the requests answered last. Of a long prompt only a part is read."""
        if self.settings.mode is not Mode.SSD or not self._answered:
            return
        started = time.perf_counter()
        behind = list(filter(self._is_behind, self._answered))
        if behind:
            with span("extend", lambda: rounds_of(behind[:1])):
                extend_in_part(self.model, behind[0], self.settings.read_tokens)
        if requests := [request for request in self._answered if request not in behind]:
            self._fill(requests)
        self._busy += time.perf_counter() - started

    def draft_now(self, requests: Sequence[DraftRequest]) -> list[Speculation]:
        """Draft in sequence after the newest token of each request, at most as many tokens as may still come."""
        if not requests:
            return []
        most = self.settings.jit_lookahead
        lengths = [max(1, min(most, request.max_tokens - len(request.tokens) - 1)) for request in requests]
        with span("draft in sequence", lambda: rounds_of(requests)):
            return draft_in_sequence(self.model, self.sampler, requests, lengths)

    def check(self) -> None:
        """Assert that the books are right: every block is some request's, or free."""
        self.model.blocks.check([request.blocks for request in self.requests.values()])

    def _fill(self, requests: Sequence[DraftRequest]) -> None:
        """Glue, choice of outcomes, tree."""
        proposed = [r for r in requests if r.in_flight and r.in_flight.tokens and not len(r.in_flight.features_KH)]
        proposals = [r.in_flight.tokens for r in proposed if r.in_flight]
        if proposed:
            with span("run over n-grams", lambda: rounds_of(proposed)):
                for request, speculation in zip(proposed, run_over(self.model, proposed, proposals), strict=True):
                    request.in_flight = speculation  # the n-gram's tokens, now with the drafter's own features
        with span("glue", lambda: rounds_of(requests)):
            outputs = glue(self.model, requests, self.settings.refresh)
        with span("select", lambda: rounds_of(requests)):
            chosen = choose_outcomes(self.model, self.policy, requests, outputs)
        trees = [Tree(r, branches, out) for r, branches, out in zip(requests, chosen, outputs, strict=True)]
        with span("tree", lambda: rounds_of(requests)):
            drafted = draft_trees(self.model, self.sampler, trees, self.settings.lookahead)
        for tree, prepared in zip(trees, drafted, strict=True):
            tree.request.prepared = prepared

    def _admit(self, admit: Admit) -> Source:
        """Take in a request, with blocks for all it may ever need here. Slots that the prefix cache holds are not
        computed again.

        Slot j depends on the tokens up to j+1, so the first token is the root of the cached blocks, and a block
        holds the tokens one behind its positions. The newest slot is always computed: drafting begins with its output.
        """
        pool, tokens = self.model.blocks, admit.tokens
        most = (len(tokens) - 2) // pool.block_size if self.settings.prefix_cache else 0
        found = pool.match_prefix(tokens[0], tokens[1:], most)
        pool.incref(found)
        needed = pool.blocks_for(admit.max_tokens + self.settings.scratch_tokens)
        new = pool.allocate(needed - len(found), after=found[-1] if found else None)
        assert new is not None, (
            f"the drafter's pool is full: {len(self.requests)} requests hold {pool.num_blocks - pool.num_free} blocks"
        )
        pending = admit.features_SH[len(found) * pool.block_size :]
        request = DraftRequest(
            admit.request, list(tokens), admit.sampling, (*found, *new), admit.max_tokens, pending, admit.prompt_tokens
        )
        request.prefix_hash = pool.block_hash(found[-1]) if found else tokens[0]
        request.num_cached = len(found)
        request.index = NgramIndex(tokens if self.settings.fallback is Fallback.NGRAM else ())
        if admit.sampling.grammar is not None:
            assert self.grammars is not None, "this drafter was made without a vocabulary for grammars"
            request.grammar = self.grammars.start(admit.sampling.grammar)
            request.grammar.advance(tokens[admit.prompt_tokens :])
        self.requests[request.id] = request
        fall_back(request, self.settings)
        return Source.SYNC if self.settings.mode is Mode.SD else Source.FIRST

    def _retire(self, request_id: str) -> None:
        if request := self.requests.pop(request_id, None):
            self.model.blocks.free(request.blocks)

    def _is_behind(self, request: DraftRequest) -> bool:
        """Whether so much of a prompt is still to be read that others would have to wait for it."""
        unread, most = len(request.pending_SH), self.settings.read_tokens
        return self.settings.mode is Mode.SSD and unread > most and len(self.requests) > 1

    def _saguaro(self) -> Saguaro:
        """Saguaro sampling lowers as many tokens at each place as are prepared there (mode ssd)."""
        settings = self.settings
        if settings.mode is not Mode.SSD or settings.saguaro_c >= 1:
            return Saguaro()
        return Saguaro(settings.saguaro_c, self.policy.fan_out(settings.lookahead, after_hit=True))


def _served(request: DraftRequest, source: Source) -> ServedSpeculation:
    assert request.in_flight is not None, request.id
    return ServedSpeculation(request.id, request.round, source, request.in_flight.tokens, request.in_flight.probs_KD)
