"""From settings to a running engine: devices, cores, models, and the draft process. The one place that reads the machine."""

from __future__ import annotations

import atexit
import logging
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from drafters.eagle3_ssd.checkpoint import LoadedDrafter, load_drafter
from drafters.errors import UserError
from drafters.targets import DTYPES, Target, load_target
from drafters.template import differences
from infer.channel import Channel, DraftGone, LocalChannel, Wire
from infer.config import EngineSettings, Mode
from infer.devices import device_of, pin_to_cores
from infer.draft_loop import DraftJob, run_draft_process
from infer.draft_model import DraftModel
from infer.draft_worker import DraftPlan, DraftWorker
from infer.engine import Drafting, Engine
from infer.kernels.linear import PackedLinear
from infer.messages import FromDraft, ToDraft
from infer.target import TargetRunner

log = logging.getLogger(__name__)
START_TIMEOUT = timedelta(minutes=5)  # a cold start reads the drafter from a slow disk


def launch(settings: EngineSettings, mode: Mode, target: Target | None = None, in_process: bool = False) -> Engine:
    """Build an engine. A `target` that is already loaded is shared; it has to be the one the settings name.

    `in_process` runs the drafter of mode ssd in this process too, in turns with the target: the same rounds, no gain in time.
    Raises `UserError` where a file, device or setting does not fit.
    """
    device = device_of(settings.target_devices)
    torch.set_num_threads(settings.target_threads)
    pin_to_cores(settings.target_devices)
    target = target or load_target(settings.target, settings.dtype, str(device))
    if settings.max_model_len > target.facts.max_position_embeddings:
        longest = target.facts.max_position_embeddings
        raise UserError(f"max_model_len = {settings.max_model_len}: {settings.target} was made for {longest} tokens; give at most that")
    pool_tokens = settings.kv_tokens or settings.batch_size * settings.max_model_len
    if mode is Mode.AR:
        return Engine(settings, mode, TargetRunner(target, pool_tokens), Drafting(None))
    loaded = _load_drafter(settings, target)
    fuse_taps = PackedLinear(loaded.model.fc.weight.detach().clone())
    runner = TargetRunner(target, pool_tokens, loaded.config.tap_hidden_states_ids, fuse_taps)
    local = in_process or mode is Mode.SD
    channel, pid = _local(settings, mode, loaded) if local else _draft_process(settings, mode, target)
    to_target = loaded.vocab.draft_to_target.to(device)
    return Engine(settings, mode, runner, Drafting(channel, to_target, pid=pid))


def _load_drafter(settings: EngineSettings, target: Target) -> LoadedDrafter:
    if settings.drafter is None:
        raise UserError("setting 'drafter' is missing: modes sd and ssd need drafter=DIRECTORY; mode ar works without")
    loaded = load_drafter(settings.drafter, target.facts, target.embed_weight, DTYPES[settings.dtype], target.device)
    for warning in loaded.warnings + [
        f"drafter {settings.drafter} was trained with other chat template options (template.{difference}): expect lower acceptance"
        for difference in differences(loaded.card.template_options, settings.template.recorded())
    ]:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def _local(settings: EngineSettings, mode: Mode, loaded: LoadedDrafter) -> tuple[Channel, None]:
    plan = DraftPlan.of(settings, mode)
    return LocalChannel(DraftWorker(DraftModel(loaded, settings.batch_size * plan.region_tokens), plan)), None


class ProcessChannel:
    """The target's end of the wire to a draft process, and the process itself."""

    def __init__(self, settings: EngineSettings, mode: Mode, target: Target) -> None:
        store = TCPStore("127.0.0.1", _free_port(), 2, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT)
        embed = target.embed_weight.detach().cpu().share_memory_()
        device = device_of(settings.draft_devices)
        job = DraftJob(
            port=store.port,
            drafter=str(Path(settings.drafter or "").resolve()),
            embeddings=embed,
            dtype=settings.dtype,
            device=str(device),
            threads=settings.draft_threads,
            cores=settings.draft_devices,
            plan=DraftPlan.of(settings, mode),
        )
        self.process = mp.get_context("spawn").Process(target=run_draft_process, args=(job,), daemon=True)
        self.process.start()
        atexit.register(self.close)
        self.store = store
        self.wire = self._connect(store)

    def _connect(self, store: TCPStore) -> Wire:
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while not store.check(["drafter-ready"]):
            if not self.process.is_alive() or time.monotonic() > deadline:
                self.close()
                raise UserError("the draft process ended while it started; its message stands above")
            time.sleep(0.02)
        return Wire(store, 0)

    @property
    def alive(self) -> bool:
        """See `Channel.alive`."""
        return self.process.is_alive()

    def send(self, message: ToDraft) -> None:
        """See `Channel.send`."""
        try:
            self.wire.send(message)
        except RuntimeError as error:
            raise DraftGone(str(error)) from error

    def receive(self, timeout: float) -> FromDraft:
        """See `Channel.receive`."""
        try:
            message = self.wire.receive(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise DraftGone(str(error)) from error
        assert isinstance(message, FromDraft), message
        return message

    def close(self) -> None:
        """Ask the process to end; one that does not is killed."""
        atexit.unregister(self.close)
        if self.process.is_alive() and hasattr(self, "wire"):
            try:
                self.wire.send(ToDraft(stop=True))
                self.wire.flush(timedelta(seconds=2))
                self.process.join(timeout=2)
            except RuntimeError as error:
                log.debug("the draft process was already gone: %s", error)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(timeout=5)


def _draft_process(settings: EngineSettings, mode: Mode, target: Target) -> tuple[Channel, int | None]:
    channel = ProcessChannel(settings, mode, target)
    return channel, channel.process.pid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
