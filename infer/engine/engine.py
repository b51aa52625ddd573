"""The engine: one `step` is one round (infer/README.md, section 1), for decoding requests and for prompts in chunked
prefill alike.

    schedule -> collect the speculations -> target forward -> verify -> commit -> report the outcomes to the drafter
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from drafters.base.errors import UserError
from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.draft_client import DraftClient, DraftState
from infer.engine.request import FinishReason, Request, RequestOutput, RoundRecord, SamplingParams, new_request
from infer.engine.scheduler import RunningRequest, ScheduledChunk, Scheduler
from infer.engine.target import Rows, TargetOutput, TargetRunner
from infer.engine.verify import row_of, verify_rows
from infer.ipc.messages import ServedSpeculation, Source
from infer.kernels.sampling.verdict import Proposal, Verdict
from infer.text.grammar import Grammars, Vocabulary
from infer.tracing.spans import Span, span

NO_SPECULATION = ServedSpeculation("", 0, Source.ALONE, ())


class BatchedChunk(NamedTuple):
    """A scheduled chunk with its speculation, as `rows` of the round's forward; the last rows are the drafted ones.

    `start` and `start_logits` are the places of its first row among all rows and among the rows with logits.
    """

    chunk: ScheduledChunk
    speculation: ServedSpeculation
    drafted: tuple[int, ...]
    rows: Rows
    start: int
    start_logits: int

    @property
    def running(self) -> RunningRequest:
        return self.chunk.running

    @property
    def request(self) -> Request:
        return self.chunk.request

    @property
    def decodes(self) -> bool:
        """Whether this is a verification, not a forward over a prompt. To be asked before the round is committed."""
        return self.chunk.rows == 1 and len(self.request.tokens) > len(self.request.prompt_ids)


class Engine:
    """Runs requests in one mode. One thread drives it; `infer.launch.launch` builds it."""

    def __init__(
        self,
        settings: EngineSettings,
        mode: Mode,
        runner: TargetRunner,
        draft_client: DraftClient,
        memory: str = "",
        trained_length: int | None = None,
    ) -> None:
        self.settings, self.mode, self.runner, self.draft_client = settings, mode, runner, draft_client
        self.memory = memory  # the sizes of the KV pools, in words
        self._unwarned_length = trained_length  # of the longest training text; None once the user was warned
        lookahead = 0 if mode is Mode.AR else settings.lookahead
        self.scheduler = Scheduler(
            runner.blocks, settings.batch_size, lookahead, settings.prefill_tokens, settings.prefix_cache
        )
        self.grammars = Grammars(partial(Vocabulary.of, runner.target))
        self._ids = itertools.count()
        self._cancelled: list[Request] = []

    @property
    def target(self) -> Target:
        """The loaded target, with its tokenizer and facts."""
        return self.runner.target

    @property
    def draft_alive(self) -> bool:
        """Whether a drafter serves. False in mode ar, and while the draft process is dead or silent."""
        return self.draft_client.state is DraftState.SERVING

    @property
    def draft_failures(self) -> int:
        """How often the draft process died, or was given up, so far."""
        return self.draft_client.failures

    @property
    def draft_state(self) -> DraftState:
        """Whether a drafter serves, starts, is silent or gone."""
        return self.draft_client.state

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft process (mode ssd)."""
        return self.draft_client.pid

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._cancelled)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a prompt. Raises `UserError` for an empty prompt and for one that leaves no room for an answer."""
        if not len(prompt_ids):
            raise UserError("the prompt is empty: give at least one token of text")
        limit = self.settings.max_model_len
        if len(prompt_ids) >= limit:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens, max_model_len is {limit}: shorten it or raise max_model_len"
            )
        name = request_id or f"request-{next(self._ids)}"
        if self.scheduler.knows(name):
            raise UserError(f"request id {name!r} is already in use; give each request its own")
        most = min(len(prompt_ids) + params.max_new_tokens, limit)
        self.scheduler.submit(new_request(name, prompt_ids, params, most, self.target, self.grammars))
        self._warn_beyond(most)
        return name

    def _warn_beyond(self, length: int) -> None:
        trained = self._unwarned_length
        if trained is not None and length > trained:
            print(
                f"warning: drafter {self.settings.drafter} was trained on texts of at most {trained} tokens, "
                f"a request may reach {length}: expect lower acceptance beyond",
                file=sys.stderr,
            )
            self._unwarned_length = None

    def cancel(self, request_id: str) -> None:
        """End a request between two steps. Its last output, with reason "cancel", comes from the next step."""
        request = self.scheduler.drop_waiting(request_id)
        if request is None and (running := self.scheduler.running.get(request_id)):
            request = running.request
            self._release(request)
        if request is not None:
            request.finish_reason = FinishReason.CANCEL
            self._cancelled.append(request)

    def step(self) -> list[RequestOutput]:
        """Run one round, and return what each request gained; an empty list where there is nothing to do."""
        outputs = [RequestOutput(r.id, (), FinishReason.CANCEL, r) for r in self._cancelled]
        self._cancelled = []
        self.draft_client.reconnect()
        started = time.perf_counter()
        chunks, preempted = self.scheduler.schedule()
        for request in preempted:
            self.draft_client.retire(request.id)
        if not chunks:
            self.draft_client.send()
            return outputs
        batch = self._batch(chunks, self.draft_client.collect([chunk.request for chunk in chunks if chunk.completes]))
        complete = [item for item in batch if item.chunk.completes]
        before = time.perf_counter()
        with _verification_span(batch) as traced:
            output = self.runner.forward([item.rows for item in batch])
            verdicts = self._verify(complete, output)
            _note_verdicts(traced, complete, verdicts)
        verify = time.perf_counter() - before
        given = [len(item.request.new_tokens) for item in batch]
        for item in batch:
            if not item.chunk.completes:
                self.scheduler.advance(item.running, item.running.num_computed + item.chunk.rows)
        kept = [self._commit(item, verdict, verify) for item, verdict in zip(complete, verdicts, strict=True)]
        self._report(complete, verdicts, output)
        self._count_time(batch, given, time.perf_counter() - started)
        results = zip(complete, kept, strict=True)
        return outputs + [
            RequestOutput(p.request.id, tuple(tokens), p.request.finish_reason, p.request) for p, tokens in results
        ]

    def check_idle(self) -> None:
        """Call it now and then while there is no work: it checks the block counts, and whether the draft process still
        answers.
        """
        if not self.has_work:
            self.check()
            self.draft_client.check_idle()

    def check(self) -> None:
        """Assert that every KV block is accounted for; in an idle engine all of them are free."""
        self.scheduler.check()
        if not self.scheduler.running:
            assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks, "an idle engine holds blocks"

    def close(self) -> None:
        """End the draft process. The target stays loaded as long as somebody holds it."""
        self.draft_client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(
        self, chunks: Sequence[ScheduledChunk], speculations: dict[str, ServedSpeculation]
    ) -> list[BatchedChunk]:
        """The rows of each request, with its speculation cut to the tokens that may still come."""
        batch, start, start_logits = [], 0, 0
        for chunk in chunks:
            running, computed = chunk.running, chunk.running.num_computed
            speculation = speculations.get(chunk.request.id, NO_SPECULATION)
            drafted = speculation.tokens[: chunk.max_drafted]
            ids = [*chunk.request.tokens[computed : computed + chunk.rows], *drafted]
            wanted = len(drafted) + 1 if chunk.completes else 0
            rows = Rows(ids, computed + len(ids), running.blocks, wanted)
            batch.append(BatchedChunk(chunk, speculation, drafted, rows, start, start_logits))
            start, start_logits = start + len(ids), start_logits + wanted
        return batch

    def _verify(self, complete: Sequence[BatchedChunk], output: TargetOutput) -> list[Verdict]:
        to_verify = []
        for item in complete:
            proposal = None
            if item.speculation.probs_KD is not None and item.drafted:
                assert self.draft_client.draft_to_target_D is not None
                probs = item.speculation.probs_KD[: len(item.drafted)].to(output.logits_LV.device)
                proposal = Proposal(probs, self.draft_client.draft_to_target_D)
            to_verify.append(row_of(item.request, item.start_logits, item.drafted, proposal))
        return verify_rows(output.logits_LV, to_verify)

    def _commit(self, item: BatchedChunk, verdict: Verdict, verify: float) -> list[int]:
        request = item.request
        accepted, before = item.drafted[: verdict.num_accepted], len(request.tokens)
        if item.decodes:
            wait, busy = self.draft_client.wait, self.draft_client.busy
            emitted = len(accepted) + 1
            request.rounds.append(
                RoundRecord(item.speculation.source, len(item.drafted), len(accepted), emitted, verify, wait, busy)
            )
        kept = request.commit([*accepted, verdict.bonus_token], verdict.logprobs)
        self.scheduler.advance(item.running, min(before + len(accepted), len(request.tokens)))
        if request.finish_reason is not None:
            self._release(request)
        return kept

    def _release(self, request: Request) -> None:
        self.scheduler.release(request.id)
        self.draft_client.retire(request.id)

    def _report(self, complete: Sequence[BatchedChunk], verdicts: Sequence[Verdict], output: TargetOutput) -> None:
        """Send the outcomes to the drafter at once, so that it works while the caller shows the tokens."""
        for item, verdict in zip(complete, verdicts, strict=True):
            request = item.request
            if request.finish_reason is not None:
                continue
            if self.draft_client.knows(request):
                assert output.features_RH is not None
                self.draft_client.report(
                    request, verdict, output.features_RH[item.start : item.start + verdict.num_accepted + 1]
                )
            elif self.draft_client.accepts(request):
                features_SH = self.runner.features_of(item.running.blocks, item.running.num_computed)
                self.draft_client.admit(request, features_SH)
        self.draft_client.send()

    def _count_time(self, batch: Sequence[BatchedChunk], given: Sequence[int], seconds: float) -> None:
        """A round counts as prefill until the request has its first token."""
        for item, tokens in zip(batch, given, strict=True):
            if tokens:
                item.request.decode_seconds += seconds
            else:
                item.request.prefill_seconds += seconds


def _verification_span(batch: Sequence[BatchedChunk]) -> Span:
    """The span of a round's forward and verification: "prefill" where it verifies nothing."""
    decoding = [item for item in batch if item.decodes]
    return span(
        "verify" if decoding else "prefill", lambda: {item.request.id: len(item.request.tokens) for item in decoding}
    )


def _note_verdicts(traced: Span, complete: Sequence[BatchedChunk], verdicts: Sequence[Verdict]) -> None:
    found = [(item, verdict) for item, verdict in zip(complete, verdicts, strict=True) if item.decodes]
    traced.note(
        source={item.request.id: item.speculation.source for item, _ in found},
        drafted={item.request.id: len(item.drafted) for item, _ in found},
        accepted={item.request.id: verdict.num_accepted for item, verdict in found},
    )
