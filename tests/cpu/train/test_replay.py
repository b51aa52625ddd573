"""Serving replayed on unrolls: by hand, and against a table of what each step of each anchor would say."""

from __future__ import annotations

import pytest

from train.replay import TOP, Round, Turn, replay_fresh, replay_lagged, tables

K = 2
TOKENS = list(range(100, 112))


def turn_with(right: dict[tuple[int, int], int], depths: int = 7) -> Turn:
    """All predictions are right, except that (anchor, step) finds the true token only at the given place (0 is first)."""
    tops = []
    for anchor in range(len(TOKENS)):
        steps = []
        for step in range(depths):
            index = anchor + 1 + step
            true = TOKENS[index] if index < len(TOKENS) else 0
            ranked = list(range(1, TOP + 1))  # wrong tokens, 1 the likeliest
            ranked.insert(right.get((anchor, step), 0), true)
            steps.append(ranked[:TOP])
        tops.append(steps)
    return Turn(TOKENS, tops)


def test_everything_right() -> None:
    turn = turn_with({})
    assert replay_fresh(turn, K) == [2, 2, 2]  # slots 0, 3, 6; at 9 the turn has too few tokens left
    rounds = replay_lagged(turn, K, (1, 1, 1), (1, 1, 1), refreshed=False)
    assert rounds == [Round(2, 2, False, 0), Round(2, 2, True, 0), Round(2, 2, True, 0)]


def test_a_miss_by_fan_out_resets_the_lag() -> None:
    # slot 0: both accepted; the bonus token, step 2 at anchor 0, stands second: found with F = 2, missed with F = 1.
    # Only the lagged speculation for slot 3 (anchor 0, steps 3 and 4) is wrong at its second token.
    turn = turn_with({(0, 2): 1, (0, 4): 3})
    hit = replay_lagged(turn, K, (1, 1, 2), (1, 1, 1), refreshed=False)
    assert hit[:2] == [Round(2, 2, False, 1), Round(1, 2, True, 2)]  # the glue step is (0, 4) too: third without the rejected
    miss = replay_lagged(turn, K, (1, 1, 1), (1, 1, 1), refreshed=False)
    assert miss[:2] == [Round(2, 2, False, 1), Round(2, 2, False, 0)]


def test_the_rejected_token_is_no_candidate() -> None:
    # step 1 at anchor 0 says token 1, which is rejected; its glue distribution holds the true token second, so first without it
    turn = turn_with({(0, 1): 1})
    assert replay_lagged(turn, K, (1, 1, 1), (1, 1, 1), refreshed=False)[0] == Round(1, 1, False, 0)


def test_shift_adds_up_over_hits_unless_refreshed() -> None:
    # slots 0, 3: hits with k = 2. Without refresh the speculation for slot 6 was drafted at anchor 0, steps 6 and 7 (shift 6);
    # with refresh at anchor 3, steps 3 and 4 (shift 3).
    stale = turn_with({(0, 6): 5}, depths=9)
    assert [r.accepted for r in replay_lagged(stale, K, (1, 1, 1), (1, 1, 1), refreshed=False)] == [2, 2, 0, 2]
    assert [r.accepted for r in replay_lagged(stale, K, (1, 1, 1), (1, 1, 1), refreshed=True)] == [2, 2, 2]
    fresher = turn_with({(3, 3): 5}, depths=9)
    assert [r.accepted for r in replay_lagged(fresher, K, (1, 1, 1), (1, 1, 1), refreshed=True)] == [2, 2, 0, 2]


def test_after_no_acceptance_the_fork_has_true_features() -> None:
    # slot 0: first token wrong, bonus found at step 0 of anchor 0. Branch 0 continues from there: steps 1, 2 of anchor 0 for slot 1
    turn = turn_with({(0, 0): 1, (0, 2): 4})
    rounds = replay_lagged(turn, K, (1, 1, 1), (1, 1, 1), refreshed=False)
    assert rounds[:2] == [Round(0, 0, False, 0), Round(1, 2, True, 3)]


def test_tables_are_shares() -> None:
    rounds = [Round(0, 0, False, 0), Round(0, 1, False, 2), Round(2, 2, True, None), Round(2, 2, True, 0)]
    found = tables(rounds, 2)
    assert found is not None and found.reach == (0.5, 0.0, 0.5)
    assert found.recall[0][:4] == (0.5, 0.5, 1.0, 1.0)
    assert found.recall[2][:2] == (0.5, 0.5)
    assert found.recall[1][:3] == pytest.approx((0.5, 0.5, 0.75))  # never seen: the average of the others
    assert tables([], 2) is None
