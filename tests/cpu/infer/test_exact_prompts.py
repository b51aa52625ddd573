"""fp32, greedy, on the real target: AR, SD and SSD write the same tokens in ten settings (`exact`) on questions the
drafter never saw.
"""

from __future__ import annotations

import itertools

import pytest

from drafters.targets.target import load_target
from infer.config import Mode
from tests.cpu.infer.exact import SETTINGS, TARGET, is_exact, prompts_of, write

QUESTIONS, NEW = 8, 32


def test_any_two_values_of_two_settings_meet() -> None:
    columns = list(zip(*SETTINGS, strict=True))
    for one, other in itertools.combinations(columns, 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other)), (set(one), set(other))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_modes_write_the_same_tokens_in_every_setting() -> None:
    target = load_target(TARGET, "float32")
    prompts = prompts_of(target, QUESTIONS)
    expected = write(target, prompts, NEW, Mode.AR).answers
    outcomes = {"sd": write(target, prompts, NEW, Mode.SD, expected)}
    outcomes |= {
        str(tuple(setting)): write(target, prompts, NEW, Mode.SSD, expected, **setting.changes) for setting in SETTINGS
    }
    assert all(map(is_exact, outcomes.values())), {name: outcome.partings for name, outcome in outcomes.items()}
    assert any(outcome.preempted for outcome in outcomes.values()), "nobody was ever sent away"
