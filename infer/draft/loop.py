"""The draft process: receive, answer, prepare, and again, until the target says stop or is gone."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from drafters.base.errors import UserError
from drafters.eagle3_ssd.checkpoint import load_drafter
from infer.devices import pin_to_cores
from infer.draft.model import DraftModel
from infer.draft.plan import DraftPlan
from infer.draft.worker import DraftWorker
from infer.ipc.channel import PeerGone, Wire
from infer.ipc.messages import ToDraft
from infer.text.grammar import Grammars, Vocabulary

STORE_TIMEOUT = timedelta(minutes=5)
HERE = "drafter-here"  # set in the store once the draft process is about to connect


@dataclass(frozen=True)
class DraftJob:
    """What the draft process is started with. `embeddings` are the target's, in shared memory."""

    drafter: str
    embeddings: Tensor
    dtype: str
    device: str
    threads: int
    cores: tuple[str, ...]
    plan: DraftPlan
    pool_tokens: int
    vocabulary: Vocabulary
    port: int = 0  # of the store where the two meet


def run_draft_process(job: DraftJob) -> None:
    """Entry of the draft process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the target's to handle; it then says stop
    pin_to_cores(job.cores)
    torch.set_num_threads(job.threads)
    try:
        worker = _worker(job)
        worker.warm_up()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    store = TCPStore("127.0.0.1", job.port, 2, is_master=False, timeout=STORE_TIMEOUT)
    store.set(HERE, str(os.getpid()))
    serve(Wire(store, 1), worker)


def serve(wire: Wire, worker: DraftWorker) -> None:
    """Answer message after message. The answer goes out before the preparation for the next one begins."""
    try:
        wire.send(worker.ready)
        while True:
            message = wire.receive()
            assert isinstance(message, ToDraft), message
            if message.stop:
                return
            answer = worker.answer(message)
            if message.is_answered:
                wire.send(answer)
                worker.prepare()
    except PeerGone:  # the target, and with it the reason to be here
        return


def _worker(job: DraftJob) -> DraftWorker:
    dtype: torch.dtype = getattr(torch, job.dtype)
    loaded = load_drafter(job.drafter, None, job.embeddings, dtype, job.device)
    model = DraftModel(loaded, job.pool_tokens)
    return DraftWorker(model, job.plan, Grammars(lambda: job.vocabulary))
