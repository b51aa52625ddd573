"""The engine: one `step` is one round. Admit and prefill, take the speculations, verify, commit, report the outcomes.

schedule -> target.forward -> verify -> commit -> Outcome to the drafting side -> Answer, the next speculation
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drafters.errors import UserError
from drafters.targets import Target
from infer.channel import Channel, DraftGone
from infer.config import EngineSettings, Mode
from infer.kernels.accept import Proposal, Verdict
from infer.messages import Admit, Answer, FromDraft, Outcome, ToDraft
from infer.request import FinishReason, Request, RequestOutput, RoundRecord, SamplingParams, Source, check_token_ids
from infer.scheduler import Scheduler
from infer.target import Rows, TargetOutput, TargetRunner
from infer.verify import row_of, verify_rows

ANSWER_TIMEOUT = 10.0  # seconds: longer than any honest answer, short enough for a user who waits
NOTHING = Answer("", 0, Source.NONE, ())


@dataclass
class Drafting:
    """The drafting side as the engine sees it: the channel, what has been sent, what came back. `channel` None: there is none."""

    channel: Channel | None
    draft_to_target_D: Tensor | None = None
    unanswered: int = 0
    wait: float = 0.0
    busy: float = 0.0
    pid: int | None = None


class Engine:
    """Runs requests in one mode. One thread drives it; `infer.launch.launch` builds it."""

    def __init__(self, settings: EngineSettings, mode: Mode, runner: TargetRunner, drafting: Drafting) -> None:
        self.settings, self.mode, self.runner, self.drafting = settings, mode, runner, drafting
        self.scheduler = Scheduler(runner.blocks, settings.batch_size)
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()
        self._admits: list[Admit] = []
        self._retires: list[str] = []
        self._cancelled: list[Request] = []

    @property
    def target(self) -> Target:
        """The loaded target, with its tokenizer and facts."""
        return self.runner.target

    @property
    def draft_alive(self) -> bool:
        """Whether a drafter serves. False in mode ar, and after the draft process died."""
        return self.drafting.channel is not None and self.drafting.channel.alive

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft process (mode ssd)."""
        return self.drafting.pid

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
            raise UserError(f"the prompt has {len(prompt_ids)} tokens, max_model_len is {limit}: shorten it or raise max_model_len")
        name = request_id or f"request-{next(self._ids)}"
        if name in self.scheduler.running or any(r.id == name for r in self.scheduler.waiting):
            raise UserError(f"request id {name!r} is already in use; give each request its own")
        check_token_ids(params, self.target.facts.vocab_size)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.target.facts.end_token_ids))
        most = min(len(prompt_ids) + params.max_new_tokens, limit)
        self.scheduler.submit(Request(name, tuple(prompt_ids), params.seeded(), stops, most, list(prompt_ids)))
        return name

    def cancel(self, request_id: str) -> None:
        """End a request between two steps. Its last output, with reason "cancel", comes from the next step."""
        request = self.scheduler.drop_waiting(request_id)
        if request is None and (request := self.scheduler.running.get(request_id)):
            self._release(request)
        if request is not None:
            request.finish_reason = FinishReason.CANCEL
            self._cancelled.append(request)

    def step(self) -> list[RequestOutput]:
        """One round: returns what each request gained. Nothing to do: an empty list."""
        outputs = [RequestOutput(r.id, (), FinishReason.CANCEL, r) for r in self._cancelled]
        self._cancelled = []
        outputs += self._prefill(self.scheduler.admit())
        running = list(self.scheduler.running.values())
        if not running:
            return outputs
        started = time.perf_counter()
        self._send(())
        self._receive()
        verifications = [self._verification(request) for request in running]
        before = time.perf_counter()
        output = self.runner.forward([rows for rows, _ in verifications])
        verdicts = self._verify(running, verifications, output)
        verify = time.perf_counter() - before
        judged = zip(running, verifications, verdicts, strict=True)
        kept = [self._commit(request, *verified, verdict, verify) for request, verified, verdict in judged]
        self._report(running, verifications, verdicts, output)
        spent = time.perf_counter() - started
        for request, tokens in zip(running, kept, strict=True):
            request.decode_seconds += spent
            outputs.append(RequestOutput(request.id, tuple(tokens), request.finish_reason, request))
        return outputs

    def close(self) -> None:
        """End the draft process. The target stays loaded as long as somebody holds it."""
        if self.drafting.channel is not None:
            self.drafting.channel.close()
            self.drafting.channel = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefill(self, admitted: Sequence[Request]) -> list[RequestOutput]:
        outputs = []
        for request in admitted:
            started = time.perf_counter()
            prompt = request.prompt_ids
            output = self.runner.forward([Rows(prompt, len(prompt), self.scheduler.blocks[request.id])], last_only=True)
            kept = request.commit([verify_rows(output.logits_RV, [row_of(request, 0)])[0].bonus_token])
            if request.finish_reason is not None:
                self.scheduler.release(request.id)
            elif self.draft_alive:
                assert output.features_RH is not None
                sampling = request.params.sampling
                tokens, limit = tuple(request.tokens), request.max_tokens
                self._admits.append(Admit(request.id, tokens, output.features_RH, limit, sampling, len(request.prompt_ids)))
            request.prefill_seconds = time.perf_counter() - started
            outputs.append(RequestOutput(request.id, tuple(kept), request.finish_reason, request))
        return outputs

    def _verification(self, request: Request) -> tuple[Rows, Answer]:
        """The rows to verify, and the speculation in them, cut to what may still come."""
        answer = self.answers.pop(request.id, NOTHING)
        drafted = answer.tokens[: request.room - 1]
        rows = [request.tokens[-1], *drafted]
        return Rows(rows, len(request.tokens) + len(drafted), self.scheduler.blocks[request.id]), answer

    def _verify(self, running: Sequence[Request], verifications: Sequence[tuple[Rows, Answer]], output: TargetOutput) -> list[Verdict]:
        to_verify, start = [], 0
        for request, (rows, answer) in zip(running, verifications, strict=True):
            drafted = tuple(rows.tokens[1:])
            proposal = None
            if answer.probs_KD is not None and drafted:
                assert self.drafting.draft_to_target_D is not None
                probs = answer.probs_KD[: len(drafted)].to(output.logits_RV.device)
                proposal = Proposal(probs, self.drafting.draft_to_target_D)
            to_verify.append(row_of(request, start, drafted, proposal))
            start += len(rows.tokens)
        return verify_rows(output.logits_RV, to_verify)

    def _commit(self, request: Request, rows: Rows, answer: Answer, verdict: Verdict, verify: float) -> list[int]:
        offered = len(rows.tokens) - 1
        accepted = answer.tokens[: verdict.num_accepted]
        wait, busy = self.drafting.wait, self.drafting.busy
        request.rounds.append(RoundRecord(answer.source, offered, verdict.num_accepted, len(accepted) + 1, verify, wait, busy))
        kept = request.commit([*accepted, verdict.bonus_token])
        if request.finish_reason is not None:
            self._release(request)
        return kept

    def _release(self, request: Request) -> None:
        self.scheduler.release(request.id)
        self.answers.pop(request.id, None)
        self._admits = [admit for admit in self._admits if admit.request != request.id]
        if self.draft_alive:
            self._retires.append(request.id)

    def _report(
        self, running: Sequence[Request], verifications: Sequence[tuple[Rows, Answer]], verdicts: Sequence[Verdict], output: TargetOutput
    ) -> None:
        """Tell the drafting side at once, so that it works while the caller shows the tokens."""
        outcomes, start = [], 0
        for request, (rows, answer), verdict in zip(running, verifications, verdicts, strict=True):
            if self.draft_alive and request.finish_reason is None:
                assert output.features_RH is not None
                features = output.features_RH[start : start + verdict.num_accepted + 1]
                outcomes.append(Outcome(request.id, answer.round, verdict.num_accepted, verdict.bonus_token, features))
            start += len(rows.tokens)
        self._send(outcomes)

    def _send(self, outcomes: Sequence[Outcome]) -> None:
        """Send what there is to say; what only retires somebody waits for the next message that asks for something."""
        channel = self.drafting.channel
        if channel is None or not (outcomes or self._admits):
            return
        message = ToDraft(tuple(self._admits), tuple(outcomes), tuple(self._retires))
        self._admits, self._retires = [], []
        try:
            channel.send(message)
            self.drafting.unanswered += 1
        except DraftGone:
            self._draft_is_gone()

    def _receive(self) -> None:
        """Take in all answers that are due. The wait is bounded: a drafter that does not answer is left behind."""
        started = time.perf_counter()
        self.drafting.busy = 0.0
        while self.drafting.channel is not None and self.drafting.unanswered:
            try:
                message: FromDraft = self.drafting.channel.receive(ANSWER_TIMEOUT)
            except DraftGone:
                self._draft_is_gone()
                break
            self.drafting.unanswered -= 1
            self.drafting.busy += message.busy_seconds
            self.answers |= {a.request: a for a in message.answers if self._is_due(a)}
        self.drafting.wait = time.perf_counter() - started

    def _is_due(self, answer: Answer) -> bool:
        request = self.scheduler.running.get(answer.request)
        return request is not None and answer.round == len(request.rounds)

    def _draft_is_gone(self) -> None:
        """Go on without the drafter: running requests continue one token a round."""
        if self.drafting.channel is not None:
            self.drafting.channel.close()
        self.drafting.channel = None
        self.drafting.unanswered, self._admits, self._retires = 0, [], []
