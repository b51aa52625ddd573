"""The target's end of the drafter: one message per round, bounded waits, and restarts (infer/README.md, section 4).

A drafter that does not answer in time is sent nothing more: its requests go on without speculations, and are admitted
again once the late answers have come and been dropped. A drafter that stays silent, or dies, is killed and started
again, and the running requests are admitted anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from torch import Tensor

from infer.engine.request import Request
from infer.ipc.channel import Channel, PeerGone
from infer.ipc.messages import Admit, FromDraft, Outcome, Ready, ServedSpeculation, ToDraft
from infer.kernels.sampling.verdict import Verdict
from infer.tracing.spans import span

log = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds that a round waits for its speculations at most
GIVE_UP = 10.0  # seconds without an answer after which the drafter counts as dead
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a new start, doubled with each failure
STABLE = 60.0  # seconds of service after which earlier failures are forgotten


class DraftState(StrEnum):
    """State of the drafter."""

    NONE = "none"  # mode ar, or closed
    SERVING = "serving"
    STALLED = "stalled"  # an answer is overdue
    STARTING = "starting"
    GONE = "gone"  # until the next start


class DraftClient:
    """Starts one drafter by `connect`, and talks to it. `connect` None: there is none, and every speculation is empty.

    A round is named by the number of committed tokens it starts from; an answer with another number is dropped.
    """

    def __init__(self, connect: Callable[[], Channel] | None, draft_to_target_D: Tensor | None = None) -> None:
        self.draft_to_target_D = draft_to_target_D
        self.wait = 0.0  # seconds that the last `collect` took
        self.busy = 0.0  # seconds that the drafter worked for what the last `collect` brought
        self.failures = 0  # how often a drafter was given up
        self._connect = connect
        self._channel: Channel | None = None
        self._ready: Ready | None = None
        self._since = 0.0  # when it became ready
        self._pause, self._next_start = FIRST_PAUSE, 0.0
        self._forget_all()

    @property
    def state(self) -> DraftState:
        """State of the drafter now."""
        if self._connect is None:
            return DraftState.NONE
        if self._channel is None:
            return DraftState.GONE
        if self._ready is None:
            return DraftState.STARTING
        return DraftState.STALLED if self._behind else DraftState.SERVING

    @property
    def pid(self) -> int | None:
        """Process id of the drafter; None while there is none."""
        return self._ready.pid if self._ready else None

    def start(self) -> None:
        """Start the drafter and wait for it. Raises `PeerGone`."""
        assert self._connect is not None and self._channel is None
        self._channel = self._connect()
        while (ready := self._channel.ready()) is None:
            time.sleep(0.02)
        self._ready, self._since = ready, time.monotonic()

    def reconnect(self) -> None:
        """Once a round: start a drafter that is gone, after a pause, and use it once it is ready. Never waits."""
        if self._connect is None or self._ready is not None:
            return
        try:
            if self._channel is None and time.monotonic() >= self._next_start:
                log.warning("starting the drafter again")
                self._channel = self._connect()
            if self._channel is not None and (ready := self._channel.ready()) is not None:
                self._ready, self._since = ready, time.monotonic()
                log.warning("the drafter serves again")
        except PeerGone as error:
            self._give_up(str(error))

    def check_idle(self) -> None:
        """While nothing runs: ping the drafter, and give up one that is silent or still holds requests or blocks.
        Never waits.
        """
        assert not self._rounds, self._rounds
        self.reconnect()
        self._take_in(0.0)
        if self._ready is not None and not self._unanswered:
            self._send(ping=True)

    def knows(self, request: Request) -> bool:
        """Whether the drafter has the request, up to its newest verification."""
        return request.id in self._rounds

    def accepts(self, request: Request) -> bool:
        """Whether a request may be admitted: the drafter serves, and has room and KV memory left."""
        if self.state is not DraftState.SERVING or self._ready is None or len(self._rounds) >= self._ready.requests:
            return False
        return sum(self._held.values()) + self._ready.request_tokens(request.max_tokens) <= self._ready.tokens

    def admit(self, request: Request, features_SH: Tensor) -> None:
        """Admit a request whose newest token was just sampled; features [S, H] of all tokens but that one."""
        assert self._ready is not None and len(features_SH) == len(request.tokens) - 1, (
            features_SH.shape,
            len(request.tokens),
        )
        self._rounds[request.id] = len(request.tokens)
        self._held[request.id] = self._ready.request_tokens(request.max_tokens)
        tokens, sampling, prompt = tuple(request.tokens), request.params.sampling, len(request.prompt_ids)
        self._admits.append(Admit(request.id, tokens, features_SH, request.max_tokens, sampling, prompt))

    def report(self, request: Request, verdict: Verdict, features_SH: Tensor) -> None:
        """Report what a verification gave a known request, after its commit; features [S, H] of the S = k + 1 tokens
        before the bonus token.
        """
        self._outcomes.append(
            Outcome(request.id, self._rounds[request.id], verdict.num_accepted, verdict.bonus_token, features_SH),
        )
        self._rounds[request.id] = len(request.tokens)

    def retire(self, request_id: str) -> None:
        """The request ended or was preempted: the drafter drops what it has of it."""
        self._speculations.pop(request_id, None)
        if self._rounds.pop(request_id, None) is None:
            return
        del self._held[request_id]
        before = len(self._admits)
        self._admits = [admit for admit in self._admits if admit.request != request_id]
        if len(self._admits) == before:  # the drafter never heard of the others
            self._outcomes = [outcome for outcome in self._outcomes if outcome.request != request_id]
            self._retires.append(request_id)

    def send(self) -> None:
        """Send the admits, outcomes and retired ids, unless an answer is overdue: nothing may pile up before a drafter
        that does not read.

        A message that would only retire requests waits for the next one, while others run.
        """
        if not self._behind and (self._outcomes or self._admits or (self._retires and not self._rounds)):
            self._send()

    def collect(self, requests: Sequence[Request]) -> dict[str, ServedSpeculation]:
        """The speculations for the next verification of `requests`, as far as they come in time."""
        started, self.busy = time.perf_counter(), 0.0
        known = [request for request in requests if request.id in self._rounds]
        with span("wait for the drafter", lambda: {request.id: self._rounds[request.id] for request in known}):
            self._take_in(PATIENCE if known else 0.0)
        self.wait = time.perf_counter() - started
        return {
            request.id: self._speculations.pop(request.id) for request in requests if request.id in self._speculations
        }

    def close(self) -> None:
        """End the drafter for good."""
        if self._channel is not None:
            self._channel.close()
        self._connect = self._channel = self._ready = None

    def _send(self, ping: bool = False) -> None:
        if self._channel is None:
            return
        message = ToDraft(tuple(self._admits), tuple(self._outcomes), tuple(self._retires), ping)
        self._admits, self._outcomes, self._retires = [], [], []
        try:
            with span("send", lambda: {outcome.request: outcome.round for outcome in message.outcomes}):
                self._channel.send(message)
        except PeerGone as error:
            self._give_up(str(error))
            return
        if message.is_answered:
            self._asked = self._asked if self._unanswered else time.monotonic()
            self._unanswered += 1

    def _take_in(self, patience: float) -> None:
        """Receive the outstanding answers, for at most `patience` seconds."""
        deadline = time.perf_counter() + patience
        while self._channel is not None and self._unanswered:
            try:
                message = self._channel.receive(max(0.0, deadline - time.perf_counter()))
            except PeerGone as error:
                self._give_up(str(error))
                return
            if message is None:
                break
            self._unanswered -= 1
            self._note(message)
        if not self._unanswered:
            self._behind = False
        elif time.monotonic() - self._asked > GIVE_UP:
            self._give_up(f"no answer for {GIVE_UP:.0f} seconds")
        elif patience:
            self._behind = True
            for request_id in list(self._rounds):
                self.retire(request_id)

    def _note(self, message: FromDraft) -> None:
        self.busy += message.busy_seconds
        self._speculations |= {s.request: s for s in message.speculations if self._rounds.get(s.request) == s.round}
        if message.pong and (message.requests or message.blocks):  # asked for while no request ran
            self._give_up(f"it holds {message.requests} requests and {message.blocks} blocks that nobody owns")

    def _give_up(self, reason: str) -> None:
        """Kill the drafter. The next start comes after a pause."""
        self.failures += 1
        stable = self._ready is not None and time.monotonic() - self._since > STABLE
        self._pause = FIRST_PAUSE if stable else self._pause
        log.warning("the drafter is gone (%s): answers go on without it; next start in %.0f s", reason, self._pause)
        if self._channel is not None:
            self._channel.close(kill=True)
        self._channel = self._ready = None
        self._next_start, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._forget_all()

    def _forget_all(self) -> None:
        self._rounds: dict[str, int] = {}  # requests the drafter has, and the round it prepares a speculation for
        self._held: dict[str, int] = {}  # KV tokens that each of them takes there
        self._speculations: dict[str, ServedSpeculation] = {}
        self._admits: list[Admit] = []
        self._outcomes: list[Outcome] = []
        self._retires: list[str] = []
        self._unanswered = 0
        self._asked = 0.0  # when the oldest message without an answer was sent
        self._behind = False
