"""The drafter's record of a request: what a tree node sees, which rows are pending, and the look-up of an outcome."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.eagle3_ssd.outcomes import Branches
from infer.draft.state import DraftRequest, PreparedSpeculations
from infer.draft.tree import Tree, tree_mask
from infer.kernels.sampling.params import Sampling


def test_the_worked_example() -> None:
    assert tree_mask(2, 2, (0, 2), 1).int().tolist() == [[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert tree_mask(1, 2, (1, 0, 2), 2).int().tolist() == [
        [1, 1, 0, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


def test_the_mask_drawn_in_the_document_is_the_trees() -> None:
    """infer/draft/README.md, section 3: n = 4 tokens, two in flight, branches for the outcomes (0, a) and (2, b)."""
    text = (Path(__file__).parents[3] / "infer/draft/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(glue|depth \d)  .*?   +([1.](?: +[1.])+)$", text, re.MULTILINE)
    drawn = {kind: [] for kind, _ in rows}
    for kind, row in rows:
        drawn[kind].append([int(cell == "1") for cell in row.split()])
    assert drawn["glue"] == [[1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]
    for depth in (1, 2):
        later = [0, 0] * (2 - depth)
        assert drawn[f"depth {depth}"] == [[*row, *later] for row in tree_mask(3, 2, (0, 2), depth).int().tolist()]


def test_nodes_sit_at_the_positions_of_their_text() -> None:
    """The document's example: positions 3 and 5 at depth 1, 4 and 6 at depth 2."""
    tree = Tree(_request(4, 0), Branches((0, 2), (7, 9), (0, 1, 1, 2)), torch.zeros(3, 4))
    assert (tree.positions(1), tree.positions(2)) == ([3, 5], [4, 6])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 4), st.data())
def test_a_node_sees_the_prefix_its_glue_slots_and_its_own_branch(
    prefix: int, glue: int, depth: int, data: st.DataObject
) -> None:
    ks = data.draw(st.lists(st.integers(0, glue), min_size=1, max_size=5))
    mask = tree_mask(prefix, glue, ks, depth)
    assert mask.dtype == torch.bool and mask.shape == (len(ks), prefix + glue + depth * len(ks))
    for branch, k in enumerate(ks):
        nodes = [prefix + glue + d * len(ks) + branch for d in range(depth)]
        seen = [*range(prefix), *range(prefix, prefix + k), *nodes]
        assert mask[branch].nonzero()[:, 0].tolist() == seen


def _request(tokens: int, pending: int) -> DraftRequest:
    features = torch.zeros(pending, 4)
    return DraftRequest("r", list(range(100, 100 + tokens)), Sampling(), (3, 5), 99, features)


def test_pending_rows_embed_the_newest_tokens_one_position_before_their_own() -> None:
    """Five tokens, x_0..x_4: slot j embeds token j+1, so that the two newest slots are 2 and 3, with tokens 103 and
    104.
    """
    request = _request(5, 2)
    assert request.newest_slot == 3
    assert request.pending_rows() == ([103, 104], [2, 3])
    assert _request(5, 4).pending_rows() == ([101, 102, 103, 104], [0, 1, 2, 3])


def test_rows_end_at_the_slot_that_is_named() -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    rows = _request(5, 2).rows(last_slot=5, count=2, mask_QL=mask)
    assert (rows.blocks, rows.num_keys, rows.num_rows) == ((3, 5), 6, 2) and rows.mask_QL is mask


def test_a_look_up_gives_the_branch_of_its_outcome_and_nothing_else() -> None:
    features_KBH, probs_KBD = torch.arange(12.0).view(2, 3, 2), torch.arange(24.0).view(2, 3, 4)
    branches = Branches((0, 0, 1), (7, 9, 7), (0, 2, 3))
    prepared = PreparedSpeculations(
        branches, [[1, 2], [3, 4], [5, 6]], features_KBH, probs_KBD, ([[10], [11], []], [[20], [], [22]])
    )
    hit = prepared.look_up(1, 7)
    assert hit is not None and hit.tokens == (5, 6) and hit.lowered == ((), (22,))
    assert (
        torch.equal(hit.features_KH, features_KBH[:, 2])
        and hit.probs_KD is not None
        and torch.equal(hit.probs_KD, probs_KBD[:, 2])
    )
    second = prepared._replace(probs_KBD=None).look_up(0, 9)
    assert second is not None and second.tokens == (3, 4) and second.probs_KD is None
    assert prepared.look_up(1, 9) is None and prepared.look_up(2, 7) is None and prepared.look_up(0, 8) is None
