"""The engine: the same tokens in every mode and setting, requests joining and leaving, a draft process that dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import infer.engine.draft_client
from drafters.base.errors import UserError
from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.request import FinishReason, Request, SamplingParams
from infer.ipc.messages import Source
from infer.launch import launch
from infer.text.detokenize import REPLACEMENT, decode
from tests.trained import drain, random_prompts, run

NEW = 32


@pytest.fixture(scope="module")
def prompts(pair: tuple[Target, Path]) -> list[list[int]]:
    """Some the drafter was trained on, some it never saw; lengths around the block size of 16."""
    vocab = pair[0].facts.vocab_size
    return random_prompts(6, 4, vocab, seed=5)[:3] + [random_prompts(1, n, vocab, seed=n)[0] for n in (15, 16, 17)]


@pytest.fixture(scope="module")
def expected(pair: tuple[Target, Path], prompts: list[list[int]]) -> list[list[int]]:
    return [r.new_tokens for r in run(_settings(pair), Mode.AR, pair[0], prompts, SamplingParams(max_new_tokens=NEW))]


def _settings(pair: tuple[Target, Path], **changes: Any) -> EngineSettings:
    base = {"lookahead": 3, "budget": 24, "max_model_len": 96, "target_devices": ("cpu",), "draft_devices": ("cpu",)}
    return EngineSettings(target="", drafter=str(pair[1]), dtype="float32", **{**base, **changes})


def _sources(requests: list[Request]) -> set[Source]:
    return {r.source for request in requests for r in request.rounds}


def test_ar_is_what_transformers_generates(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(pair[1].parent / "target", dtype=torch.float32)
    for prompt, tokens in zip(prompts, expected, strict=True):
        out = plain.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        assert out == tokens


@pytest.mark.parametrize("batch_size", [1, 4])
def test_sd_equals_ar(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], batch_size: int
) -> None:
    requests = run(
        _settings(pair, batch_size=batch_size), Mode.SD, pair[0], prompts, SamplingParams(max_new_tokens=NEW)
    )
    assert [r.new_tokens for r in requests] == expected
    assert any(r.accepted for request in requests for r in request.rounds), (
        "nothing was ever accepted: the test shows nothing"
    )


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"refresh": 3},
        {"policy": "uniform", "refresh": 1},
        {"fallback": "ngram"},
        {"fallback": "none", "policy": "uniform"},
        {"budget": 1},
        {"lookahead": 1, "budget": 3},
        {"lookahead": 4, "fallback_lookahead": 2},
        {"lookahead": 6, "budget": 60},
    ],
    ids=str,
)
def test_ssd_equals_ar(
    pair: tuple[Target, Path],
    prompts: list[list[int]],
    expected: list[list[int]],
    batch_size: int,
    changes: dict[str, Any],
) -> None:
    requests = run(
        _settings(pair, batch_size=batch_size, **changes),
        Mode.SSD,
        pair[0],
        prompts,
        SamplingParams(max_new_tokens=NEW),
    )
    assert [r.new_tokens for r in requests] == expected
    sources = _sources(requests)
    assert Source.HIT in sources and Source(changes.get("fallback", "jit")) in sources and Source.FIRST in sources


def test_a_hit_carries_more_than_a_miss_without_speculation(
    pair: tuple[Target, Path], prompts: list[list[int]]
) -> None:
    settings = _settings(pair, fallback="none")
    rounds = [
        r
        for request in run(settings, Mode.SSD, pair[0], prompts, SamplingParams(max_new_tokens=NEW))
        for r in request.rounds
    ]
    assert all((r.offered, r.emitted) == (0, 1) for r in rounds if r.source is Source.NONE)
    assert any(r.accepted > 0 for r in rounds if r.source is Source.HIT)
    assert all(r.emitted == r.accepted + 1 <= r.offered + 1 for r in rounds)


@pytest.mark.parametrize("most", range(1, 9))
def test_max_new_tokens_cuts_anywhere_in_an_accepted_speculation(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], most: int
) -> None:
    requests = run(_settings(pair), Mode.SSD, pair[0], prompts, SamplingParams(max_new_tokens=most))
    assert [r.new_tokens for r in requests] == [tokens[:most] for tokens in expected]
    assert all(r.finish_reason is (FinishReason.LENGTH) for r in requests if 2 not in r.new_tokens)


def test_a_stop_token_ends_the_answer_at_every_place_of_an_accepted_speculation(pair: tuple[Target, Path]) -> None:
    learnt = random_prompts(10, 4, pair[0].facts.vocab_size, seed=5)
    answers = run(_settings(pair, batch_size=16), Mode.AR, pair[0], learnt, SamplingParams(max_new_tokens=NEW))
    cuts = {}
    with launch(_settings(pair, batch_size=16), Mode.SSD, pair[0], in_process=True) as engine:
        for prompt, tokens in zip(learnt, [answer.new_tokens for answer in answers], strict=True):
            for stop in set(tokens[1:]):
                cuts[engine.submit(prompt, SamplingParams(NEW, stop_token_ids=(stop,)))] = tokens[
                    : tokens.index(stop) + 1
                ]
        ended = drain(engine)
    assert {name: request.new_tokens for name, request in ended.items()} == cuts
    assert {request.finish_reason for request in ended.values()} == {FinishReason.STOP}
    places = {
        len(r.new_tokens) - 1 - sum(record.emitted for record in r.rounds[:-1]) for r in ended.values() if r.rounds
    }
    assert places == {1, 2, 3, 4}, "the three drafted tokens, and the one after them"


@pytest.mark.parametrize("mode", [Mode.SD, Mode.SSD])
def test_stop_strings_cut_tokens_and_log_probabilities_wherever_they_were_accepted(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], mode: Mode
) -> None:
    """Strings of two characters, from every place of the answer where there is one: early, late, over two rounds."""
    tokenizer, tokens = pair[0].tokenizer, expected[0]
    texts = [decode(tokenizer, tokens[:n]) for n in range(len(tokens) + 1)]
    stops = {text for text in (texts[-1][i : i + 2] for i in range(len(texts[-1]) - 1)) if REPLACEMENT not in text}
    assert len(stops) > 5
    with launch(_settings(pair, batch_size=16), mode, pair[0], in_process=True) as engine:
        asked = {
            engine.submit(prompts[0], SamplingParams(NEW, stop=("never", stop), logprobs=0)): stop for stop in stops
        }
        ended = drain(engine)
    for name, stop in asked.items():
        cut = next(n for n, text in enumerate(texts) if stop in text)
        assert ended[name].new_tokens == tokens[:cut] == [own.token for own in ended[name].logprobs]
        assert ended[name].finish_reason is FinishReason.STOP
    assert any(r.accepted for request in ended.values() for r in request.rounds)


@pytest.mark.parametrize("length", range(8, 17))
def test_the_context_limit_ends_the_answer_exactly(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]], length: int
) -> None:
    settings = _settings(pair, max_model_len=max(16, length + 4), lookahead=6)
    limit = settings.max_model_len - len(prompts[0])
    request = run(settings, Mode.SSD, pair[0], prompts[:1], SamplingParams(max_new_tokens=NEW, ignore_eos=True))[0]
    assert request.new_tokens == expected[0][:limit] or 2 in expected[0]
    assert len(request.tokens) == settings.max_model_len


def test_a_seed_repeats_its_tokens_whatever_else_runs(pair: tuple[Target, Path], prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=7)
    alone = run(_settings(pair), Mode.SSD, pair[0], prompts[:1], params)[0].new_tokens
    together = run(_settings(pair, batch_size=4), Mode.SSD, pair[0], prompts, params)[0].new_tokens
    other = run(
        _settings(pair), Mode.SSD, pair[0], prompts[:1], SamplingParams(max_new_tokens=16, temperature=1.0, seed=8)
    )[0].new_tokens
    assert alone == together != other


def test_greedy_and_sampled_requests_share_a_batch(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with launch(_settings(pair, batch_size=4), Mode.SSD, pair[0], in_process=True) as engine:
        for i, prompt in enumerate(prompts[:4]):
            engine.submit(prompt, SamplingParams(max_new_tokens=NEW, temperature=float(i % 2), seed=i), str(i))
        ended = drain(engine)
    assert [ended[str(i)].new_tokens for i in (0, 2)] == [expected[0], expected[2]]


CHANGED_LOGITS = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((40, 6.0), (41, 6.0), (42, -100.0))},
]


@pytest.mark.parametrize("mode", [Mode.SD, Mode.SSD])
def test_greedy_over_changed_logits_is_the_same_in_every_mode(
    pair: tuple[Target, Path], prompts: list[list[int]], mode: Mode
) -> None:
    """All kinds and a plain request in one batch, against each alone in mode ar."""
    kinds = [SamplingParams(max_new_tokens=NEW, **changes) for changes in [*CHANGED_LOGITS, {}]]
    alone = [run(_settings(pair), Mode.AR, pair[0], prompts[:1], params)[0].new_tokens for params in kinds]
    assert len({tuple(tokens) for tokens in alone}) == len(kinds), "a parameter changed nothing"
    with launch(_settings(pair, batch_size=5), mode, pair[0], in_process=True) as engine:
        names = [engine.submit(prompts[0], params) for params in kinds]
        ended = drain(engine)
    assert [ended[name].new_tokens for name in names] == alone
    assert any(r.accepted for name in names[:-1] for r in ended[name].rounds), (
        "nothing was accepted under changed logits"
    )


@pytest.mark.parametrize("mode", [Mode.SD, Mode.SSD])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_heeds_what_is_done_to_the_logits(
    pair: tuple[Target, Path], prompts: list[list[int]], mode: Mode, temperature: float
) -> None:
    """A bias that leaves one token: who heeds it is always right, who does not hardly ever."""
    with launch(_settings(pair), mode, pair[0], in_process=True) as engine:
        assert engine.draft_client.draft_to_target_D is not None
        token = int(engine.draft_client.draft_to_target_D[70])
        name = engine.submit(prompts[0], SamplingParams(NEW, temperature, logit_bias=((token, 100.0),)))
        request = drain(engine)[name]
    assert request.new_tokens == [token] * NEW
    assert all(r.accepted == r.offered > 0 for r in request.rounds[:-1])
    assert mode is Mode.SD or _sources([request]) >= {Source.HIT}


def test_parameters_that_the_target_cannot_follow_are_refused_by_name(pair: tuple[Target, Path]) -> None:
    with launch(_settings(pair), Mode.AR, pair[0]) as engine, pytest.raises(UserError, match="logit_bias = 999"):
        engine.submit([5], SamplingParams(logit_bias=((999, 1.0),)))


def test_cancelled_requests_leave_nothing_behind(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with launch(_settings(pair, batch_size=2), Mode.SSD, pair[0], in_process=True) as engine:
        names = [engine.submit(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts[:4]]
        engine.step()
        engine.step()
        engine.cancel(names[0])  # running
        engine.cancel(names[3])  # waiting
        engine.cancel("never heard of")
        ended = drain(engine)
        assert engine.runner.blocks.num_free == engine.runner.blocks.num_blocks
    assert {name: ended[name].finish_reason for name in names} == {
        names[0]: FinishReason.CANCEL,
        names[1]: ended[names[1]].finish_reason,
        names[2]: ended[names[2]].finish_reason,
        names[3]: FinishReason.CANCEL,
    }
    assert [ended[names[i]].new_tokens for i in (1, 2)] == expected[1:3]
    assert ended[names[0]].new_tokens == expected[0][: len(ended[names[0]].new_tokens)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt is empty"), (list(range(3, 99)), "max_model_len is 96")],
    ids=["empty", "too long"],
)
def test_prompts_that_cannot_run_are_refused_by_name(
    pair: tuple[Target, Path], prompt: list[int], message: str
) -> None:
    with launch(_settings(pair), Mode.AR, pair[0]) as engine, pytest.raises(UserError, match=message):
        engine.submit(prompt, SamplingParams())


def test_a_request_larger_than_the_pool_is_refused(pair: tuple[Target, Path]) -> None:
    with (
        launch(_settings(pair, kv_tokens=32), Mode.AR, pair[0]) as engine,
        pytest.raises(UserError, match="raise kv_tokens"),
    ):
        engine.submit(list(range(3, 30)), SamplingParams(max_new_tokens=60))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_draft_process_that_is_killed_or_stopped_costs_speed_not_tokens(
    pair: tuple[Target, Path],
    prompts: list[list[int]],
    expected: list[list[int]],
    fault: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infer.engine.draft_client, "PATIENCE", 0.5)
    with launch(_settings(pair, batch_size=2), Mode.SSD, pair[0]) as engine:
        names = [engine.submit(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts]
        ended: dict[str, Request] = {}
        steps, struck = 0, None
        while engine.has_work:
            ended |= {o.request_id: o.request for o in engine.step() if o.finish_reason}
            steps += 1
            if steps == 6:
                assert engine.draft_alive and engine.draft_pid
                struck = engine.draft_pid
                os.kill(struck, fault)
        assert not engine.draft_alive or engine.draft_pid != struck
        engine.check()
    assert [ended[name].new_tokens for name in names] == expected
    sources = _sources([ended[name] for name in names])
    assert Source.HIT in sources or Source.JIT in sources
    assert Source.ALONE in sources


def test_two_processes_serve_what_one_does(pair: tuple[Target, Path], prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3)
    inside = [r.new_tokens for r in run(_settings(pair), Mode.SSD, pair[0], prompts, params)]
    with launch(_settings(pair), Mode.SSD, pair[0]) as engine:
        names = [engine.submit(prompt, params) for prompt in prompts]
        ended = drain(engine)
        process = engine.draft_pid
    assert [ended[name].new_tokens for name in names] == inside
    assert process is not None and not Path(f"/proc/{process}/stat").exists() or _is_zombie(process)


def _is_zombie(process: int | None) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


def test_requests_that_join_while_others_run_do_not_block_the_two_processes(
    pair: tuple[Target, Path], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The drafter sends its answer while the target sends a new request: neither may wait for the other to receive
    first.
    """
    with launch(_settings(pair, batch_size=2), Mode.SSD, pair[0]) as engine:
        ended: dict[str, Request] = {}
        names = []
        for prompt in prompts:
            names.append(engine.submit(prompt, SamplingParams(max_new_tokens=NEW)))
            engine.step()
            ended |= {o.request_id: o.request for o in engine.step() if o.finish_reason}
        ended |= drain(engine)
        assert engine.draft_alive
    assert [ended[name].new_tokens for name in names if name in ended] == [
        tokens for name, tokens in zip(names, expected, strict=True) if name in ended
    ]
