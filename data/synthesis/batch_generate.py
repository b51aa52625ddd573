"""Plain batched decoding with a target, for writing corpora: many requests, slots that are refilled as answers end.

Not the serving engine (that is `infer`): no speculation, one fixed slot of the KV pool per running request.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.targets.target import Target
from infer.kernels.attention.paged import KvPool, PagedContext, PagedRequest

PREFILL_TOKENS = 2048  # prompts are taken in together up to this many tokens


@dataclass(frozen=True)
class Ask:
    """One thing to generate: continue `prompt_ids` at `temperature` (0 is greedy) with draws keyed by `seed`."""

    key: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """What came: the new tokens, the end token included where the model wrote one (`ended`)."""

    key: str
    token_ids: tuple[int, ...]
    ended: bool


@dataclass
class _Running:
    ask: Ask
    new: list[int] = field(default_factory=list)


class BatchGenerator:
    """Decode up to `batch_size` requests together; each owns one slot of `max_tokens` positions."""

    def __init__(self, target: Target, batch_size: int, max_tokens: int) -> None:
        facts = target.facts
        self.target, self.max_tokens = target, max_tokens
        self.pool = KvPool.of_shape(
            facts.num_hidden_layers, batch_size, max_tokens, facts.kv, like=target.embed_weight
        )
        self.slots: list[_Running | None] = [None] * batch_size

    @torch.inference_mode()
    def run(self, asks: Iterable[Ask]) -> Iterator[Answer]:
        """Answer all `asks`, each yielded when it ends. Every prompt plus its new tokens has to fit `max_tokens`.

        A deque is emptied as it is answered, and may be added to meanwhile.
        """
        waiting = asks if isinstance(asks, deque) else deque(asks)
        while waiting or any(self.slots):
            free = [i for i, running in enumerate(self.slots) if running is None]
            if waiting and (len(free) * 8 >= len(self.slots)):
                yield from self._admit(waiting, free)
            if any(self.slots):
                yield from self._decode()

    def _admit(self, waiting: deque[Ask], free: Sequence[int]) -> Iterator[Answer]:
        taken: list[int] = []
        budget = PREFILL_TOKENS
        for slot in free:
            if not waiting or (taken and len(waiting[0].prompt_ids) > budget):
                break
            ask = waiting.popleft()
            needed = len(ask.prompt_ids) + ask.max_new_tokens
            assert needed <= self.max_tokens, f"{ask.key} needs {needed} of {self.max_tokens} tokens"
            self.slots[slot] = _Running(ask)
            budget -= len(ask.prompt_ids)
            taken.append(slot)
        prompts = [self.slots[slot].ask.prompt_ids for slot in taken]  # type: ignore[union-attr]
        requests = [PagedRequest((slot,), len(p), len(p)) for slot, p in zip(taken, prompts, strict=True)]
        last = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
        positions = [i for p in prompts for i in range(len(p))]
        yield from self._advance(taken, self._logits([t for p in prompts for t in p], positions, requests, last))

    def _decode(self) -> Iterator[Answer]:
        tokens, positions, requests = [], [], []
        for slot, running in enumerate(self.slots):  # empty slots decode a dummy, so that the views stay evenly spaced
            length = 0 if running is None else len(running.ask.prompt_ids) + len(running.new) - 1
            tokens.append(0 if running is None else running.new[-1])
            positions.append(length)
            requests.append(PagedRequest((slot,), length + 1, 1))
        busy = [slot for slot, running in enumerate(self.slots) if running is not None]
        yield from self._advance(busy, self._logits(tokens, positions, requests, torch.tensor(busy)))

    def _logits(self, tokens: list[int], positions: list[int], requests: list[PagedRequest], rows: Tensor) -> Tensor:
        device = self.target.device
        context = PagedContext.build(self.pool, requests, device)
        ids, places = (torch.tensor([values], device=device) for values in (tokens, positions))
        output = self.target.model.get_decoder()(input_ids=ids, position_ids=places, use_cache=False, context=context)
        return self.target.head(output.last_hidden_state[0, rows.to(device)])

    def _advance(self, slots: Sequence[int], logits_BV: Tensor) -> Iterator[Answer]:
        running = [self.slots[slot] for slot in slots]
        for slot, r, token in zip(slots, running, choose(logits_BV, [r for r in running if r]), strict=True):
            assert r is not None
            r.new.append(token)
            ended = token in self.target.facts.end_token_ids
            if ended or len(r.new) == r.ask.max_new_tokens:
                self.slots[slot] = None
                yield Answer(r.ask.key, tuple(r.new), ended)


def choose(logits_BV: Tensor, running: Sequence[_Running]) -> list[int]:
    """The next token of each row: argmax at temperature 0, else by inverse CDF with a draw keyed by (seed, position)."""
    logits_BV = logits_BV.float()  # reductions over bf16 rows are ten times slower on CPU
    tokens = logits_BV.argmax(-1)
    sampled = [i for i, r in enumerate(running) if r.ask.temperature > 0]
    if sampled:
        heat = torch.tensor([running[i].ask.temperature for i in sampled], device=logits_BV.device)
        cdf_BV = torch.softmax(logits_BV[sampled] / heat[:, None], -1).cumsum(-1)
        draws = torch.tensor(
            [_uniform(running[i].ask.seed, len(running[i].new)) for i in sampled], device=logits_BV.device
        )
        chosen = torch.searchsorted(cdf_BV, (draws * cdf_BV[:, -1])[:, None], right=True)[:, 0]
        tokens[sampled] = chosen.clamp_max(logits_BV.shape[1] - 1)
    return tokens.tolist()


def _uniform(seed: int, position: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
