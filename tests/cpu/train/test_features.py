"""Features: what is stored equals what is computed, and the full-vocabulary numbers are the plain ones."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from data.pack import PackedRow
from drafters.errors import UserError
from drafters.targets import Target, load_target
from tests.tiny import save_tiny_target
from train import features
from train.features import (
    Features,
    OnlineFeatures,
    StoredFeatures,
    await_store,
    build_store,
    compute_features,
    full_vocabulary,
    refuse_if_large,
    store_bytes,
    store_key,
)

TAPS = (1, 3, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), "float32", fuse_layers=False)


def rows(number: int, length: int = 20) -> list[PackedRow]:
    """Each row holds documents of 8 and 9 tokens, and padding."""
    draw = np.random.default_rng(0)
    result = []
    for _ in range(number):
        documents = np.array([1] * 8 + [2] * 9 + [0] * 3, dtype=np.int32)
        positions = np.array([*range(8), *range(9), 0, 0, 0], dtype=np.int64)
        turns = np.array([0] * 4 + [1] * 4 + [0] * 5 + [1] * 4 + [0] * 3, dtype=np.int32)
        result.append(PackedRow(draw.integers(3, 250, length) * (documents > 0), turns, documents, positions))
    return result


def equal(a: Features, b: Features) -> None:
    for name, x, y in zip(Features._fields, a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def test_a_document_alone_has_the_same_features(target: Target) -> None:
    packed = compute_features(target, rows(1), TAPS)
    ids = packed.token_ids[:, 8:17]
    with torch.inference_mode():
        alone = target.model(input_ids=ids, output_hidden_states=True, use_cache=False, context=features_context(ids))
    taps = torch.cat([alone.hidden_states[tap] for tap in TAPS], dim=-1)
    torch.testing.assert_close(packed.taps[:, 8:17], taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.log_normaliser[:, 8:17], alone.logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.argmax[:, 8:17], alone.logits.argmax(-1))


def features_context(ids: torch.Tensor) -> object:
    from infer.kernels.paged_attention import DocumentContext

    return DocumentContext(torch.ones_like(ids))


def test_tiles_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(features.TILE + 5, 8, generator=generator), torch.randn(30, 8, generator=generator)
    normaliser, argmax = full_vocabulary(hidden, head)
    logits = hidden @ head.T
    torch.testing.assert_close(normaliser, logits.logsumexp(-1))
    assert torch.equal(argmax, logits.argmax(-1))


def test_store_gives_what_online_gives(target: Target, tmp_path: Path) -> None:
    data = rows(5)
    shown: list[tuple[int, int]] = []
    place = build_store(tmp_path, target, data, TAPS, 2, 1, lambda done, total: shown.append((done, total)))
    stored, online = StoredFeatures(place), OnlineFeatures(target, data, TAPS)
    assert len(stored) == len(online) == 5 and shown[-1] == (5, 5)
    equal(stored.batch([4, 0, 3]), Features(*(torch.cat(parts) for parts in zip(*(online.batch([i]) for i in (4, 0, 3)), strict=True))))


def test_an_interrupted_store_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(5)
    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path, target, data, TAPS, 2, 2, lambda done, total: interrupt(done))  # in the second shard
    [place] = tmp_path.iterdir()
    assert sorted(p.name for p in place.iterdir()) == ["shard-00000.safetensors"]
    computed: list[int] = []
    real = features.compute_features

    def counted(target: Target, part: list[PackedRow], taps: tuple[int, ...]) -> Features:
        computed.append(len(part))
        return real(target, part, taps)

    monkeypatch.setattr(features, "compute_features", counted)
    assert build_store(tmp_path, target, data, TAPS, 2, 2, lambda done, total: None) == place
    assert computed == [2, 1]
    build_store(tmp_path, target, data, TAPS, 2, 2, lambda done, total: None)
    assert computed == [2, 1]


def test_who_does_not_write_waits_without_a_collective(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 15: a store may take longer to write than any collective waits."""
    monkeypatch.setattr(features, "POLL_SECONDS", 0.01)
    data, others_wait = rows(3), []
    other = Thread(target=await_store, args=(tmp_path / f"{store_key(target, data, TAPS)}-2",), daemon=True)
    other.start()
    build_store(tmp_path, target, data, TAPS, 2, 2, lambda done, total: others_wait.append(other.is_alive()))
    other.join(5)
    assert others_wait and all(others_wait) and not other.is_alive() and not torch.distributed.is_initialized()


def interrupt(done: int) -> None:
    if done == 4:
        raise KeyboardInterrupt


def test_other_taps_or_tokens_are_another_store(target: Target, tmp_path: Path) -> None:
    data = rows(1)
    changed = data[0]._replace(token_ids=data[0].token_ids.copy())
    changed.token_ids[0] += 1
    places = {
        build_store(tmp_path, target, data, TAPS, 2, 2, print),
        build_store(tmp_path, target, data, (0, 3, 5), 2, 2, print),
        build_store(tmp_path, target, [changed], TAPS, 2, 2, print),
    }
    assert len(places) == 3


def test_size_is_said_before_it_is_written(target: Target, tmp_path: Path) -> None:
    place = build_store(tmp_path, target, rows(64), TAPS, 64, 16, lambda done, total: None)
    said = store_bytes(64, 20, target.facts.hidden_size, bytes_per_number=4)
    written = (place / "shard-00000.safetensors").stat().st_size
    assert written == pytest.approx(said, rel=0.02)
    with pytest.raises(UserError, match="max_gigabytes"):
        refuse_if_large(said, said / 2e9)
