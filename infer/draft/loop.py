"""Entry point and message loop of the draft process: receive, answer, prepare, until the target stops it or dies."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.base.errors import UserError
from drafters.base.logs import set_up_logging
from drafters.eagle3_ssd.checkpoint import load_drafter
from infer.devices import pin_to_cores
from infer.draft.model import DraftModel
from infer.draft.settings import DraftSettings
from infer.draft.worker import DraftWorker
from infer.ipc.channel import PeerGone, Wire
from infer.ipc.draft_process import connect_to_target
from infer.ipc.messages import ToDraft
from infer.text.grammar import Grammars, Vocabulary
from infer.tracing.spans import flush, record_part, span


@dataclass(frozen=True)
class DraftJob:
    """What the draft process is started with. `embeddings` are the target's, in shared memory."""

    drafter: str
    embeddings: Tensor
    dtype: str
    device: str
    threads: int
    cores: tuple[str, ...]
    settings: DraftSettings
    pool_tokens: int
    vocabulary: Vocabulary
    log_level: str
    trace: str | None  # the file that this process records a part of; None: it does not record


def run_draft_process(job: DraftJob, port: int) -> None:
    """Entry of the draft process. `port` is that of the store where the two processes meet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the target handles Ctrl-C, and then stops this process
    set_up_logging(job.log_level)
    pin_to_cores(job.cores)
    torch.set_num_threads(job.threads)
    try:
        worker = _worker(job)
        worker.warm_up()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if job.trace is not None:
        record_part(job.trace)
    serve(connect_to_target(port), worker)


def serve(wire: Wire, worker: DraftWorker) -> None:
    """Answer message after message. The answer goes out before the preparation for the next one begins."""
    try:
        wire.send(worker.ready)
        while True:
            with span("wait for the target"):
                message = wire.receive()
            assert isinstance(message, ToDraft), message
            if message.stop:
                flush()
                return
            answer = worker.answer(message)
            if message.is_answered:
                with span("send"):
                    wire.send(answer)
                worker.prepare()
            flush()
    except PeerGone:  # nobody is left to serve
        return


def _worker(job: DraftJob) -> DraftWorker:
    dtype: torch.dtype = getattr(torch, job.dtype)
    loaded = load_drafter(job.drafter, None, job.embeddings, dtype, job.device)
    model = DraftModel(loaded, job.pool_tokens)
    return DraftWorker(model, job.settings, Grammars(lambda: job.vocabulary))
