"""Fixtures that several files of this folder share, made once per test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.targets.target import Target


@pytest.fixture(scope="session")
def pair(trained_pair: tuple[Target, Path]) -> tuple[Target, Path]:
    """A tiny target and a drafter that was trained on what it writes."""
    return trained_pair
