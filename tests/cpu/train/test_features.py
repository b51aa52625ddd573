"""Features: what is stored equals what is computed, and the full-vocabulary numbers are the plain ones."""

from __future__ import annotations

import pytest
import torch

from drafters.targets.head import TargetHead
from drafters.targets.target import Target, load_target
from tests.cpu.train.rows import TAPS, rows
from tests.tiny import save_tiny_target
from train.target_features import features
from train.target_features.features import compute_features, full_vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"))), "float32", fuse_layers=False)


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
    from infer.kernels.attention.context import DocumentContext

    return DocumentContext(torch.ones_like(ids))


def test_tiles_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(features.TILE + 5, 8, generator=generator), torch.randn(30, 8, generator=generator)
    normaliser, argmax = full_vocabulary(hidden, TargetHead(head))
    logits = hidden @ head.T
    torch.testing.assert_close(normaliser, logits.logsumexp(-1))
    assert torch.equal(argmax, logits.argmax(-1))
