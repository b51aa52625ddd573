"""Training and serving compute the same numbers: the worker against the training unroll, and against a plain twin of
infer/draft/README.md, section 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from drafters.eagle3_ssd.checkpoint import LoadedDrafter, load_drafter
from drafters.targets.target import Target, load_target
from infer.config import Mode
from infer.draft.model import DraftModel, TapFusion
from infer.draft.settings import DraftSettings, Fallback
from infer.draft.state import Speculation
from infer.draft.worker import DraftWorker
from infer.ipc.messages import Admit, Outcome, Source, ToDraft
from infer.kernels.sampling.params import Sampling
from tests.plain_drafting import PlainDrafter, PlainRound
from tests.tiny import save_tiny_drafter, save_tiny_target
from train.objective.unroll import Rows, first_step, glue_replay, stale_features, unroll

K, BUDGET, PROMPT = 3, 12, 9


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("agreement") / "target")), "float32")


class Shape(NamedTuple):
    """Which drafter: its decoder layers, and the config switches that are set."""

    layers: int
    norms: tuple[str, ...] = ()


SHAPES = [
    Shape(1),
    Shape(2),
    Shape(1, ("fc_norm", "feature_norm")),
    Shape(2, ("feature_norm",)),
    Shape(2, ("fc_norm", "norm_output")),
]


def _loaded(target: Target, directory: Path, shape: Shape) -> LoadedDrafter:
    place = save_tiny_drafter(directory / "tiny-eagle3", target, shape.layers, norms=shape.norms)
    return load_drafter(place, target.facts, target.embed_weight, torch.float32)


def _worker(loaded: LoadedDrafter, refresh: int) -> DraftWorker:
    draft_settings = DraftSettings(Mode.SSD, K, K, BUDGET, "uniform", Fallback.JIT, refresh, 1.0, 1, 128)
    return DraftWorker(DraftModel(loaded, draft_settings.region_tokens), draft_settings)


def _begin(worker: DraftWorker, features: Tensor) -> tuple[list[int], Speculation]:
    tokens = torch.randint(3, 200, (PROMPT + 1,), generator=torch.Generator().manual_seed(3)).tolist()
    worker.answer(ToDraft(admits=(Admit("r", tuple(tokens), features[:PROMPT], 100, Sampling()),)))
    worker.prepare()
    speculation = worker.requests["r"].in_flight
    assert speculation is not None
    return tokens, speculation


def _features(hidden: int = 32) -> Tensor:
    return torch.randn(100, hidden, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_after_a_jit_round_serving_is_the_training_unroll_to_depth_2k(
    target: Target, tmp_path: Path, shape: Shape
) -> None:
    """Depth 0..K-1 from the JIT steps, K+1..2K from the branch after full acceptance: `unroll` at the newest true
    slot.
    """
    loaded = _loaded(target, tmp_path, shape)
    reference = _loaded(target, tmp_path, shape).model
    features = _features()
    worker = _worker(loaded, refresh=0)
    tokens, speculation = _begin(worker, features)
    prepared = worker.requests["r"].prepared
    assert prepared is not None
    branch = prepared.branches.ks.index(K)
    path = [*tokens, *speculation.tokens, prepared.branches.tokens[branch], *prepared.tokens_BK[branch]]
    sequence = torch.tensor([path])
    rows = Rows(sequence, torch.arange(len(path))[None], torch.ones_like(sequence))
    anchor = len(tokens) - 2
    fused = torch.zeros(1, len(path), features.shape[1])
    fused[0, : anchor + 1] = features[: anchor + 1]
    steps = list(unroll(reference, rows, fused, torch.tensor([[anchor]]), 2 * K))
    outputs = torch.stack([steps[0][0, anchor], *(step[0, 0] for step in steps[1:])])
    served = torch.cat([speculation.features_KH, prepared.features_KBH[:, branch]])
    unrolled = torch.cat([outputs[:K], outputs[K + 1 :]])
    _assert_close(served, unrolled)
    logits = reference.logits(unrolled)
    _assert_close(worker.model.logits(served), logits)
    drafted = loaded.vocab.to_target(logits.argmax(-1)).tolist()
    assert drafted == [*speculation.tokens, *prepared.tokens_BK[branch]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("refresh", [0, 1, K])
@torch.no_grad()
def test_hits_in_a_row_and_a_miss_after_them_match_the_plain_twin(
    target: Target, tmp_path: Path, shape: Shape, refresh: int
) -> None:
    """Each round: the served features equal a twin that evaluates slot by slot over exactly the keys that
    infer/draft/README.md, section 3, allows.
    """
    loaded = _loaded(target, tmp_path, shape)
    plain = PlainDrafter(_loaded(target, tmp_path, shape).model)
    worker, true_features = _worker(loaded, refresh), _features()
    tokens, speculation = _begin(worker, true_features)
    committed = list(tokens)
    twin = PlainRound(plain, committed, list(true_features))
    nodes = twin.committed()
    expected = [
        n.output for n in [nodes[-1], *twin.chain(nodes, nodes[-1], list(speculation.tokens), len(committed) - 1)]
    ][:K]
    _assert_close(speculation.features_KH, torch.stack(expected))
    for accepted, wants_hit in [(1, True), (K, True), (0, True), (2, False), (2, True)]:
        nodes = twin.committed()
        glue = twin.glue(nodes, list(speculation.tokens), list(speculation.features_KH), refresh)
        prepared = worker.requests["r"].prepared
        assert prepared is not None
        branch = prepared.branches.ks.index(accepted)
        bonus = prepared.branches.tokens[branch]
        if not wants_hit:
            bonus = next(
                t for t in range(3, 250) if prepared.look_up(accepted, t) is None and t != speculation.tokens[accepted]
            )
        visible = [*nodes, *glue[:accepted]]
        if wants_hit:
            steps = twin.chain(
                visible, visible[-1], [bonus, *prepared.tokens_BK[branch]], len(committed) - 1 + accepted
            )
            expected = [n.output for n in steps[:K]]
        round_number = len(committed)
        committed += [*speculation.tokens[:accepted], bonus]
        newest = true_features[len(committed) - 2 - accepted : len(committed) - 1]
        answer = worker.answer(ToDraft(outcomes=(Outcome("r", round_number, accepted, bonus, newest),))).speculations[
            0
        ]
        assert answer.source is (Source.HIT if wants_hit else Source.JIT)
        if not wants_hit:
            nodes = twin.committed()
            chain = twin.chain(nodes, nodes[-1], list(answer.tokens), len(committed) - 1)
            expected = [n.output for n in [nodes[-1], *chain]][:K]
        current = worker.requests["r"].in_flight
        assert current is not None
        _assert_close(current.features_KH, torch.stack(expected))
        worker.prepare()
        speculation = current


@pytest.mark.parametrize("shape", [*SHAPES, Shape(4), Shape(4, ("fc_norm", "feature_norm"))], ids=str)
@pytest.mark.parametrize(("forks", "refresh"), [((1, 2, K), 0), ((K, 1, 2), 0), ((2, 0, 1), 0), ((1, K, 2), 1)])
@torch.no_grad()
def test_after_hits_serving_is_the_training_replay(
    target: Target, tmp_path: Path, shape: Shape, forks: tuple[int, int, int], refresh: int
) -> None:
    """Hits with forks[0] and forks[1] accepted: what each round drafts for its fork is what the replay of that round
    trains.
    """
    loaded = _loaded(target, tmp_path, shape)
    reference = _loaded(target, tmp_path, shape).model
    features = _features()
    worker = _worker(loaded, refresh)
    path, speculation = _begin(worker, features)
    origin = anchor = len(path) - 2
    stale = None
    for number, fork in enumerate(forks):
        prepared = worker.requests["r"].prepared
        assert prepared is not None
        branch = prepared.branches.ks.index(fork)
        round_number = len(path)
        path = [*path, *speculation.tokens[:fork], prepared.branches.tokens[branch]]
        sequence = torch.tensor([[*path, *prepared.tokens_BK[branch]]])
        rows = Rows(sequence, torch.arange(sequence.shape[1])[None], torch.ones_like(sequence))
        fused = torch.zeros(1, sequence.shape[1], features.shape[1])
        fused[0, : anchor + 1] = features[: anchor + 1]
        first, at = first_step(reference, rows, fused), torch.tensor([[anchor]])
        if (
            number < 2
        ):  # the features are an unroll's: from the anchor itself, or, after one hit, from that of the round before
            stale = stale_features(reference, rows, first, torch.tensor([[origin]]), at - origin, K)
        assert stale is not None
        replay = glue_replay(reference, rows, first, at, stale, torch.tensor([[fork]]), refresh)
        _assert_close(prepared.features_KBH[:, branch], replay.branch[0, 0])
        stale = replay.branch  # two hits: of the round before, as it was then

        newest = features[anchor + 1 : anchor + fork + 2]
        outcome = Outcome("r", round_number, fork, path[-1], newest)
        assert worker.answer(ToDraft(outcomes=(outcome,))).speculations[0].source is Source.HIT
        worker.prepare()
        anchor += fork + 1
        in_flight = worker.requests["r"].in_flight
        assert in_flight is not None
        speculation = in_flight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_the_targets_side_fuses_taps_as_training_does(target: Target, tmp_path: Path, shape: Shape) -> None:
    model = _loaded(target, tmp_path, shape).model
    taps = [torch.randn(1, 5, 32) * scale for scale in (0.1, 3.0, 20.0)]
    _assert_close(TapFusion(model)(taps), model.fuse(torch.cat(taps, dim=-1)))
