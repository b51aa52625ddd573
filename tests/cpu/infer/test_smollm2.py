"""The real model with the drafter that ships: the same tokens in every mode, through a kill, and as transformers
writes them.

In fp32, where tokens are equal unless two logits are closer than rounding: that margin is shown, and has to be that
small.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.chat.conversations import read_conversations
from data.chat.render import render_prompt
from data.prompts import overlap, read_prompts
from drafters.targets.files import resolve_target
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.engine import Engine
from infer.engine.request import Request, SamplingParams
from infer.ipc.messages import Source
from infer.launch import launch
from infer.text.grammar import json_grammar
from tests.trained import drain

ROOT = Path(__file__).resolve().parents[3]
TARGET = "builtin:smollm2-135m"
DRAFTER = ROOT / "drafters" / "pretrained" / "smollm2-135m-eagle3"
CORPUS = ROOT / "data" / "corpora" / "smollm2-135m"
PROMPTS = sorted((ROOT / "data" / "prompts").glob("*.jsonl"))
NEW, NEAR_TIE = 48, 1e-4

pytestmark = pytest.mark.long
needs_drafter = pytest.mark.skipif(
    not DRAFTER.is_dir(), reason=f"no drafter at {DRAFTER.relative_to(ROOT)}: train one, or fetch it"
)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, "float32")


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same weights as transformers runs them, with nothing of ours applied."""
    return AutoModelForCausalLM.from_pretrained(resolve_target(TARGET), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Six, an even mix of the shipped files."""
    return [render_prompt(prompt.messages, target.tokenizer) for prompt in read_prompts(PROMPTS, 6)]


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    with _engine(target, Mode.AR) as engine:
        return [request.new_tokens for request in _answer(engine, prompts)]


def _engine(target: Target, mode: Mode, batch_size: int = 1) -> Engine:
    anywhere = {"target_devices": ("cpu",), "draft_devices": ("cpu",)}  # not pinned: that would outlast the test
    shared = {"target": TARGET, "drafter": str(DRAFTER), "dtype": "float32", "max_model_len": 512, **anywhere}
    return launch(EngineSettings(batch_size=batch_size, **shared), mode, target)


def _answer(engine: Engine, prompts: Sequence[Sequence[int]], kill_at: int | None = None) -> list[Request]:
    """Greedy answers; the draft process is killed after `kill_at` steps."""
    names = [engine.submit(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts]
    ended: dict[str, Request] = {}
    steps = 0
    while engine.has_work:
        ended |= {output.request_id: output.request for output in engine.step() if output.finish_reason}
        steps += 1
        if steps == kill_at:
            assert engine.draft_alive and engine.draft_pid
            os.kill(engine.draft_pid, signal.SIGKILL)
    return [ended[name] for name in names]


@torch.no_grad()
def _margin(plain: Any, prefix: list[int], one: int, other: int) -> float:
    """How far apart two next tokens are for the plain model, in logits."""
    logits = plain(torch.tensor([prefix])).logits[0, -1]
    return abs(float(logits[one] - logits[other]))


def assert_same_answer(plain: Any, prompt: list[int], found: list[int], expected: list[int]) -> None:
    """Equal, or apart from a token on which the model itself cannot tell from the other one in fp32."""
    if found == expected:
        return
    place = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    assert place is not None, f"one answer is a beginning of the other: {found} {expected}"
    margin = _margin(plain, [*prompt, *expected[:place]], found[place], expected[place])
    print(f"token {place} differs: {found[place]} instead of {expected[place]}, margin {margin:.2e}")
    assert margin < NEAR_TIE, (
        f"token {place} is {found[place]} instead of {expected[place]}, {margin:.2e} logits apart"
    )


def test_ar_is_what_transformers_generates(plain: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:2]:
        ids = torch.tensor([prompt])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert_same_answer(plain, prompt, tokens, out[0, len(prompt) :].tolist())


@needs_drafter
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", [Mode.SD, Mode.SSD])
def test_speculation_changes_no_token(
    target: Target, plain: Any, prompts: list[list[int]], expected: list[list[int]], mode: Mode, batch_size: int
) -> None:
    with _engine(target, mode, batch_size) as engine:
        requests = _answer(engine, prompts)
        assert engine.draft_alive
    for prompt, request, tokens in zip(prompts, requests, expected, strict=True):
        assert_same_answer(plain, prompt, request.new_tokens, tokens)
    rounds = [record for request in requests for record in request.rounds]
    assert sum(record.accepted for record in rounds) > len(rounds) / 4, (
        "the drafter drafts nothing the target would write"
    )
    assert mode is Mode.SD or any(record.source is Source.HIT and record.accepted for record in rounds)


@needs_drafter
def test_a_killed_draft_process_changes_no_token(
    target: Target, plain: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with _engine(target, Mode.SSD, batch_size=2) as engine:
        requests = _answer(engine, prompts, kill_at=5)
        assert engine.draft_client.failures == 1
    for prompt, request, tokens in zip(prompts, requests, expected, strict=True):
        assert_same_answer(plain, prompt, request.new_tokens, tokens)
    assert {Source.ALONE} < {record.source for record in requests[0].rounds}, (
        "it drafted before, and not at once after"
    )


@needs_drafter
@pytest.mark.parametrize("mode", [Mode.AR, Mode.SSD])
def test_log_probabilities_are_those_of_transformers(
    target: Target, plain: Any, prompts: list[list[int]], mode: Mode
) -> None:
    asked = [
        SamplingParams(NEW, logprobs=5),
        SamplingParams(NEW, logprobs=5, temperature=1.0, top_p=0.9, presence_penalty=1.0, seed=1),
    ]
    with _engine(target, mode, batch_size=2) as engine:
        names = [engine.submit(prompts[0], params) for params in asked]
        ended = drain(engine)
    assert mode is Mode.AR or any(record.accepted for name in names for record in ended[name].rounds)
    for request in map(ended.__getitem__, names):
        with torch.no_grad():
            log_p = plain(torch.tensor([request.tokens])).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(-1, torch.tensor(request.new_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([own.logprob for own in request.logprobs]), chosen, atol=1e-4, rtol=0)
        top = torch.tensor([[value for _, value in own.top] for own in request.logprobs])
        torch.testing.assert_close(top, log_p.topk(5).values, atol=1e-4, rtol=0)


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "parts": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["title", "parts"],
    "additionalProperties": False,
}


@needs_drafter
def test_constrained_answers_are_the_same_with_speculation_and_follow_their_schema(
    target: Target, prompts: list[list[int]]
) -> None:
    """Tokens of many characters, of which some end one part of the value and begin the next."""
    answers = []
    for mode in (Mode.AR, Mode.SSD):
        with _engine(target, mode, batch_size=2) as engine:
            names = [engine.submit(prompt, SamplingParams(80, grammar=json_grammar(SCHEMA))) for prompt in prompts[:2]]
            ended = drain(engine)
        answers.append([ended[name].new_tokens for name in names])
        assert mode is Mode.AR or any(record.accepted > 1 for request in ended.values() for record in request.rounds)
    assert answers[0] == answers[1]
    for tokens in answers[0]:
        value = json.loads(target.tokenizer.decode(tokens, skip_special_tokens=True))
        assert isinstance(value["title"], str) and all(isinstance(part, int) for part in value["parts"])


def test_no_shipped_prompt_is_in_the_corpus() -> None:
    prompts, corpus = read_prompts(PROMPTS), list(read_conversations(CORPUS))
    assert len(prompts) >= 60 and len(corpus) > 1000
    assert overlap(prompts, corpus) == []
    asked = corpus[0].messages[0]
    copied = prompts[0]._replace(messages=({"role": "user", "content": asked["content"]},))
    assert [found.prompt_id for found in overlap([copied], corpus)] == [copied.id], (
        "the check finds a prompt that is there"
    )
