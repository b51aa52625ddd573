"""`transformers`' own `generate` on the same weights, with the engine's interface, for `infer.evaluate --baseline`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from drafters.targets.files import resolve_target
from drafters.targets.target import DTYPES
from infer.config import EngineSettings
from infer.engine.request import Request, RequestOutput, SamplingParams


class _FirstToken:
    """A streamer that takes the time of the first new token, where prefill ends."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, _: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing to close."""


class TransformersEngine:
    """Answers one whole request in each `step`, with the model and the cache as transformers makes them."""

    draft_failures = 0

    def __init__(self, settings: EngineSettings, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        path = resolve_target(settings.target)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[settings.dtype])
        self.model.eval().to(device)
        self._waiting: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self._names = itertools.count()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> str:
        """See `Engine.submit`."""
        name = f"request-{next(self._names)}"
        self._waiting[name] = (tuple(prompt_ids), params)
        return name

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        self._waiting.pop(request_id, None)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Answer the oldest request from its first token to its last."""
        if not self._waiting:
            return []
        name = next(iter(self._waiting))
        prompt, params = self._waiting.pop(name)
        limit = min(len(prompt) + params.max_new_tokens, self.settings.max_model_len)
        sampling: dict[str, Any] = {"do_sample": False}
        own = params.seeded().sampling
        if not own.greedy:
            torch.manual_seed(own.seed)
            sampling = {"do_sample": True, "temperature": own.temperature, "top_k": own.top_k or 0, "top_p": own.top_p}
        ids, first = torch.tensor([prompt], device=self.model.device), _FirstToken()
        started = time.perf_counter()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit - len(prompt),
            streamer=first,
            **sampling,
        )
        ended = time.perf_counter()
        config = self.model.generation_config.eos_token_id
        stops = frozenset(config if isinstance(config, list) else [config]) - {None}
        request = Request(name, prompt, params, stops, limit, list(prompt))
        kept = request.commit(output[0, len(prompt) :].tolist())
        request.prefill_seconds, request.decode_seconds = first.at - started, ended - first.at
        return [RequestOutput(name, tuple(kept), request.finish_reason, request)]

    def close(self) -> None:
        """Nothing runs."""

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
