"""Two minutes of the soak; all of it: `python -m tests.cpu.infer.soak --requests 10000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.infer import soak


@pytest.mark.long
@pytest.mark.timeout(600)
def test_requests_cancels_and_faults_of_the_draft_process_leave_no_trace(tmp_path: Path) -> None:
    result = soak.run(requests=400, seed=1, directory=tmp_path, calm=(20, 60))
    assert result.finished["cancel"] > 10 and result.finished["length"] > 250
    assert result.sources["hit"] > 100 and result.sources["alone"] > 100, (
        "speculations were served, and rounds had no drafter"
    )
    assert len(result.faults) >= 3, result.faults
