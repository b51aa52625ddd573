"""The glue replay against its slow twin: every anchor by itself, one query at a time, over exactly the keys that
serving would show.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafters.eagle3_ssd.model import Eagle3Drafter
from tests.cpu.train.small import HIDDEN, VOCAB, exact_pair
from tests.cpu.train.test_unroll import Past, one_step, rows_of
from train.objective.unroll import FirstStep, deeper_steps, first_step, glue_replay, stale_features
from train.target_features.features import Features

K, LENGTH = 3, 24
LAYOUT = [[(24, [0] * 4 + [1] * 20)], [(5, [0, 0, 1, 1, 1]), (19, [0] * 3 + [1] * 16)]]
ORIGINS = torch.tensor([[2, 9, 5], [0, 7, 12]])
SHIFTS = torch.tensor([[4, 0, 2], [0, 3, 1]])
FORKS = torch.tensor([[3, 2, 0], [0, 1, 3]])  # row 1, anchor 0 leaves its document after two slots: only those count


class Place:
    """The twin's state at one origin: step-0 keys of its document, by slot."""

    def __init__(self, drafter: Eagle3Drafter, features: Features, fused: Tensor, row: int, origin: int) -> None:
        self.drafter, self.tokens = drafter, features.token_ids[row]
        self.start = int(features.positions[row, origin]) - origin
        self.prefix: list[Past] = [[] for _ in range(drafter.config.num_hidden_layers)]
        self.first: dict[int, Tensor] = {}
        for slot in range(LENGTH - 1):
            if features.document_ids[row, slot] == features.document_ids[row, origin]:
                self.first[slot] = self.node(slot, fused[row, slot], self.prefix)

    def node(self, slot: int, feature: Tensor, pasts: list[Past]) -> Tensor:
        token = int(self.tokens[min(slot + 1, LENGTH - 1)])
        return one_step(self.drafter, token, feature, self.start + slot, pasts, slot)

    def known(self, anchor: int) -> list[Past]:
        """Step-0 keys of slots <= anchor, to append to."""
        return [[entry for entry in layer if entry[0] <= anchor] for layer in self.prefix]

    def chain(self, anchor: int, steps: int) -> list[Tensor]:
        """The plain unroll: outputs of steps 0..steps."""
        pasts, outputs = self.known(anchor), [self.first[anchor]]
        for d in range(1, steps + 1):
            outputs.append(self.node(anchor + d, outputs[-1], pasts))
        return outputs

    def replay(
        self, anchor: int, stale: list[Tensor], fork: int, refresh: int = 0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of slots anchor..anchor+K of the glue pass, and of the branch."""
        for _ in range(refresh + 1):
            pasts, glue = self.known(anchor), [self.first[anchor]]
            for j in range(1, K + 1):
                glue.append(self.node(anchor + j, stale[j - 1], pasts))
            stale = glue[:-1]
        seen = [[entry for entry in layer if entry[0] <= anchor + fork] for layer in pasts]
        branch: list[Tensor] = []
        for m in range(1, K + 1):
            branch.append(self.node(anchor + fork + m, branch[-1] if branch else glue[fork], seen))
        return glue, branch


def counts(row: int, column: int) -> bool:
    """Outputs that stay in their document; the others are never trained."""
    return (row, column) != (1, 0)


@pytest.mark.parametrize(("layers", "refresh"), [(1, 0), (2, 0), (4, 0), (2, 1)])
@pytest.mark.parametrize("recompute", [False, True])
def test_replay_equals_one_query_at_a_time_in_value_and_gradient(layers: int, refresh: int, recompute: bool) -> None:
    drafter, features = exact_pair(layers, LAYOUT, LENGTH)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    weights = torch.randn(2, 3, 2 * K + 1, HIDDEN, generator=torch.Generator().manual_seed(2)).double()

    fused = drafter.fuse(features.taps)
    rows = rows_of(features)
    first = first_step(drafter, rows, fused, recompute)
    stale = stale_features(drafter, rows, first, ORIGINS, SHIFTS, K)
    assert not stale.requires_grad
    replay = glue_replay(drafter, rows, first, ORIGINS + SHIFTS, stale, FORKS, refresh, recompute)
    fast = torch.cat((replay.glue, replay.branch), dim=2)

    fused = drafter.fuse(features.taps)
    losses, slow_losses = [], []
    for row in range(2):
        for column in range(3):
            if not counts(row, column):
                continue
            origin, shift, fork = (int(x[row, column]) for x in (ORIGINS, SHIFTS, FORKS))
            place = Place(drafter, features, fused, row, origin)
            earlier = [output.detach() for output in place.chain(origin, shift + K - 1)]
            glue, branch = place.replay(origin + shift, earlier[shift:], fork, refresh)
            slow = torch.stack([*glue, *branch])
            torch.testing.assert_close(
                fast[row, column], slow, rtol=1e-5, atol=1e-5, msg=lambda m, at=(row, column): f"{at}: {m}"
            )
            losses.append((fast[row, column] * weights[row, column]).sum())
            slow_losses.append((slow * weights[row, column]).sum())
    grads, slow_grads = (
        torch.autograd.grad(torch.stack(each).sum(), trained, allow_unused=True) for each in (losses, slow_losses)
    )
    for parameter, a, b in zip(trained, grads, slow_grads, strict=True):
        if a is None or b is None:
            assert a is b and parameter.shape in {(HIDDEN,), (24, HIDDEN)}, "only norm and head are unused"
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)  # norms and softmax are fp32 inside


@pytest.mark.parametrize("layers", [1, 2])
def test_without_a_shift_the_replay_is_the_plain_unroll(layers: int) -> None:
    """After a miss the glue pass recomputes what the JIT steps computed, and full acceptance goes on from there."""
    drafter, features = exact_pair(layers, LAYOUT, LENGTH)
    rows = rows_of(features)
    first = first_step(drafter, rows, drafter.fuse(features.taps))
    anchors, none = torch.tensor([[2, 6], [6, 9]]), torch.zeros(2, 2, dtype=torch.int64)
    replay = glue_replay(
        drafter, rows, first, anchors, stale_features(drafter, rows, first, anchors, none, K), none + K
    )
    plain = torch.stack(list(deeper_steps(drafter, rows, first, anchors, 2 * K)), dim=2)
    torch.testing.assert_close(torch.cat((replay.glue[:, :, 1:], replay.branch), dim=2), plain, rtol=1e-6, atol=1e-6)


def test_two_hits_in_a_row_are_two_replays() -> None:
    """The second round's features are the first one's branch, computed with the keys of its own time."""
    drafter, features = exact_pair(2, LAYOUT, LENGTH)
    rows, row, origin, forks = rows_of(features), 0, 3, (2, 1)
    fused = drafter.fuse(features.taps)
    first = first_step(drafter, rows, fused)
    at = torch.tensor([[origin], [6]])
    no_shift = torch.zeros_like(at)
    stale = stale_features(drafter, rows, first, at, no_shift, K)
    place = Place(drafter, features, fused, row, origin)
    slow_stale = place.chain(origin, K - 1)
    anchor = origin
    for fork in (*forks, 0):
        replay = glue_replay(drafter, rows, first, at, stale, no_shift + fork)
        glue, branch = place.replay(anchor, slow_stale, fork)
        torch.testing.assert_close(replay.glue[0, 0], torch.stack(glue), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(replay.branch[0, 0], torch.stack(branch), rtol=1e-5, atol=1e-5)
        stale, slow_stale, at, anchor = replay.branch, branch, at + fork + 1, anchor + fork + 1
    plain = stale_features(drafter, rows, first, torch.tensor([[origin], [6]]), no_shift + sum(forks) + 2, K)
    assert not torch.allclose(plain[0, 0], stale[0, 0], atol=1e-3), "an unroll from the origin has seen older keys"


def test_documents_do_not_see_each_other() -> None:
    drafter, features = exact_pair(2, LAYOUT, LENGTH)

    def outputs(tokens: Tensor, shift: float) -> Tensor:
        rows = rows_of(features._replace(token_ids=tokens))
        fused = drafter.fuse(features.taps).clone()
        fused[1, :5] += shift
        first: FirstStep = first_step(drafter, rows, fused)
        stale = stale_features(drafter, rows, first, ORIGINS[:, 1:], SHIFTS[:, 1:], K)
        return glue_replay(drafter, rows, first, (ORIGINS + SHIFTS)[:, 1:], stale, FORKS[:, 1:]).branch[1]

    changed = features.token_ids.clone()
    changed[1, :5] = (changed[1, :5] + 1) % VOCAB
    assert torch.equal(outputs(features.token_ids, 0.0), outputs(changed, 1.0))
