"""The draft process as its parent sees it: started in the background, connected once it is ready, killed where it does
not stop. How both ends meet (a store on a local port) is written here once.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from infer.devices import pinned_to_cores
from infer.ipc.channel import DRAFT_RANK, TARGET_RANK, Inbox, PeerGone, Wire
from infer.ipc.messages import FromDraft, Ready, ToDraft

START_TIMEOUT = timedelta(minutes=5)  # a cold start reads the drafter from a slow disk
CONNECT_TIMEOUT = timedelta(seconds=10)  # both are there by then
STOP_TIMEOUT = timedelta(seconds=2)
HERE = "drafter-here"  # the key that the draft process sets in the store when it is about to connect


def connect_to_target(port: int) -> Wire:
    """The draft process's end of the connection, to be called there once it can serve."""
    store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=START_TIMEOUT)
    store.set(HERE, str(os.getpid()))
    return Wire(store, DRAFT_RANK)


class DraftProcess:
    """A `Channel` to a process of its own.

    Creating one starts a process that calls `entry(port)` on `cores`; `entry` has to be picklable, and to call
    `connect_to_target(port)`. Raises `PeerGone` where the system refuses a new process.
    """

    def __init__(self, entry: Callable[[int], None], cores: Sequence[str]) -> None:
        try:
            self._store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT)
            self._process = mp.get_context("spawn").Process(target=entry, args=(self._store.port,), daemon=True)
            # a child begins on its parent's cores, where its imports would slow the target
            with pinned_to_cores(cores):
                self._process.start()
        except (OSError, RuntimeError) as error:  # no memory, no more processes or ports
            raise PeerGone(f"the draft process cannot be started: {error}") from error
        atexit.register(self.close)
        self._deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        self._wire: Wire | None = None
        self._inbox: Inbox | None = None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def ready(self) -> Ready | None:
        """See `Channel.ready`."""
        if not self._process.is_alive() or time.monotonic() > self._deadline:
            raise PeerGone("the draft process ended while it started")
        if self._inbox is None:
            if not self._store.check([HERE]):
                return None
            try:
                self._wire = Wire(self._store, TARGET_RANK, CONNECT_TIMEOUT)
            except RuntimeError as error:
                raise PeerGone(f"the draft process did not connect: {error}") from error
            self._inbox = Inbox(self._wire)
        message = self._inbox.get(0.0)
        assert message is None or isinstance(message, Ready), message
        return message

    def send(self, message: ToDraft) -> None:
        """See `Channel.send`."""
        assert self._wire is not None, "the draft process is not ready"
        self._wire.send(message)

    def receive(self, timeout: float) -> FromDraft | None:
        """See `Channel.receive`."""
        assert self._inbox is not None, "the draft process is not ready"
        message = self._inbox.get(timeout)
        assert message is None or isinstance(message, FromDraft), message
        return message

    def close(self, kill: bool = False) -> None:
        """See `Channel.close`. A process that does not end when it is asked to is killed."""
        atexit.unregister(self.close)
        if not kill and self._wire is not None and self._process.is_alive():
            try:
                self._wire.send(ToDraft(stop=True))
                self._wire.flush(STOP_TIMEOUT)
                self._process.join(STOP_TIMEOUT.total_seconds())
            except PeerGone:
                pass  # then it has ended already
        self._process.kill()
        self._process.join(STOP_TIMEOUT.total_seconds())
