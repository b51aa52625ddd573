"""Builds a running engine from settings: devices, cores, models, KV pools, and the draft process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from drafters.base.errors import UserError
from drafters.base.logs import log_level
from drafters.eagle3_ssd.checkpoint import LoadedDrafter, load_drafter
from drafters.targets.target import DTYPES, Target, load_target
from drafters.targets.template import differences
from infer.config import EngineSettings, Mode
from infer.devices import device_of, pin_to_cores
from infer.draft.loop import DraftJob, run_draft_process
from infer.draft.model import DraftModel, TapFusion
from infer.draft.settings import DraftSettings
from infer.draft.worker import DraftWorker
from infer.engine.draft_client import DraftClient
from infer.engine.engine import Engine
from infer.engine.memory import plan_pools
from infer.engine.target import Rows, TargetRunner
from infer.ipc.channel import Channel, LocalChannel, PeerGone
from infer.ipc.draft_process import DraftProcess
from infer.text.grammar import Grammars, Vocabulary
from infer.tracing.spans import trace_path


def launch(settings: EngineSettings, mode: Mode, target: Target | None = None, in_process: bool = False) -> Engine:
    """Build an engine. A `target` that is already loaded is shared; it has to be the one that the settings name.

    `in_process` runs the drafter of mode ssd in this process, in turns with the target: the same rounds and tokens,
    without overlap. Raises `UserError` where a file, device or setting does not fit.
    """
    device = device_of(settings.target_devices)
    torch.set_num_threads(settings.target_threads)
    pin_to_cores(settings.target_devices)
    target = target or load_target(settings.target, settings.dtype, str(device))
    if settings.max_model_len > target.facts.max_position_embeddings:
        longest = target.facts.max_position_embeddings
        raise UserError(
            f"max_model_len = {settings.max_model_len}: {settings.target} was made for {longest} tokens; "
            "give at most that"
        )
    if mode is Mode.AR:
        pools = plan_pools(settings, target.facts, None, None)
        return Engine(settings, mode, _warm(TargetRunner(target, pools.target)), DraftClient(None), pools.report)
    loaded, draft_settings = _load_drafter(settings, target), DraftSettings.of(settings, mode)
    pools = plan_pools(settings, target.facts, loaded.config, draft_settings)
    fuse_taps = TapFusion(loaded.model)
    runner = _warm(TargetRunner(target, pools.target, loaded.config.tap_hidden_states_ids, fuse_taps))
    to_target = loaded.vocab.draft_to_target.to(device)
    local = in_process or mode is Mode.SD
    client = DraftClient(
        _local(loaded, target, draft_settings, pools.draft)
        if local
        else _process(settings, target, draft_settings, pools.draft),
        to_target,
    )
    try:
        client.start()
    except PeerGone as error:
        client.close()
        raise UserError(f"{error}; its message stands above") from error
    return Engine(settings, mode, runner, client, pools.report, loaded.card.trained_length)


def _warm(runner: TargetRunner) -> TargetRunner:
    """Run one forward: the first one loads kernels, which takes seconds that no request should wait for."""
    runner.forward([Rows((0,), 1, (0,), 1)])
    return runner


def _load_drafter(settings: EngineSettings, target: Target) -> LoadedDrafter:
    if settings.drafter is None:
        raise UserError("setting 'drafter' is missing: modes sd and ssd need drafter=DIRECTORY; mode ar works without")
    loaded = load_drafter(settings.drafter, target.facts, target.embed_weight, DTYPES[settings.dtype], target.device)
    warnings = loaded.warnings + [
        f"drafter {settings.drafter} was trained with other chat template options (template.{difference}): "
        "expect lower acceptance"
        for difference in differences(loaded.card.template_options, settings.template.recorded())
    ]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def _local(
    loaded: LoadedDrafter, target: Target, draft_settings: DraftSettings, pool_tokens: int
) -> Callable[[], Channel]:
    grammars = Grammars(partial(Vocabulary.of, target))
    return lambda: LocalChannel(DraftWorker(DraftModel(loaded, pool_tokens), draft_settings, grammars))


def _process(
    settings: EngineSettings, target: Target, draft_settings: DraftSettings, pool_tokens: int
) -> Callable[[], Channel]:
    job = DraftJob(
        drafter=str(Path(settings.drafter or "").resolve()),
        embeddings=target.embed_weight.detach().cpu().share_memory_(),
        dtype=settings.dtype,
        device=str(device_of(settings.draft_devices)),
        threads=settings.draft_threads,
        cores=settings.draft_devices,
        settings=draft_settings,
        pool_tokens=pool_tokens,
        vocabulary=Vocabulary.of(target),
        log_level=log_level(),
        trace=trace_path(),
    )
    return lambda: DraftProcess(partial(run_draft_process, job), job.cores)
