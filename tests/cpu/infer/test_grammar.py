"""Constrained output: every answer follows its grammar, exactly, in every mode; what is rejected leaves no trace in
the state.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infer.draft.sampler
from drafters.base.errors import UserError
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import FinishReason, Request, SamplingParams
from infer.ipc.messages import Source
from infer.kernels.attention.context import DocumentContext
from infer.launch import launch
from infer.text.grammar import (
    Grammars,
    GrammarState,
    Vocabulary,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from tests.tiny import save_tiny_drafter, save_tiny_target
from tests.trained import drain

PAIRS = "(a[bc]|b[ca]|c[ab])"  # what may follow a letter depends on it
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    place = tmp_path_factory.mktemp("grammar")
    target = load_target(str(save_tiny_target(place / "target", sharpness=1.2)), "float32")
    return target, save_tiny_drafter(place / "tiny-eagle3", target, draft_vocab_size=259)


@pytest.fixture(scope="module")
def grammars(pair: tuple[Target, Path]) -> Grammars:
    return Grammars(partial(Vocabulary.of, pair[0]))


def _ids(target: Target, text: str) -> list[int]:
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def _text(target: Target, request: Request) -> str:
    return target.tokenizer.decode(request.new_tokens, skip_special_tokens=True)


def _answers(
    pair: tuple[Target, Path], mode: Mode, asked: Sequence[SamplingParams], in_process: bool = True, **changes: Any
) -> list[Request]:
    base = {
        "lookahead": 3,
        "budget": 8,
        "policy": "uniform",
        "batch_size": 8,
        "max_model_len": 96,
        "draft_devices": ("cpu",),
    }
    settings = EngineSettings(
        target="", drafter=str(pair[1]), dtype="float32", target_devices=("cpu",), **{**base, **changes}
    )
    with launch(settings, mode, pair[0], in_process=in_process) as engine:
        names = [engine.submit(PROMPT, params) for params in asked]
        ended = drain(engine)
    return [ended[name] for name in names]


def _allowed_after(grammars: Grammars, grammar: str, tokens: Sequence[int]) -> Tensor:
    """Plain twin of `GrammarState.allowed`: a new state for each path."""
    state = grammars.start(grammar)
    state.advance(tokens)
    return state.allowed([[]])[0]


def test_looking_ahead_equals_new_states_and_leaves_no_trace(pair: tuple[Target, Path], grammars: Grammars) -> None:
    """Random paths, refused ones among them, over a random walk of committed tokens."""
    target, grammar, chance = pair[0], regex_grammar(f"{PAIRS}{{6}}x?"), random.Random(0)
    letters, end = _ids(target, "abcx"), target.facts.end_token_ids[0]
    state, committed = grammars.start(grammar), []
    while end not in committed:
        paths = [[chance.choice([*letters, end]) for _ in range(chance.randrange(5))] for _ in range(4)]
        paths += [paths[0][:j] for j in range(len(paths[0]))]
        for path, got in zip(paths, state.allowed(paths), strict=True):
            before = [_allowed_after(grammars, grammar, [*committed, *path[:n]]) for n in range(len(path))]
            valid = next((n for n, token in enumerate(path) if not before[n][token]), len(path))
            assert state.valid(path) == valid
            if valid < len(path) or end in path:
                assert bool(got.all())
            else:
                assert torch.equal(got, _allowed_after(grammars, grammar, [*committed, *path]))
        now = state.allowed([[]])[0]
        assert torch.equal(now, _allowed_after(grammars, grammar, committed))
        token = chance.choice(now.nonzero()[:, 0].tolist())
        state.advance([token])
        committed.append(token)
    assert re.fullmatch(f"{PAIRS}{{6}}x?", target.tokenizer.decode(committed[:-1]))


@pytest.mark.parametrize("fallback", ["jit", "ngram", "none"])
def test_every_mode_gives_the_same_greedy_answer_and_it_follows_the_grammar(
    pair: tuple[Target, Path], fallback: str
) -> None:
    """Constrained and free requests, greedy and sampled, share a batch."""
    constrained = SamplingParams(max_new_tokens=40, grammar=regex_grammar(f"{PAIRS}{{2,12}}"))
    asked = [
        constrained,
        SamplingParams(max_new_tokens=20),
        replace(constrained, temperature=1.0, seed=1),
        replace(constrained, presence_penalty=1.0, grammar=choice_grammar(["yes, surely", "no", "nothing of that"])),
        SamplingParams(max_new_tokens=20, temperature=1.0, seed=2),
    ]
    alone = [_answers(pair, Mode.AR, [params])[0].new_tokens for params in asked]
    for mode in (Mode.SD, Mode.SSD):
        requests = _answers(pair, mode, asked, fallback=fallback)
        assert [requests[i].new_tokens for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]
        for i, pattern in ((0, f"{PAIRS}{{2,12}}"), (2, f"{PAIRS}{{2,12}}"), (3, "yes, surely|no(thing of that)?")):
            assert requests[i].finish_reason is FinishReason.STOP and re.fullmatch(
                pattern, _text(pair[0], requests[i])
            )
        rounds = [r for i in (0, 2, 3) for r in requests[i].rounds]
        assert any(r.accepted for r in rounds)
        assert mode is Mode.SD or any(r.source is Source.HIT and r.accepted for r in rounds)


def _exact(target: Target, letters: list[int], length: int) -> dict[tuple[int, ...], float]:
    """P(first tokens) of an answer under `PAIRS` repeated, by enumeration."""
    following = {a: [b for b in letters if b != a] for a in letters}
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(length):
        grown = {}
        for text, p in probs.items():
            ids = torch.tensor([[*PROMPT, *text]])
            with torch.inference_mode():
                context, positions = DocumentContext(torch.ones_like(ids)), torch.arange(ids.shape[1])[None]
                logits = (
                    target.model(input_ids=ids, position_ids=positions, use_cache=False, context=context)
                    .logits[0, -1]
                    .double()
                )
            allowed = following[text[-1]] if place % 2 else letters
            for token, share in zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True):
                grown[(*text, token)] = p * share
        probs = grown
    return probs


def _p_value(requests: Sequence[Request], exact: dict[tuple[int, ...], float], length: int) -> float:
    """Chi-square over the texts of `length` tokens; 0 where one came that cannot come."""
    texts = [tuple(request.new_tokens[:length]) for request in requests]
    if not set(texts) <= set(exact):
        return 0.0
    statistic = sum((texts.count(text) - len(texts) * p) ** 2 / (len(texts) * p) for text, p in exact.items())
    return float(
        torch.special.gammaincc(torch.tensor((len(exact) - 1) / 2).double(), torch.tensor(statistic / 2).double())
    )


PATHS = {
    "hit": (Mode.SSD, {"budget": 24}),
    "jit": (Mode.SSD, {"budget": 1}),
    "ngram": (Mode.SSD, {"budget": 1, "fallback": "ngram"}),
    "none": (Mode.SSD, {"budget": 1, "fallback": "none"}),
    "mixed": (Mode.SSD, {"budget": 6}),
    "sd": (Mode.SD, {}),
}
LENGTH, ANSWERS = 4, 300


@pytest.mark.parametrize(
    "path", ["mixed", *(pytest.param(name, marks=pytest.mark.long) for name in PATHS if name != "mixed")]
)
def test_constrained_answers_are_distributed_as_the_masked_target(pair: tuple[Target, Path], path: str) -> None:
    """36 texts of 4 tokens. With n = 300 at level 1e-5, w = 0.42 is found with probability 0.9."""
    mode, changes = PATHS[path]
    exact = _exact(pair[0], _ids(pair[0], "abc"), LENGTH)
    params = SamplingParams(max_new_tokens=8, temperature=1.0, grammar=regex_grammar(f"{PAIRS}{{4}}"))
    requests = _answers(pair, mode, [replace(params, seed=seed) for seed in range(ANSWERS)], batch_size=64, **changes)
    assert _p_value(requests, exact, LENGTH) > 1e-5
    assert path == "none" or any(r.accepted for request in requests for r in request.rounds)


def test_masks_of_the_committed_state_alone_are_found(
    pair: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose: p_j masked as p_0."""
    allowed = GrammarState.allowed
    monkeypatch.setattr(GrammarState, "allowed", lambda self, paths: allowed(self, [[]] * len(paths)))
    params = SamplingParams(max_new_tokens=8, temperature=1.0, grammar=regex_grammar(f"{PAIRS}{{4}}"))
    requests = _answers(pair, Mode.SD, [replace(params, seed=seed) for seed in range(50)], batch_size=64)
    assert _p_value(requests, _exact(pair[0], _ids(pair[0], "abc"), LENGTH), LENGTH) == 0.0


def test_the_drafter_is_masked_too(pair: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask a random drafter over 259 tokens hardly ever proposes one of three letters."""

    def figures() -> tuple[float, float]:
        params = SamplingParams(max_new_tokens=40, temperature=1.0, grammar=regex_grammar(f"{PAIRS}{{20}}"))
        rounds = [
            r for q in _answers(pair, Mode.SSD, [replace(params, seed=seed) for seed in range(8)]) for r in q.rounds
        ]
        hits = [r.source is Source.HIT for r in rounds if r.source is not Source.FIRST]
        return sum(r.accepted for r in rounds) / sum(r.offered for r in rounds), sum(hits) / len(hits)

    accepted, hits = figures()
    monkeypatch.setattr(infer.draft.sampler, "mask_logits", lambda logits, allowed: None)
    unmasked_accepted, unmasked_hits = figures()
    assert accepted > 0.25 > 5 * unmasked_accepted
    assert hits > 0.6 > 2 * unmasked_hits


def test_constrained_answers_survive_preemption(pair: tuple[Target, Path]) -> None:
    """A pool too small for all: who is sent away comes back with grammar and log-probabilities as they were, on both
    sides.
    """
    params = SamplingParams(max_new_tokens=40, grammar=regex_grammar(f"{PAIRS}{{15}}"), logprobs=1)
    asked = [replace(params, logit_bias=((letter, 1.0),)) for letter in _ids(pair[0], "abc")]
    alone = _answers(pair, Mode.AR, asked)
    settings = EngineSettings(
        target="",
        drafter=str(pair[1]),
        dtype="float32",
        target_devices=("cpu",),
        lookahead=3,
        budget=8,
        policy="uniform",
        batch_size=3,
        max_model_len=64,
        kv_tokens=80,
    )
    preempted = []
    with launch(settings, Mode.SSD, pair[0], in_process=True) as engine:
        preempt = engine.scheduler._preempt_last
        engine.scheduler._preempt_last = lambda: preempted.append(running := preempt()) or running  # type: ignore[method-assign]
        names = [engine.submit(PROMPT, params) for params in asked]
        ended = drain(engine)
    assert any(len(PROMPT) < running.num_computed for running in preempted), (
        "nobody was sent away in the middle of an answer"
    )
    for name, plain in zip(names, alone, strict=True):
        request = ended[name]
        assert request.new_tokens == plain.new_tokens == [own.token for own in request.logprobs]
        for own, other in zip(request.logprobs, plain.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len({tuple(request.new_tokens) for request in ended.values()}) == 3


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mode", Mode)
def test_a_json_schema_is_followed(pair: tuple[Target, Path], mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_new_tokens=90, temperature=1.0, seed=3, grammar=json_grammar(SCHEMA))
    for request in _answers(pair, mode, [replace(params, seed=seed) for seed in range(4)]):
        if request.finish_reason is FinishReason.STOP:
            value = json.loads(_text(pair[0], request))
            assert value.keys() == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 99
    assert caplog.messages == [], "a grammar that has ended takes no end token, and that is nothing to warn of"


def test_a_draft_process_reads_grammars_too(pair: tuple[Target, Path]) -> None:
    asked = [
        SamplingParams(max_new_tokens=30, grammar=regex_grammar(f"{PAIRS}{{9}}")),
        SamplingParams(max_new_tokens=20),
    ]
    inside, outside = (_answers(pair, Mode.SSD, asked, in_process=here) for here in (True, False))
    assert [request.new_tokens for request in outside] == [request.new_tokens for request in inside]
    assert any(r.source is Source.HIT for r in outside[0].rounds)


def test_lark_grammars() -> None:
    assert "start" in lark_grammar('start: "a" | "b" start')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regex_grammar("(a"), r"the regular expression \"\(a\" cannot be used"),
        (lambda: json_grammar("{no json"), "the JSON schema cannot be used"),
        (lambda: json_grammar({"type": "nothing"}), "the JSON schema .* cannot be used"),
        (lambda: choice_grammar([]), "give at least one"),
        (lambda: lark_grammar("begin: x"), "the grammar .* cannot be used"),
        (lambda: SamplingParams(grammar=regex_grammar("a"), ignore_eos=True), "ignore_eos"),
    ],
)
def test_what_cannot_be_used_is_named(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("tokenizer_json", [None, "{}"])
def test_a_tokenizer_that_grammars_cannot_read_is_a_users_error(tokenizer_json: str | None) -> None:
    with pytest.raises(UserError, match="cannot be (constrained|read)"):
        Grammars(lambda: Vocabulary(tokenizer_json, 259, (2,))).start(regex_grammar("a"))
