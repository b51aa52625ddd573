"""Channels between target and drafter: gloo (`torch.distributed`) to a process of its own, or direct calls of a worker
in this process (mode sd, and tests).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from infer.ipc.messages import FromDraft, Message, Ready, ToDraft, pack, unpack
from infer.tracing.spans import span

FRAME = 16 * 1024  # bytes that go in one piece, as fast as a smaller message; what is longer follows in a second one
OUTSTANDING = 16  # buffers on their way: several messages more than the protocol ever has unanswered
SEND_TIMEOUT = timedelta(seconds=10)
FOREVER = timedelta(days=365)
TARGET_RANK, DRAFT_RANK = 0, 1


class PeerGone(Exception):
    """The other process has died, or never came."""


class Channel(Protocol):
    """The target's end."""

    def ready(self) -> Ready | None:
        """What the other side takes in; None while it is still starting. Raises `PeerGone`."""
        ...

    def send(self, message: ToDraft) -> None:
        """Hand a message over. Raises `PeerGone`."""
        ...

    def receive(self, timeout: float) -> FromDraft | None:
        """The answer to the oldest message not answered yet, None after `timeout` seconds. Raises `PeerGone`."""
        ...

    def close(self, kill: bool = False) -> None:
        """Let the other side end; with `kill` at once, whatever it does."""
        ...


class Worker(Protocol):
    """The drafter's end (`infer.draft.worker.DraftWorker`)."""

    @property
    def ready(self) -> Ready:
        """What it takes in."""
        ...

    def answer(self, message: ToDraft) -> FromDraft:
        """Take in a message and serve speculations."""
        ...

    def prepare(self) -> None:
        """Prepare speculations for the outcomes of the verifications that were answered last."""
        ...


class LocalChannel:
    """A worker in this process. It works when its answer is received, so that the tokens known already can be shown
    before.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._messages: deque[ToDraft] = deque()
        self._answers: deque[FromDraft] = deque()

    def ready(self) -> Ready:
        """See `Channel.ready`."""
        return self.worker.ready

    def send(self, message: ToDraft) -> None:
        """See `Channel.send`."""
        self._messages.append(message)
        while self._messages and not message.is_answered:  # nobody will ask for an answer
            self._work()

    def receive(self, timeout: float) -> FromDraft | None:
        """See `Channel.receive`."""
        while not self._answers:
            self._work()
        return self._answers.popleft()

    def _work(self) -> None:
        """One message; what comes next is prepared at once, as a process of its own would."""
        message = self._messages.popleft()
        answer = self.worker.answer(message)
        if message.is_answered:
            self._answers.append(answer)
            self.worker.prepare()

    def close(self, kill: bool = False) -> None:
        """Nothing to end."""


class Inbox:
    """Messages as they come in over a wire, taken in by a thread: a wait for one that is not there may end without
    harm.

    (A gloo receive that runs out of time takes the whole connection down.)
    """

    def __init__(self, wire: Wire) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_in, args=(wire,), name="draft-inbox", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> Message | None:
        """The next message, None after `timeout` seconds. Raises `PeerGone` once the peer is gone and its messages are
        read.
        """
        try:
            message = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            self._messages.put(None)  # for whoever asks again
            raise PeerGone("the connection to the draft process is closed")
        return message

    def _take_in(self, wire: Wire) -> None:
        while True:
            try:
                self._messages.put(wire.receive())
            except PeerGone:
                self._messages.put(None)
                return


class Wire:
    """One end of a two-process gloo group: whole messages as bytes, in frames.

    A gloo send completes when the peer receives. Both ends may send at the same moment (the drafter its answer, the
    target a newly admitted request), so a send never waits for its own completion: the two would wait for each other.
    """

    def __init__(self, store: TCPStore, rank: int, timeout: timedelta = FOREVER) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self.peer = 1 - rank
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()  # a buffer has to live until its send is complete

    def send(self, message: Message) -> None:
        """Hand a message over without waiting for the peer to take it. Raises `PeerGone`."""
        content = pack(message)
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        head = len(content).to_bytes(8, "little") + content[: FRAME - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._start(frame)
        if rest := content[FRAME - 8 :]:
            self._start(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def flush(self, timeout: timedelta) -> None:
        """Wait until the peer has taken everything. Raises `PeerGone`, also where the time is up."""
        while self._sending:
            _wait(self._sending.popleft()[0], timeout)

    def receive(self, timeout: timedelta = FOREVER) -> Message:
        """Wait for a message. Raises `PeerGone`, also where the time is up: gloo closes the connection then."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        _wait(self._recv(frame), timeout)
        content = frame.numpy().tobytes()
        size = int.from_bytes(content[:8], "little")
        content = content[8 : 8 + size]
        if size > len(content):
            rest = torch.empty(size - len(content), dtype=torch.uint8)
            _wait(self._recv(rest), timeout)
            content += rest.numpy().tobytes()
        with span("receive"):
            return unpack(content)

    def _start(self, buffer: torch.Tensor) -> None:
        while len(self._sending) >= OUTSTANDING:  # so old that the peer has answered it: the wait is over at once
            _wait(self._sending.popleft()[0], SEND_TIMEOUT)
        try:
            self._sending.append((self.group.send([buffer], self.peer, 0), buffer))
        except RuntimeError as error:
            raise PeerGone(str(error)) from error

    def _recv(self, buffer: torch.Tensor) -> Any:
        try:
            return self.group.recv([buffer], self.peer, 0)
        except RuntimeError as error:
            raise PeerGone(str(error)) from error


def _wait(work: Any, timeout: timedelta) -> None:
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise PeerGone(str(error)) from error
