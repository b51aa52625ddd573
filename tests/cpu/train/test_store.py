"""Stores: what is read is what is computed online; several processes share the work; sizes are asked about and disks
left room.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data.chat.pack import PackedRow
from drafters.base.errors import UserError
from drafters.targets.target import Target, load_target
from tests.cpu.train.rows import TAPS, equal, rows
from tests.tiny import save_tiny_target
from train.target_features import store
from train.target_features.features import Features, KeptFeatures, OnlineFeatures
from train.target_features.store import StoredFeatures, StorePlan

ALONE = (0, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), "float32", fuse_layers=False)


def never(question: str) -> bool:
    raise AssertionError(question)


def nothing(*_: object) -> None:
    """Shows and says nothing."""


def planned(
    directory: Path, target: Target, data: Sequence[PackedRow], per_shard: int = 2, taps: Sequence[int] = TAPS
) -> StorePlan:
    plan = store.plan_store(directory, target, data, taps, per_shard)
    store.write_indices([plan], 1.0, never, nothing)
    return plan


def test_a_store_gives_what_online_gives(target: Target, tmp_path: Path) -> None:
    data = rows(5)
    shown: list[tuple[int, int]] = []
    plan = planned(tmp_path, target, data)
    store.build_share(plan, target, 1, ALONE, lambda done, total: shown.append((done, total)))
    stored, online = StoredFeatures(plan.place), OnlineFeatures(target, data, TAPS)
    assert len(stored) == len(online) == 5 and shown == [(2, 5), (4, 5), (5, 5)]
    together = Features(*(torch.cat(parts) for parts in zip(*(online.batch([i]) for i in (4, 0, 3)), strict=True)))
    equal(stored.batch([4, 0, 3]), together)
    equal(KeptFeatures(online, 5, 1).batch([4, 0, 3]), together)


def test_a_store_with_more_shards_than_open_files(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "OPEN_FILES", 2)
    plan = planned(tmp_path, target, rows(4), per_shard=1)
    store.build_share(plan, target, 4, ALONE, nothing)
    stored = StoredFeatures(plan.place)
    equal(stored.batch([0, 1, 2, 3, 0]), OnlineFeatures(target, plan.rows, TAPS).batch([0, 1, 2, 3, 0]))
    assert stored.opened.cache_info().currsize == 2


def test_an_interrupted_store_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, target, rows(5))
    computed: list[int] = []
    real = store.compute_features

    def counted(target: Target, part: Sequence[PackedRow], taps: Sequence[int]) -> Features:
        if sum(computed) == 2:
            computed.clear()
            raise KeyboardInterrupt
        computed.append(len(part))
        return real(target, part, taps)

    monkeypatch.setattr(store, "compute_features", counted)
    with pytest.raises(KeyboardInterrupt):
        store.build_share(plan, target, 2, ALONE, nothing)
    assert plan.missing == [1, 2] and plan.rows_done == 2
    killed = plan.place / ".shard-00001.safetensors.77"
    killed.write_text("half")
    os.utime(killed, (0, 0))
    monkeypatch.setattr(store, "compute_features", real)
    store.write_indices([plan], 1.0, never, nothing)
    assert not killed.exists(), "what a killed process left does not stay on the disk"
    whole = plan.place / plan.names[0]
    before = whole.stat().st_mtime_ns
    store.build_share(plan, target, 2, ALONE, nothing)
    assert plan.missing == [] and whole.stat().st_mtime_ns == before
    equal(StoredFeatures(plan.place).batch(range(5)), OnlineFeatures(target, plan.rows, TAPS).batch(range(5)))


def test_a_store_that_was_begun_without_an_index_goes_on(target: Target, tmp_path: Path) -> None:
    """A store without an index is one that is new, whatever shards it holds: those stay."""
    plan = planned(tmp_path, target, rows(3))
    store.build_share(plan, target, 2, ALONE, nothing)
    (plan.place / store.INDEX).unlink()
    (plan.place / plan.names[1]).unlink()
    asked: list[str] = []
    store.write_indices([plan], 1e-9, lambda question: asked.append(question) or True, nothing)
    assert plan.missing == [1] and len(asked) == 1
    store.build_share(plan, target, 2, ALONE, nothing)
    equal(StoredFeatures(plan.place).batch([2, 0]), OnlineFeatures(target, plan.rows, TAPS).batch([2, 0]))


def test_processes_share_the_shards_and_nobody_starts_before_the_first_has_agreed(
    target: Target, tmp_path: Path
) -> None:
    """Three processes as threads; the first is slow to agree, the others wait for it, and at the end each sees the
    whole store.

    They wait without a collective: a store may take longer than any of those does.
    """
    plan = store.plan_store(tmp_path, target, rows(7), TAPS, 1)
    targets = [
        replace(target, model=copy.deepcopy(target.model)) for _ in range(3)
    ]  # a model's taps are one thread's at a time
    written: dict[int, list[int]] = {}
    agreed = threading.Event()

    def process(rank: int) -> None:
        if rank == 0:
            agreed.wait(10)
            store.write_indices([plan], 1.0, never, nothing)
        store.await_index(plan)
        assert agreed.is_set()
        before = set(plan.missing)
        store.build_share(plan, targets[rank], 2, (rank, 3), nothing)
        written[rank] = sorted(n for n in before - set(plan.missing) if n % 3 == rank)
        store.await_shards(plan, nothing)
        assert plan.missing == []

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    agreed.set()
    for thread in threads:
        thread.join(30)
    assert not torch.distributed.is_initialized()
    assert written == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}
    equal(StoredFeatures(plan.place).batch(range(7)), OnlineFeatures(target, plan.rows, TAPS).batch(range(7)))


def test_with_a_shared_target_every_process_runs_as_many_forwards(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven rows in shards of three: [3, 3, 1], over two processes; a forward takes two rows. Both run 2 rounds of 2
    forwards.
    """
    plan = planned(tmp_path, target, rows(7), per_shard=3)
    count = {0: 0, 1: 0}
    real = store.compute_features
    for rank in (0, 1):

        def counted(*arguments: Any, rank: int = rank) -> Features:
            count[rank] += 1
            return real(*arguments)

        monkeypatch.setattr(store, "compute_features", counted)
        store.build_together(plan, target, 2, [0, 1, 2], (rank, 2), nothing)
    assert count == {0: 4, 1: 4} and plan.missing == []
    equal(StoredFeatures(plan.place).batch(range(7)), OnlineFeatures(target, plan.rows, TAPS).batch(range(7)))


def test_other_taps_or_tokens_are_another_store(target: Target, tmp_path: Path) -> None:
    data = rows(1)
    changed = data[0]._replace(token_ids=data[0].token_ids.copy())
    changed.token_ids[0] += 1
    plans = [store.plan_store(tmp_path, target, *of, 2) for of in ((data, TAPS), (data, (0, 3, 5)), ([changed], TAPS))]
    assert len({plan.place for plan in plans}) == 3


def test_the_size_that_is_said_is_the_size_that_is_written(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    plan = store.plan_store(tmp_path, target, rows(64), TAPS, 64)
    store.write_indices([plan], 1.0, never, said.append)
    store.build_share(plan, target, 16, ALONE, nothing)
    written = (plan.place / plan.names[0]).stat().st_size
    assert written == pytest.approx(plan.row_bytes * 64, rel=0.02)
    size = store.gigabytes(plan.row_bytes * 64)
    assert said == [f"target features of 64 rows: {size} in {tmp_path}, {size} to be written"]
    store.write_indices([plan], 1.0, never, said.append)
    assert said[1].endswith("nothing to be written")


def test_a_large_store_is_written_only_after_a_yes(target: Target, tmp_path: Path) -> None:
    plan = store.plan_store(tmp_path, target, rows(4), TAPS, 2)
    asked: list[str] = []

    def answer(yes: bool) -> Any:
        return lambda question: asked.append(question) or yes

    with pytest.raises(UserError, match=r"features.max_gigabytes = 1e-06: agree with --yes"):
        store.write_indices([plan], 1e-6, answer(False), nothing)
    assert not plan.place.exists(), "nothing was written"
    store.write_indices([plan], 1e-6, answer(True), nothing)
    assert len(asked) == 2 and asked[0].startswith("write ") and (plan.place / store.INDEX).is_file()
    store.write_indices([plan], 1e-6, never, nothing)  # asked before: the half-written store goes on


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_store_that_would_fill_the_disk_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = store.plan_store(tmp_path, target, rows(4), TAPS, 2)
    margin = 50_000  # 5 % of it
    for free, enough in ((plan.missing_bytes + margin - 1, False), (plan.missing_bytes + margin + 1, True)):
        monkeypatch.setattr(store.shutil, "disk_usage", lambda _, free=free: Disk(10**6, 0, free))
        if enough:
            store.write_indices([plan], 1.0, never, nothing)
        else:
            with pytest.raises(UserError, match="make room"):
                store.write_indices([plan], 1.0, never, nothing)


def test_a_process_that_waits_in_vain_says_so(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, target, rows(4))
    monkeypatch.setattr(store, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(store, "POLL_SECONDS", 0.05)
    store.build_share(plan, target, 2, (0, 2), nothing)
    with pytest.raises(UserError, match="1 are missing, shard-00001.safetensors first"):
        store.await_shards(plan, nothing)


def test_a_damaged_shard_and_a_full_disk_are_one_line(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, target, rows(2))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", full)
        with pytest.raises(UserError, match="No space left on device.*make room"):
            store.build_share(plan, target, 2, ALONE, nothing)
    store.build_share(plan, target, 2, ALONE, nothing)
    shard = plan.place / plan.names[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged"):
        StoredFeatures(plan.place).batch([0])
