"""Sizes of the KV pools: by the settings, by what running requests need, by what is free; and their report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infer.engine.memory
from drafters.base.errors import UserError
from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.draft.model import DraftModel
from infer.draft.settings import DraftSettings
from infer.engine.memory import bytes_per_token, free_bytes, plan_pools
from infer.engine.target import BLOCK, TargetRunner
from tests.tiny import save_tiny_drafter, save_tiny_target

HALF = 0.5  # memory_share


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("memory") / "target")), "float32")


def _settings(**changes: Any) -> EngineSettings:
    base = {
        "batch_size": 4,
        "max_model_len": 128,
        "memory_share": HALF,
        "target_devices": ("cpu",),
        "draft_devices": ("cpu",),
    }
    return EngineSettings(target="", dtype="float32", **{**base, **changes})


def _bytes(target: Target) -> int:
    return bytes_per_token(target.facts, None, 4)[0]


@pytest.mark.parametrize(
    ("free_tokens", "tokens"),
    [
        (10**6, 4 * 512),  # plenty: a full batch of the longest four times
        (2000, 992),  # half of it, in whole blocks
        (800, 512),  # more than half, for a full batch to fit
        (400, 352),  # nine tenths: not even that fits
    ],
)
def test_without_a_size_the_pool_takes_what_is_useful_and_there(
    target: Target, monkeypatch: pytest.MonkeyPatch, free_tokens: int, tokens: int
) -> None:
    monkeypatch.setattr(infer.engine.memory, "free_bytes", lambda _: free_tokens * _bytes(target))
    pools = plan_pools(_settings(), target.facts, None, None)
    assert (
        (pools.target, pools.draft) == (tokens, 0)
        and f"KV pool: {tokens} tokens" in pools.report
        and "memory_share 0.5" in pools.report
    )
    assert ("do not fit together" in pools.report) == (tokens < 512)


def test_a_size_is_taken_as_it_is_in_whole_blocks(target: Target) -> None:
    pools = plan_pools(_settings(kv_tokens=100), target.facts, None, None)
    assert pools.target == 112 and "kv_tokens" in pools.report


def test_no_memory_is_an_error_with_the_size(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.engine.memory, "free_bytes", lambda _: 3 * _bytes(target))
    with pytest.raises(UserError, match=r"0\.0 MiB of memory is free on cpu: too little"):
        plan_pools(_settings(), target.facts, None, None)


def test_bytes_are_those_of_the_pools_and_the_drafter_holds_a_full_batch(target: Target, tmp_path: Path) -> None:
    loaded = load_drafter(
        save_tiny_drafter(tmp_path / "d-eagle3", target), target.facts, target.embed_weight, torch.float32
    )
    settings = _settings(kv_tokens=256)
    plan = DraftSettings.of(settings, Mode.SSD)
    pools = plan_pools(settings, target.facts, loaded.config, plan)
    runner, model = TargetRunner(target, pools.target), DraftModel(loaded, pools.draft)
    of_target, of_drafter = bytes_per_token(target.facts, loaded.config, 4)
    assert sum(t.nbytes for t in (*runner.pool.keys, *runner.pool.values)) == pools.target * (
        of_target - 4 * loaded.config.hidden_size
    )
    assert (
        sum(t.nbytes for t in (*model.pool.keys, *model.pool.values))
        == model.blocks.num_blocks * model.blocks.block_size * of_drafter
    )
    each = -(-(settings.max_model_len + plan.scratch_tokens) // BLOCK)
    assert model.blocks.num_blocks >= settings.batch_size * each


def test_free_memory_is_less_than_the_machine_has() -> None:
    pages = Path("/proc/meminfo").read_text(encoding="ascii").split()
    assert 0 < free_bytes(torch.device("cpu")) < int(pages[1]) * 1024
