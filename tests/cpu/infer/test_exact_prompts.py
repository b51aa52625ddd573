"""fp32, greedy, on the real target: AR, SD and SSD write the same tokens on 24 questions that the drafter never saw, 128 tokens each.

In batches of 8, which also has requests of different lengths share every forward. Texts may part only where the target's two best
logits are closer than 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from data.prompts import read_prompts
from data.render import render_prompt
from drafters.targets import Target, load_target
from infer.config import EngineSettings, Mode
from infer.figures import first_parting
from infer.launch import launch
from infer.request import SamplingParams
from infer.results import parting_margin

ROOT = Path(__file__).parents[3]
DRAFTER = ROOT / "drafters" / "pretrained" / "smollm2-135m-eagle3"
QUESTIONS = sorted((ROOT.parent / "shared" / "prompts").glob("*.jsonl")) or sorted((ROOT / "data" / "prompts").glob("*.jsonl"))


def _answers(target: Target, prompts: list[list[int]], mode: Mode, **changes: object) -> list[list[int]]:
    base = {"lookahead": 3, "budget": 16, "batch_size": 8, "max_model_len": 768}
    settings = EngineSettings(target=target.facts.name, drafter=str(DRAFTER), dtype="float32", **{**base, **changes})  # type: ignore[arg-type]
    ended: dict[str, list[int]] = {}
    with launch(settings, mode, target) as engine:
        names = [engine.submit(prompt, SamplingParams(max_new_tokens=128)) for prompt in prompts]
        while engine.has_work:
            ended |= {o.request_id: o.request.new_tokens for o in engine.step() if o.finish_reason}
    return [ended[name] for name in names]


@pytest.mark.long
def test_modes_write_the_same_tokens_on_24_questions() -> None:
    target = load_target("builtin:smollm2-135m", "float32")
    prompts = [render_prompt(prompt.messages, target.tokenizer) for prompt in read_prompts(QUESTIONS, 24)]
    alone = _answers(target, prompts, Mode.AR)
    runs = {
        "sd": _answers(target, prompts, Mode.SD),
        "ssd": _answers(target, prompts, Mode.SSD),
        "ssd, ngram": _answers(target, prompts, Mode.SSD, fallback="ngram", refresh=1, policy="uniform"),
    }
    margins = {}
    for name, answers in runs.items():
        for number, (prompt, expected, got) in enumerate(zip(prompts, alone, answers, strict=True)):
            if parting := first_parting(expected, got):
                prefix = [*prompt, *expected[: parting.index]]
                margins[name, number] = parting_margin(target, prefix, parting.first, parting.second)
    assert all(margin is not None and margin < 1e-4 for margin in margins.values()), margins
    print(f"{len(prompts)} questions, partings at near-ties: {margins or 'none'}")
