"""The norms of features and taps: their scale is the target's, only learnt ones move, and what is fed back keeps its
scale.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from data.chat.render import Example
from drafters.base.errors import UserError
from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.checkpoint import load_drafter, save_drafter
from drafters.eagle3_ssd.model import Eagle3Drafter, RMSNorm
from drafters.targets.taps import tap_features
from drafters.targets.target import Target, load_target
from tests.tiny import save_tiny_target
from train.config import DrafterSettings
from train.objective.unroll import Rows, unroll
from train.trainer.initialise import Start, start

EXAMPLE = Example("one", [3 + i % 200 for i in range(64)], [0] * 8 + [1] * 56)
UPPER_TAP = 3  # of a target of six layers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("norms") / "target")), "float32")


def started(target: Target, folder: Path, **settings: object) -> Start:
    chosen = DrafterSettings.model_validate({"draft_vocab_size": 40, **settings})
    return start(chosen, target, [EXAMPLE], seed=0, cache=folder)


def norms_of(drafter: Eagle3Drafter) -> list[RMSNorm]:
    assert drafter.feature_norm is not None and drafter.fc_norm is not None
    return [drafter.feature_norm, *(norm for norm in drafter.fc_norm if isinstance(norm, RMSNorm))]


def note_size(sizes: list[float], _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
    sizes.append(inputs[0].pow(2).mean().sqrt().item())


def test_norms_start_at_the_median_scale_of_the_targets_upper_tap(target: Target, tmp_path: Path) -> None:
    drafter = started(target, tmp_path, feature_norm="fixed", fc_norm="fixed").drafter
    ids = torch.tensor([EXAMPLE.token_ids])
    taps = tap_features(target, ids, torch.arange(64)[None], torch.ones_like(ids), [UPPER_TAP]).taps_BTC[0]
    scale = taps.pow(2).mean(-1).sqrt().median().item()
    assert len(norms_of(drafter)) == 4
    for norm in norms_of(drafter):
        assert torch.equal(norm.weight, norm.weight[:1].expand(32)) and norm.weight[0].item() == pytest.approx(
            scale, rel=1 / 128
        )
    fused = drafter.fuse(torch.cat([taps] * 3, dim=-1))
    assert fused.pow(2).mean(-1).sqrt().median().item() == pytest.approx(scale, rel=0.1), "fc passes the upper tap on"


def test_fixed_norms_are_frozen_and_learnt_ones_are_not(target: Target, tmp_path: Path) -> None:
    drafter = started(target, tmp_path, feature_norm="learnt", fc_norm="fixed").drafter
    feature, *taps = norms_of(drafter)
    assert feature.weight.requires_grad and not any(tap.weight.requires_grad for tap in taps)


def test_going_on_from_a_file_keeps_its_norms(target: Target, tmp_path: Path) -> None:
    first = started(target, tmp_path, feature_norm="fixed", fc_norm="fixed")
    card = DrafterCard(
        target="t",
        target_weight_hash=None,
        tokenizer_hash=None,
        template_hash=None,
        lookahead=1,
        trained_depth=3,
        trained_length=64,
    )
    place = str(save_drafter(tmp_path / "first-eagle3", first.drafter, first.vocab, card))
    again = started(target, tmp_path, init=place, feature_norm="learnt").drafter
    feature, *taps = norms_of(again)
    assert feature.weight.requires_grad and torch.equal(feature.weight, norms_of(first.drafter)[0].weight)
    assert not any(tap.weight.requires_grad for tap in taps)
    with pytest.raises(UserError, match="drafter.fc_norm = none, but drafter.init = .* has one"):
        started(target, tmp_path, init=place, fc_norm="none")
    with pytest.raises(UserError, match="drafter.norm_output = True, but"):
        started(target, tmp_path, init=place, norm_output=True)
    assert load_drafter(place, embed_tokens=target.embed_weight).config.feature_norm


def test_what_is_fed_back_keeps_its_scale_with_a_feature_norm_alone(target: Target, tmp_path: Path) -> None:
    """The state that goes in at depth 8 is as large as at depth 0 with the norm, and has grown without."""
    ids = torch.tensor([EXAMPLE.token_ids])
    rows = Rows(ids, torch.arange(64)[None], torch.ones_like(ids))
    sizes = {}
    for norm in ("none", "fixed"):
        drafter = started(target, tmp_path, feature_norm=norm).drafter
        read: list[float] = []
        drafter.midlayer.hidden_norm.register_forward_pre_hook(partial(note_size, read))
        with torch.no_grad():
            for weight in (drafter.midlayer.self_attn.o_proj.weight, drafter.midlayer.mlp.down_proj.weight):
                weight.mul_(3.0)
            list(unroll(drafter, rows, torch.randn(1, 64, 32), torch.tensor([[20]]), depth=8))
        sizes[norm] = read
    assert len(sizes["fixed"]) == 9 and max(sizes["fixed"]) == pytest.approx(min(sizes["fixed"]), rel=1e-3)
    assert sizes["none"][-1] > 2 * sizes["none"][0]
