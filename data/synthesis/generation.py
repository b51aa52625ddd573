"""Batched decoding for corpora: a target's continuations of many prompts, by the serving engine in mode ar.

The engine brings continuous batching, chunked prefill, the prefix cache and GPUs. A continuation depends on its
prompt, temperature and seed, and not on what is decoded beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.engine.request import FinishReason, SamplingParams
from infer.launch import launch


class Continuation(NamedTuple):
    """One thing to generate: what follows `prompt_ids` at `temperature` (0 is greedy), with draws keyed by `seed`."""

    key: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    seed: int


class Generated(NamedTuple):
    """The new tokens of a continuation, with the end token if the model wrote one (`ended`)."""

    key: str
    token_ids: tuple[int, ...]
    ended: bool


class BatchGenerator:
    """Decodes up to `batch_size` continuations together, each of at most `max_tokens` with its prompt."""

    def __init__(self, target: Target, batch_size: int, max_tokens: int) -> None:
        self.max_tokens = min(max_tokens, target.facts.max_position_embeddings)
        self.batch_size = batch_size
        settings = EngineSettings(
            target=target.facts.name,
            dtype="float32" if target.embed_weight.dtype == torch.float32 else "bfloat16",  # float16 is as wide
            batch_size=batch_size,
            max_model_len=self.max_tokens,
            kv_tokens=batch_size * (self.max_tokens + 1),
            target_devices=(str(target.device),),
            target_threads=torch.get_num_threads(),
        )
        self.engine = launch(settings, Mode.AR, target)

    def run(self, wanted: Iterable[Continuation]) -> Iterator[Generated]:
        """Generate all that is `wanted`, each yielded when it ends.

        A deque is emptied as its entries are taken, and may be added to meanwhile: an entry is taken when there is
        room for it, so what is put in front comes next.
        """
        waiting = wanted if isinstance(wanted, deque) else deque(wanted)
        keys: dict[str, str] = {}  # by request
        try:
            while waiting or keys:
                while waiting and len(keys) < self.batch_size:
                    taken = waiting.popleft()
                    keys[self.engine.submit(taken.prompt_ids, _parameters(taken))] = taken.key
                for output in self.engine.step():
                    if output.finish_reason is not None:
                        ended = output.finish_reason is FinishReason.STOP
                        yield Generated(keys.pop(output.request_id), tuple(output.request.new_tokens), ended)
        finally:
            for request in keys:
                self.engine.cancel(request)
            while self.engine.has_work:
                self.engine.step()


def _parameters(wanted: Continuation) -> SamplingParams:
    return SamplingParams(wanted.max_new_tokens, wanted.temperature, seed=wanted.seed)
