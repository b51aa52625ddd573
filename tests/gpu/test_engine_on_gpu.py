"""The engine on one CUDA device says what it says on the CPU. Run by `make gpu-check`; skipped where there is no
device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.targets.target import load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.launch import launch
from tests.tiny import save_tiny_drafter, save_tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_those_of_the_cpu(tmp_path: Path, mode: Mode, temperature: float) -> None:
    place = save_tiny_target(tmp_path / "target")
    drafter = save_tiny_drafter(tmp_path / "tiny-eagle3", load_target(str(place), "float32"))
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    answers = []
    for device in ("cpu", "cuda:0"):
        target = load_target(str(place), "float32", device)
        settings = EngineSettings(
            target=str(place),
            drafter=str(drafter),
            dtype="float32",
            lookahead=3,
            max_model_len=64,
            target_devices=(device,),
            draft_devices=(device,),
        )
        with launch(settings, mode, target, in_process=True) as engine:
            engine.submit([7, 30, 90, 12], params)
            while engine.has_work:
                outputs = engine.step()
            answers.append(outputs[-1].request.new_tokens)
    assert answers[0] == answers[1]
