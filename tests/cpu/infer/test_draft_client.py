"""The draft client under faults, without a process: silence, late answers, death, restarts with pauses, and a drafter
that keeps requests it should have dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch

from infer.engine import draft_client
from infer.engine.draft_client import DraftClient, DraftState
from infer.engine.request import Request, SamplingParams
from infer.ipc.channel import PeerGone
from infer.ipc.messages import FromDraft, Ready, ServedSpeculation, Source, ToDraft
from infer.kernels.sampling.verdict import Verdict

READY = Ready(pid=1, requests=3, tokens=200, block_size=10, scratch_tokens=15)


class FakeChannel:
    """Keeps what is sent. The test decides when answers come, and when the far end is gone."""

    def __init__(self, ready: Ready | None = READY) -> None:
        self.sent: list[ToDraft] = []
        self.answers: deque[FromDraft] = deque()
        self.starts: Ready | None = ready
        self.gone = self.closed = self.killed = False

    def ready(self) -> Ready | None:
        self._check()
        return self.starts

    def send(self, message: ToDraft) -> None:
        self._check()
        self.sent.append(message)

    def receive(self, timeout: float) -> FromDraft | None:
        if self.answers:
            return self.answers.popleft()
        self._check()
        CLOCK.now += timeout
        return None

    def close(self, kill: bool = False) -> None:
        self.closed, self.killed = True, kill

    def _check(self) -> None:
        if self.gone:
            raise PeerGone("gone")


class Clock:
    """Time that passes only where something waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr(draft_client, "time", CLOCK)
    yield CLOCK


def _request(name: str, tokens: int = 5, most: int = 20) -> Request:
    ids = list(range(tokens))
    return Request(name, tuple(ids[:-1]), SamplingParams(), frozenset(), most, ids)


def _features(request: Request) -> torch.Tensor:
    return torch.zeros(len(request.tokens) - 1, 2)


def _started(*channels: FakeChannel) -> DraftClient:
    """A client whose starts give these channels, the first of them already started."""
    left = list(channels)
    client = DraftClient(lambda: left.pop(0))
    client.start()
    return client


def _answer(request: Request, round_: int | None = None) -> FromDraft:
    return FromDraft((ServedSpeculation(request.id, round_ or len(request.tokens), Source.HIT, (7,)),), 0.1)


def _admitted(client: DraftClient, *requests: Request) -> None:
    for request in requests:
        client.admit(request, _features(request))
    client.send()


def _advance(client: DraftClient, request: Request) -> None:
    """A verification that accepted nothing."""
    request.commit([9])
    client.report(request, Verdict(0, 9), torch.zeros(1, 2))
    client.send()


def test_a_round_is_named_by_its_tokens_and_other_answers_are_dropped() -> None:
    channel = FakeChannel()
    client, a = _started(channel), _request("a")
    _admitted(client, a)
    channel.answers.append(_answer(a))
    assert [answer.tokens for answer in client.collect([a]).values()] == [(7,)]
    _advance(client, a)
    assert [outcome.round for outcome in channel.sent[-1].outcomes] == [5], (
        "the round that is over started from 5 tokens"
    )
    channel.answers.append(_answer(a, 5))
    assert client.collect([a]) == {}, "an answer for another round"
    assert client.knows(a) and client.state is DraftState.SERVING


def test_a_silent_drafter_delays_one_round_and_gets_its_requests_again_when_it_speaks() -> None:
    channel = FakeChannel()
    client, a = _started(channel), _request("a")
    _admitted(client, a)
    before = CLOCK.now
    assert client.collect([a]) == {}
    assert CLOCK.now - before == pytest.approx(draft_client.PATIENCE) and client.state is DraftState.STALLED
    assert not client.knows(a) and not client.accepts(a)
    sent = len(channel.sent)
    for _ in range(3):
        assert client.collect([a]) == {}
        client.send()
    assert CLOCK.now - before == pytest.approx(draft_client.PATIENCE), "the rounds after it wait for nothing"
    assert len(channel.sent) == sent, "and pile nothing up before it"
    channel.answers.append(_answer(a))
    assert client.collect([a]) == {}, "the late answer is for a round that is over"
    assert client.state is DraftState.SERVING and client.accepts(a)
    _admitted(client, a)
    assert channel.sent[-1].retires == ("a",) and [admit.request for admit in channel.sent[-1].admits] == ["a"]


def test_one_that_stays_silent_is_killed_and_started_again() -> None:
    first, second = FakeChannel(), FakeChannel(ready=None)
    client, a = _started(first, second), _request("a")
    _admitted(client, a)
    client.collect([a])
    CLOCK.now += draft_client.GIVE_UP
    client.collect([a])
    assert first.killed and client.state is DraftState.GONE and client.pid is None
    client.reconnect()
    assert client.state is DraftState.GONE, "not at once"
    CLOCK.now += draft_client.FIRST_PAUSE
    client.reconnect()
    assert client.state is DraftState.STARTING and not client.accepts(a)
    second.starts = READY
    client.reconnect()
    assert client.state is DraftState.SERVING and client.accepts(a)


@pytest.mark.parametrize("where", ["send", "receive", "rest", "start"])
def test_a_drafter_that_is_gone_is_noticed_wherever_it_is_met(where: str) -> None:
    channel, again = FakeChannel(), FakeChannel()
    client, a = _started(channel, again), _request("a")
    if where == "receive":
        _admitted(client, a)
    channel.gone = True
    if where == "send":
        _admitted(client, a)
    elif where == "receive":
        assert client.collect([a]) == {}
    else:
        client.check_idle()
    assert client.state is DraftState.GONE and not client.knows(a)
    CLOCK.now += draft_client.FIRST_PAUSE
    if where == "start":
        again.gone = True
        client.reconnect()
        assert client.state is DraftState.GONE and again.killed
    else:
        client.reconnect()
        assert client.state is DraftState.SERVING


def test_a_start_that_the_system_refuses_is_tried_again() -> None:
    refusals = iter([PeerGone("no more processes")])

    def connect() -> FakeChannel:
        for error in refusals:
            raise error
        return FakeChannel()

    client = DraftClient(connect)
    client.reconnect()
    assert client.state is DraftState.GONE and client.failures == 1
    client.reconnect()
    assert client.state is DraftState.GONE, "not at once"
    CLOCK.now += draft_client.FIRST_PAUSE
    client.reconnect()
    assert client.state is DraftState.SERVING


def test_pauses_double_with_each_failure_and_start_over_after_a_stable_time() -> None:
    channels = [FakeChannel() for _ in range(12)]
    client, pauses = _started(*channels), []
    for channel in channels[:9]:
        channel.gone = True
        client.check_idle()
        gone = CLOCK.now
        while client.state is DraftState.GONE:
            CLOCK.now += 0.5
            client.reconnect()
        pauses.append(CLOCK.now - gone)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    CLOCK.now += draft_client.STABLE + 1
    channels[9].gone = True
    client.check_idle()
    CLOCK.now += 1
    client.reconnect()
    assert client.state is DraftState.SERVING


def test_an_idle_drafter_is_asked_and_a_stopped_one_noticed() -> None:
    channel = FakeChannel()
    client = _started(channel)
    client.check_idle()
    client.check_idle()
    assert [message.ping for message in channel.sent] == [True], "one at a time"
    channel.answers.append(FromDraft((), 0.0, pong=True))
    client.check_idle()
    assert len(channel.sent) == 2
    CLOCK.now += draft_client.GIVE_UP + 1
    client.check_idle()
    assert channel.killed and client.state is DraftState.GONE


def test_an_idle_drafter_that_holds_something_is_replaced() -> None:
    channel = FakeChannel()
    client = _started(channel)
    client.check_idle()
    channel.answers.append(FromDraft((), 0.0, requests=1, blocks=3, pong=True))
    client.check_idle()
    assert channel.killed and client.state is DraftState.GONE


def test_the_drafters_own_limits_are_kept() -> None:
    """Three requests at most, and 200 tokens: one of 20 takes 40, whole blocks of 10 with 15 for the client."""
    client = _started(FakeChannel())
    many = [_request(name) for name in "abcd"]
    assert READY.request_tokens(20) == 40
    for request in many[:3]:
        assert client.accepts(request)
        client.admit(request, _features(request))
    assert not client.accepts(many[3]), "places"
    client.retire("a")
    assert (
        client.accepts(many[3])
        and client.accepts(_request("e", most=105))
        and not client.accepts(_request("e", most=106))
    ), "memory"


def test_a_request_that_ends_before_it_was_sent_needs_no_farewell() -> None:
    channel = FakeChannel()
    client, a, b = _started(channel), _request("a"), _request("b")
    client.admit(a, _features(a))
    client.admit(b, _features(b))
    client.retire("a")
    client.send()
    assert [admit.request for admit in channel.sent[0].admits] == ["b"] and channel.sent[0].retires == ()
    client.retire("b")
    client.retire("never known")
    client.send()
    assert channel.sent[1].retires == ("b",) and not channel.sent[1].is_answered, (
        "the last one is told at once: nothing else will be sent"
    )


def test_a_farewell_waits_for_the_next_message_while_others_run() -> None:
    channel = FakeChannel()
    client, a, b = _started(channel), _request("a"), _request("b")
    _admitted(client, a, b)
    client.retire("a")
    client.send()
    assert len(channel.sent) == 1
    channel.answers.append(_answer(b))
    client.collect([b])
    _advance(client, b)
    assert channel.sent[1].retires == ("a",) and len(channel.sent[1].outcomes) == 1


def test_without_a_drafter_nothing_is_known_and_nothing_waits() -> None:
    client, a = DraftClient(None), _request("a")
    client.reconnect()
    client.check_idle()
    client.send()
    assert client.collect([a]) == {} and not client.accepts(a) and client.state is DraftState.NONE
    client.close()


def test_a_closed_side_stays_closed() -> None:
    channel = FakeChannel()
    client = _started(channel)
    client.close()
    client.reconnect()
    assert channel.closed and not channel.killed and client.state is DraftState.NONE
