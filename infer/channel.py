"""How messages travel: to a process of its own over `torch.distributed`, or to a worker in this one (tests, and mode sd)."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from infer.draft_worker import DraftWorker
from infer.messages import FromDraft, ToDraft, pack, unpack

FRAME = 16 * 1024  # bytes that go in one piece, as fast as a smaller message; what is longer follows in a second one
OUTSTANDING = 16  # buffers on their way: several messages more than the protocol ever has unanswered
SEND_TIMEOUT = timedelta(seconds=10)
FOREVER = timedelta(days=365)
TARGET_RANK, DRAFT_RANK = 0, 1


class DraftGone(Exception):
    """The draft process died or did not answer in time. The engine goes on without it."""


class Channel(Protocol):
    """The target's end."""

    @property
    def alive(self) -> bool:
        """Whether the other side still runs."""
        ...

    def send(self, message: ToDraft) -> None:
        """Hand a message over. Raises `DraftGone`."""
        ...

    def receive(self, timeout: float) -> FromDraft:
        """The answer to the oldest message not answered yet. Raises `DraftGone` after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Let the other side end."""
        ...


class LocalChannel:
    """A worker in this process: answers at once, and prepares before the target goes on, so that rounds are the same."""

    def __init__(self, worker: DraftWorker) -> None:
        self.worker = worker
        self._answers: list[FromDraft] = []

    @property
    def alive(self) -> bool:
        """See `Channel.alive`."""
        return True

    def send(self, message: ToDraft) -> None:
        """See `Channel.send`."""
        self._answers.append(self.worker.answer(message))
        self.worker.prepare()

    def receive(self, timeout: float) -> FromDraft:
        """See `Channel.receive`."""
        return self._answers.pop(0)

    def close(self) -> None:
        """Nothing to end."""


class Wire:
    """One end of a two-process gloo group: whole messages as bytes, in frames.

    A gloo send completes when the peer receives. Both ends may send at the same moment (the drafter its answer, the target a newly
    admitted request), so a send never waits for its own completion: the two would wait for each other.
    """

    def __init__(self, store: TCPStore, rank: int, timeout: timedelta = FOREVER) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self.peer = 1 - rank
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()  # a buffer has to live until its send is complete

    def send(self, message: ToDraft | FromDraft) -> None:
        """Hand a message over without waiting for the peer to take it; raises RuntimeError where the peer is gone."""
        content = pack(message)
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        head = len(content).to_bytes(8, "little") + content[: FRAME - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._start(frame)
        if rest := content[FRAME - 8 :]:
            self._start(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def flush(self, timeout: timedelta) -> None:
        """Wait until the peer has taken everything; raises RuntimeError where it is gone or the time is up."""
        while self._sending:
            self._sending.popleft()[0].wait(timeout)

    def _start(self, buffer: torch.Tensor) -> None:
        while len(self._sending) >= OUTSTANDING:  # so old that the peer has answered it: the wait is over at once
            self._sending.popleft()[0].wait(SEND_TIMEOUT)
        self._sending.append((self.group.send([buffer], self.peer, 0), buffer))

    def receive(self, timeout: timedelta = FOREVER) -> ToDraft | FromDraft:
        """Wait for a message; raises RuntimeError where the peer is gone or the time is up."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self.group.recv([frame], self.peer, 0).wait(timeout)
        content = frame.numpy().tobytes()
        size = int.from_bytes(content[:8], "little")
        content = content[8 : 8 + size]
        if size > len(content):
            rest = torch.empty(size - len(content), dtype=torch.uint8)
            self.group.recv([rest], self.peer, 0).wait(timeout)
            content += rest.numpy().tobytes()
        return unpack(content)
