"""Soak test of an engine with its draft process, on a tiny model: `python -m tests.cpu.infer.soak --requests 10000`.

Short requests come and go, many with prompts that share a prefix with earlier ones, some as long as the context. Some
are cancelled, and the draft process is killed, or stopped for a while or for good, again and again. Every token has to
be the target's own, no step may outlast the wait for a drafter, both sides' block counts have to be right, and memory
must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import infer.engine.draft_client
from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.draft_client import PATIENCE, DraftState
from infer.engine.engine import Engine
from infer.engine.request import FinishReason, Request, SamplingParams
from infer.kernels.attention.context import DocumentContext
from infer.launch import launch
from tests.trained import drain, random_prompts, trained_pair

LIMIT, BATCH = 96, 4
PROMPTS = 40
SURE = 1e-3  # least distance of the two best logits at every token that is compared: rounding does not decide
LONGEST_STEP = PATIENCE + 8.0  # seconds; the machine may be busy
FAULTS = ("kill", "stop briefly", "stop for good", "stop longer than a round waits")
ALONE = 30  # requests that end while there is no drafter, before the engine waits for it
STABLE = 2.0  # seconds: else the pauses before a start grow, and few faults find a drafter that serves
LEAK = 40 * 2**20  # bytes: less than ten thousand requests would leave behind if each kept its features


@dataclass
class Soak:
    """What was done, and what came of it."""

    finished: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    longest_step: float = 0.0
    memory: list[int] = field(default_factory=list)  # bytes, at each tenth of the way


def soak(
    engine: Engine, answers: dict[tuple[int, ...], list[int]], requests: int, seed: int, calm: tuple[int, int]
) -> Soak:
    """Serve so many requests on one engine; `answers` are the whole texts after each prompt. Raises where anything is
    wrong.

    Between two faults of the draft process, `calm` requests end, from and to. Without a drafter only so many go on:
    then the engine rests until it is back.
    """
    rng, result = random.Random(seed), Soak()
    prompts, expected, shown, ended = sorted(answers), {}, {}, 0
    next_fault, resume_at, stopped, alone, kinds = rng.randint(*calm), 0.0, 0, 0, itertools.cycle(FAULTS)
    while ended < requests or engine.has_work:
        while len(expected) < 3 * BATCH and ended + len(expected) < requests and alone < ALONE:
            prompt, most = rng.choice(prompts), rng.choice([1, 2, 8, 16, 99])
            text = [*prompt, *answers[prompt]]
            start = rng.choice(
                [len(prompt), rng.randint(len(prompt), len(text) - 1), rng.randint(len(text) - 6, len(text) - 1)]
            )
            name = engine.submit(text[:start], SamplingParams(max_new_tokens=most, ignore_eos=True))
            expected[name], shown[name] = text[start : start + most], []
        if expected and rng.random() < 0.02:
            engine.cancel(rng.choice(sorted(expected)))
        if not engine.has_work:
            engine.check_idle()
            time.sleep(0.05)
        before = time.monotonic()
        outputs = engine.step()
        result.longest_step = max(result.longest_step, time.monotonic() - before)
        for output in outputs:
            name = output.request_id
            shown[name] += output.new_token_ids
            assert shown[name] == expected[name][: len(shown[name])], (
                f"wrong tokens: {shown[name]} for {expected[name]}"
            )
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.CANCEL or shown[name] == expected[name]
                _count(result, output.request)
                del expected[name], shown[name]
                ended += 1
                if ended % max(1, requests // 10) == 0:
                    result.memory.append(_resident())
        finished = len([output for output in outputs if output.finish_reason])
        alone = alone + finished if engine.draft_state is not DraftState.SERVING else 0
        next_fault -= finished
        if stopped and time.monotonic() > resume_at:
            _signal(stopped, signal.SIGCONT)
            stopped = 0
        if next_fault <= 0 and engine.draft_state is DraftState.SERVING and not stopped:
            stopped, resume_at = _fault(engine, next(kinds), rng, result)
            next_fault = rng.randint(*calm)
    engine.check()
    if stopped:
        _signal(stopped, signal.SIGCONT)
    return result


def settle(engine: Engine, seconds: float = 120.0) -> None:
    """Let an idle engine find its drafter again, and see that both sides hold nothing."""
    deadline = time.monotonic() + seconds
    calm = 0
    while calm < 4:
        assert time.monotonic() < deadline, f"the drafter does not come back: {engine.draft_state}"
        engine.check_idle()
        calm = calm + 1 if engine.draft_state is DraftState.SERVING else 0
        time.sleep(0.25)


def known_answers(target: Target, settings: EngineSettings, seed: int) -> dict[tuple[int, ...], list[int]]:
    """Prompts of every kind with the target's own text up to the context limit, as far as no token of it is a close
    call.
    """
    vocab = target.facts.vocab_size
    trained = random_prompts(48, 4, vocab, seed=5)[: PROMPTS // 2]
    others = [random_prompts(1, n, vocab, seed=seed + n)[0] for n in range(1, PROMPTS // 2)]
    alone = settings.model_copy(update={"kv_tokens": None, "batch_size": 16, "prefix_cache": False})
    with launch(alone, Mode.AR, target) as engine:
        names = [
            engine.submit(prompt, SamplingParams(max_new_tokens=LIMIT, ignore_eos=True)) for prompt in trained + others
        ]
        requests = drain(engine)
    found = {requests[name].prompt_ids: requests[name].new_tokens for name in names}
    return {
        prompt: tokens for prompt, tokens in found.items() if _margin(target, [*prompt, *tokens], len(prompt)) > SURE
    }


def _margin(target: Target, tokens: list[int], start: int) -> float:
    """The smallest distance of the best two logits at the positions that decide tokens `start..`."""
    ids = torch.tensor([tokens])
    context = DocumentContext(torch.ones_like(ids))
    with torch.inference_mode():
        logits = target.model(
            input_ids=ids, position_ids=torch.arange(len(tokens))[None], use_cache=False, context=context
        ).logits[0]
    best = logits[start - 1 : -1].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def _fault(engine: Engine, kind: str, rng: random.Random, result: Soak) -> tuple[int, float]:
    """Kill the draft process, or stop it: its id and until when, where it shall go on again."""
    pid = engine.draft_pid
    assert pid is not None
    result.faults[kind] += 1
    if kind == "kill":
        _signal(pid, signal.SIGKILL)
        return 0, 0.0
    _signal(pid, signal.SIGSTOP)
    if kind == "stop for good":
        return 0, 0.0
    return pid, time.monotonic() + (
        rng.uniform(0.05, 0.5) if kind == "stop briefly" else PATIENCE + rng.uniform(0.5, 3.0)
    )


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended in between
        os.kill(pid, number)


def _count(result: Soak, request: Request) -> None:
    assert request.finish_reason is not None
    result.finished[request.finish_reason.value] += 1
    result.sources.update(record.source.value for record in request.rounds)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(requests: int, seed: int, directory: Path, calm: tuple[int, int] = (60, 180)) -> Soak:
    """The whole: models, known answers, the soak, and the books at the end. Raises where anything is wrong."""
    target, drafter = trained_pair(directory)
    settings = EngineSettings(
        target="",
        drafter=str(drafter),
        dtype="float32",
        lookahead=3,
        budget=16,
        batch_size=BATCH,
        max_model_len=LIMIT,
        kv_tokens=2 * LIMIT,
        prefill_tokens=24,
        target_devices=("cpu",),
        draft_devices=("cpu",),
    )
    infer.engine.draft_client.STABLE = STABLE
    answers = known_answers(target, settings, seed)
    assert len(answers) > PROMPTS / 2, f"only {len(answers)} texts without close calls"
    with launch(settings, Mode.SSD, target) as engine:
        result = soak(engine, answers, requests, seed, calm)
        settle(engine)
    assert result.longest_step < LONGEST_STEP, f"a step took {result.longest_step:.1f} s"
    assert result.memory[-1] - result.memory[len(result.memory) // 4] < LEAK, (
        f"memory grew: {[m >> 20 for m in result.memory]} MiB"
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = run(options.requests, options.seed, Path(directory))
    print(
        f"{options.requests} requests in {time.monotonic() - started:.0f} s, no wrong token: {dict(result.finished)}"
    )
    print(
        f"faults {dict(result.faults)}, speculations {dict(result.sources)}, longest step {result.longest_step:.2f} s"
    )
    print(f"memory at each tenth: {[size >> 20 for size in result.memory]} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
