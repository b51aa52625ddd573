"""Log-probabilities are the target's own, in every mode: those of transformers on the finished text, within 1e-4 in
fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import Request, SamplingParams
from infer.kernels.sampling.logprobs import token_logprobs
from infer.launch import launch
from tests.tiny import save_tiny_drafter, save_tiny_target
from tests.trained import drain

VOCAB = 6  # so small that a random drafter is often right
PROMPTS = [[1, 4, 3, 0, 5], [3, 3], [0, 1, 4, 5, 5, 1, 0]]
ASKED = [
    SamplingParams(max_new_tokens=20, logprobs=0, ignore_eos=True),
    SamplingParams(max_new_tokens=20, logprobs=3, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(
        max_new_tokens=20, logprobs=6, temperature=0.7, top_k=3, presence_penalty=1.0, seed=2, ignore_eos=True
    ),
    SamplingParams(max_new_tokens=20, logprobs=2, logit_bias=((4, 3.0),), repetition_penalty=2.0, ignore_eos=True),
    SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    place = tmp_path_factory.mktemp("logprobs")
    target = load_target(str(save_tiny_target(place / "target", vocab_size=VOCAB, sharpness=1.2)), "float32")
    return target, save_tiny_drafter(place / "tiny-eagle3", target, draft_vocab_size=VOCAB - 1)


def _answers(pair: tuple[Target, Path], mode: Mode) -> list[Request]:
    settings = EngineSettings(
        target="",
        drafter=str(pair[1]),
        dtype="float32",
        target_devices=("cpu",),
        lookahead=3,
        budget=9,
        batch_size=4,
        max_model_len=64,
    )
    with launch(settings, mode, pair[0], in_process=True) as engine:
        names = [engine.submit(prompt, params) for prompt in PROMPTS for params in ASKED]
        ended = drain(engine)
    return [ended[name] for name in names]


@pytest.mark.parametrize("mode", Mode)
def test_log_probabilities_are_those_of_transformers(pair: tuple[Target, Path], mode: Mode) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(pair[1].parent / "target", dtype=torch.float32)
    requests = _answers(pair, mode)
    assert mode is Mode.AR or any(r.accepted > 1 for request in requests for r in request.rounds)
    for request in requests:
        wanted = request.params.logprobs
        if wanted is None:
            assert request.logprobs == []
            continue
        with torch.inference_mode():
            log_p = plain(torch.tensor([request.tokens])).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        assert [own.token for own in request.logprobs] == request.new_tokens
        chosen = log_p.gather(-1, torch.tensor(request.new_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([own.logprob for own in request.logprobs]), chosen, atol=1e-4, rtol=0)
        best = log_p.topk(wanted)
        assert [[token for token, _ in own.top] for own in request.logprobs] == best.indices.tolist()
        values = torch.tensor([[value for _, value in own.top] for own in request.logprobs]).view(len(log_p), wanted)
        torch.testing.assert_close(values, best.values, atol=1e-4, rtol=0)


def test_equal_tokens_are_listed_by_id_and_half_precision_is_summed_in_single() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).bfloat16()
    (got,) = token_logprobs(logits, [3], 3)
    expected = logits.float().log_softmax(-1)[0]
    assert [token for token, _ in got.top] == [1, 2, 0]
    assert got.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [value for _, value in got.top] == pytest.approx([float(expected[i]) for i in (1, 2, 0)], abs=1e-6)
