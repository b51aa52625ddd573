"""The engine: one `step` is one round, for prompts that are being read and answers that are being written alike.

schedule -> collect the speculations -> target.forward -> verify -> commit -> Outcome to the drafting side
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
from infer.engine.scheduler import Scheduler, Seat, Work
from infer.engine.target import Rows, TargetOutput, TargetRunner
from infer.engine.verify import row_of, verify_rows
from infer.ipc.messages import ServedSpeculation, Source
from infer.kernels.sampling.verdict import Proposal, Verdict
from infer.text.grammar import Grammars, Vocabulary
from infer.tracing.spans import Span, span

NOTHING = ServedSpeculation("", 0, Source.ALONE, ())


class Part(NamedTuple):
    """One request's part of a round: `rows` of the forward, the last ones of them drafted, if it is to give a token."""

    work: Work
    answer: ServedSpeculation
    drafted: tuple[int, ...]
    rows: Rows
    start: int  # of its rows among all rows
    start_logits: int  # of its rows among those whose logits are there

    @property
    def seat(self) -> Seat:
        return self.work.seat

    @property
    def request(self) -> Request:
        return self.work.seat.request

    @property
    def decodes(self) -> bool:
        """Whether this is a verification, not a forward over a prompt. To be asked before the round is committed."""
        return self.work.rows == 1 and len(self.request.tokens) > len(self.request.prompt_ids)


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
        self.memory = memory  # the sizes of the pools, in words
        self._unwarned_length = trained_length  # of the texts that the drafter knows; None once the user has been told
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
        """What the drafting side is doing."""
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
            about = f"{self.settings.drafter} was trained on texts of at most {trained} tokens, a request may reach {length}"
            print(f"warning: drafter {about}: expect lower acceptance beyond", file=sys.stderr)
            self._unwarned_length = None

    def cancel(self, request_id: str) -> None:
        """End a request between two steps. Its last output, with reason "cancel", comes from the next step."""
        request = self.scheduler.drop_waiting(request_id)
        if request is None and (seat := self.scheduler.running.get(request_id)):
            request = seat.request
            self._release(request)
        if request is not None:
            request.finish_reason = FinishReason.CANCEL
            self._cancelled.append(request)

    def step(self) -> list[RequestOutput]:
        """One round: returns what each request gained. Nothing to do: an empty list."""
        outputs = [RequestOutput(r.id, (), FinishReason.CANCEL, r) for r in self._cancelled]
        self._cancelled = []
        self.draft_client.reconnect()
        started = time.perf_counter()
        works, preempted = self.scheduler.schedule()
        for request in preempted:
            self.draft_client.retire(request.id)
        if not works:
            self.draft_client.send()
            return outputs
        parts = self._parts(works, self.draft_client.collect([work.seat.request for work in works if work.completes]))
        complete = [part for part in parts if part.work.completes]
        before = time.perf_counter()
        with _verification_span(parts) as traced:
            output = self.runner.forward([part.rows for part in parts])
            verdicts = self._verify(complete, output)
            _note_verdicts(traced, complete, verdicts)
        verify = time.perf_counter() - before
        given = [len(part.request.new_tokens) for part in parts]
        for part in parts:
            if not part.work.completes:
                self.scheduler.advance(part.seat, part.seat.computed + part.work.rows)
        kept = [self._commit(part, verdict, verify) for part, verdict in zip(complete, verdicts, strict=True)]
        self._report(complete, verdicts, output)
        self._count_time(parts, given, time.perf_counter() - started)
        results = zip(complete, kept, strict=True)
        return outputs + [
            RequestOutput(p.request.id, tuple(tokens), p.request.finish_reason, p.request) for p, tokens in results
        ]

    def check_idle(self) -> None:
        """To be called now and then while there is no work: checks the books, and whether the draft process still
        answers.
        """
        if not self.has_work:
            self.check()
            self.draft_client.check_idle()

    def check(self) -> None:
        """Assert that the books are right; of an idle engine also that nobody holds anything."""
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

    def _parts(self, works: Sequence[Work], answers: dict[str, ServedSpeculation]) -> list[Part]:
        """The rows of each request, and the speculation in them, cut to what may still come."""
        parts, start, start_logits = [], 0, 0
        for work in works:
            seat, tokens = work.seat, work.seat.request.tokens
            answer = answers.get(seat.request.id, NOTHING)
            drafted = answer.tokens[: work.drafted]
            ids = [*tokens[seat.computed : seat.computed + work.rows], *drafted]
            wanted = len(drafted) + 1 if work.completes else 0
            rows = Rows(ids, seat.computed + len(ids), seat.blocks, wanted)
            parts.append(Part(work, answer, drafted, rows, start, start_logits))
            start, start_logits = start + len(ids), start_logits + wanted
        return parts

    def _verify(self, complete: Sequence[Part], output: TargetOutput) -> list[Verdict]:
        to_verify = []
        for part in complete:
            proposal = None
            if part.answer.probs_KD is not None and part.drafted:
                assert self.draft_client.draft_to_target_D is not None
                probs = part.answer.probs_KD[: len(part.drafted)].to(output.logits_LV.device)
                proposal = Proposal(probs, self.draft_client.draft_to_target_D)
            to_verify.append(row_of(part.request, part.start_logits, part.drafted, proposal))
        return verify_rows(output.logits_LV, to_verify)

    def _commit(self, part: Part, verdict: Verdict, verify: float) -> list[int]:
        request, seat = part.request, part.seat
        accepted, before = part.drafted[: verdict.num_accepted], len(request.tokens)
        if part.decodes:
            wait, busy = self.draft_client.wait, self.draft_client.busy
            emitted = len(accepted) + 1
            request.rounds.append(
                RoundRecord(part.answer.source, len(part.drafted), len(accepted), emitted, verify, wait, busy)
            )
        kept = request.commit([*accepted, verdict.bonus_token], verdict.logprobs)
        self.scheduler.advance(seat, min(before + len(accepted), len(request.tokens)))
        if request.finish_reason is not None:
            self._release(request)
        return kept

    def _release(self, request: Request) -> None:
        self.scheduler.release(request.id)
        self.draft_client.retire(request.id)

    def _report(self, complete: Sequence[Part], verdicts: Sequence[Verdict], output: TargetOutput) -> None:
        """Tell the drafting side at once, so that it works while the caller shows the tokens."""
        for part, verdict in zip(complete, verdicts, strict=True):
            request = part.request
            if request.finish_reason is not None:
                continue
            if self.draft_client.knows(request):
                assert output.features_RH is not None
                self.draft_client.report(
                    request, verdict, output.features_RH[part.start : part.start + verdict.num_accepted + 1]
                )
            elif self.draft_client.accepts(request):
                self.draft_client.admit(request, self.runner.features_of(part.seat.blocks, part.seat.computed))
        self.draft_client.send()

    def _count_time(self, parts: Sequence[Part], given: Sequence[int], seconds: float) -> None:
        """A round belongs to the prompt's time until the first token is there."""
        for part, tokens in zip(parts, given, strict=True):
            if tokens:
                part.request.decode_seconds += seconds
            else:
                part.request.prefill_seconds += seconds


def _verification_span(parts: Sequence[Part]) -> Span:
    """The span of a round's forward and verification: "prefill" where it verifies nothing."""
    decoding = [part for part in parts if part.decodes]
    return span(
        "verify" if decoding else "prefill", lambda: {part.request.id: len(part.request.tokens) for part in decoding}
    )


def _note_verdicts(traced: Span, complete: Sequence[Part], verdicts: Sequence[Verdict]) -> None:
    found = [(part, verdict) for part, verdict in zip(complete, verdicts, strict=True) if part.decodes]
    traced.note(
        source={part.request.id: part.answer.source for part, _ in found},
        drafted={part.request.id: len(part.drafted) for part, _ in found},
        accepted={part.request.id: verdict.num_accepted for part, verdict in found},
    )
