"""Channels: whole messages of any size, in order, over gloo between two threads, and a peer that is silent or gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from infer.ipc.channel import FRAME, Inbox, LocalChannel, PeerGone, Wire
from infer.ipc.messages import Admit, FromDraft, Outcome, ServedSpeculation, Source, ToDraft, pack
from infer.kernels.sampling.params import Sampling

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def wires() -> Iterator[list[Wire]]:
    """Both ends, in a list that a test may empty. A group only forms when both ends come, so each has its thread."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, 2, is_master=False)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(Wire, (store, client), (0, 1)))
    yield ends
    ends.clear()


def _exchange(sender: Wire, receiver: Wire, messages: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [sender.send(message) for message in messages])
        received = [receiver.receive(timedelta(seconds=20)) for _ in messages]
        sending.result()
    return received


def _of_size(size: int) -> ToDraft:
    """A message that packs to `size` bytes."""
    empty = len(pack(ToDraft(retires=("",))))
    message = ToDraft(retires=("x" * (size - empty),))
    assert len(pack(message)) == size
    return message


def test_messages_of_every_size_come_whole_and_in_order(wires: list[Wire]) -> None:
    """Around what one frame holds, FRAME - 8 bytes, around two frames, and far above."""
    sizes = [200, FRAME - 9, FRAME - 8, FRAME - 7, FRAME, 2 * FRAME - 9, 2 * FRAME - 8, 2 * FRAME, 1_000_000, 200]
    messages = [_of_size(size) for size in sizes]
    assert _exchange(wires[0], wires[1], messages) == messages


def test_both_ends_speak(wires: list[Wire]) -> None:
    features = torch.randn(900, 64).bfloat16()  # 115 KB: a prompt's
    admit = Admit("r", tuple(range(901)), features, 1000, Sampling(1.0, seed=2**60))
    [there] = _exchange(
        wires[0], wires[1], [ToDraft(admits=(admit,), outcomes=(Outcome("q", 3, 2, 9, features[:3]),))]
    )
    assert there.admits[0].tokens == admit.tokens and torch.equal(there.admits[0].features_SH, features)
    assert torch.equal(there.outcomes[0].features_SH, features[:3])
    [back] = _exchange(wires[1], wires[0], [FromDraft((ServedSpeculation("r", 0, Source.FIRST, (4, 5)),), 0.25)])
    assert back == FromDraft((ServedSpeculation("r", 0, Source.FIRST, (4, 5)),), 0.25)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("size", [200, 1_000_000])
def test_both_ends_may_send_before_either_receives(wires: list[Wire], size: int) -> None:
    """The drafter answers while the target sends a new request: sends that wait for the peer's receive would wait for
    ever.
    """
    messages = [_of_size(size), _of_size(size + 1)]
    for wire in wires:
        for message in messages:
            wire.send(message)
    for wire in wires:
        assert [wire.receive(timedelta(seconds=20)) for _ in messages] == messages


def test_a_silent_peer_is_an_error_when_the_time_is_up(wires: list[Wire]) -> None:
    started = time.monotonic()
    with pytest.raises(PeerGone):
        wires[0].receive(SHORT)
    assert 0.25 < time.monotonic() - started < 5


@pytest.mark.parametrize("waiting", [True, False], ids=["receives", "sends"])
def test_a_peer_that_left_is_an_error_at_once(wires: list[Wire], waiting: bool) -> None:
    wires.pop()  # its sockets close
    started = time.monotonic()
    with pytest.raises(PeerGone):
        if waiting:
            wires[0].receive(timedelta(seconds=60))
        for _ in range(50):  # the first may still fit into the socket's buffer
            wires[0].send(_of_size(100_000))
    assert time.monotonic() - started < 10


class Worker:
    """Notes what it is asked, and answers with the number of the message."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def answer(self, message: ToDraft) -> FromDraft:
        self.calls.append(f"answer {message.retires[0]}")
        return FromDraft((), float(message.retires[0]))

    def prepare(self) -> None:
        self.calls.append("prepare")


def test_a_local_channel_works_when_it_is_asked_for_the_answer_and_in_order() -> None:
    worker = Worker()
    channel = LocalChannel(worker)  # type: ignore[arg-type]
    for number in ("1", "2"):
        channel.send(ToDraft(retires=(number,), ping=True))
    assert worker.calls == []
    assert channel.receive(0.0).busy_seconds == 1.0  # type: ignore[union-attr]
    assert worker.calls == ["answer 1", "prepare"]
    channel.send(ToDraft(retires=("3",)))
    assert worker.calls == ["answer 1", "prepare", "answer 2", "prepare", "answer 3"], (
        "what nobody waits for is done at once, in its turn"
    )
    assert channel.receive(0.0).busy_seconds == 2.0  # type: ignore[union-attr]


def test_an_inbox_waits_without_harm_and_tells_that_the_peer_is_gone(wires: list[Wire]) -> None:
    inbox = Inbox(wires[0])
    started = time.monotonic()
    assert inbox.get(0.0) is None and inbox.get(0.2) is None
    assert 0.15 < time.monotonic() - started < 2
    wires[1].send(ToDraft(ping=True))
    wires[1].send(_of_size(100_000))
    assert inbox.get(20.0) == ToDraft(ping=True) and inbox.get(20.0) == _of_size(100_000)
    wires[1].flush(timedelta(seconds=20))
    wires.clear()  # the far end's sockets close
    for _ in range(2):
        with pytest.raises(PeerGone):
            inbox.get(20.0)


def test_a_connection_outlives_the_time_that_was_given_to_make_it() -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, 2, is_master=False)
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(
            lambda end: Wire(*end), [(store, 0, timedelta(seconds=1)), (client, 1, timedelta(seconds=1))]
        )
    inbox = Inbox(here)
    assert inbox.get(1.5) is None
    there.send(ToDraft(ping=True))
    assert inbox.get(20.0) == ToDraft(ping=True)
