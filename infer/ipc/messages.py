"""The messages between target and draft process: frozen records, packed and unpacked here and nowhere else
(infer/README.md, section 1).

First the drafter says what it can hold (`Ready`). Then once a round, target to drafter: which requests came, what
their verifications gave, which are gone (`ToDraft`). Back: one speculation for each (`FromDraft`). Ids and facts
cross, never block tables. A packed message is a JSON header, its length before it, and the raw tensors behind it.
H drafter hidden size, S slots, K tokens of a speculation, D draft vocabulary.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.base.errors import UserError
from infer.kernels.sampling.params import Sampling

VERSION = 2
_HEAD = struct.Struct("<II")


class Source(StrEnum):
    """Where the speculation of a round came from. FIRST is a request's first one: there was nothing to look up.

    ALONE: no drafter had the request (mode ar; a drafter that is dead, silent or full).
    """

    HIT = "hit"
    JIT = "jit"
    NGRAM = "ngram"
    NONE = "none"
    FIRST = "first"
    SYNC = "sync"  # mode sd
    ALONE = "alone"


@dataclass(frozen=True)
class Ready:
    """Draft process to target, once, when it can be spoken to: how much it takes in."""

    pid: int
    requests: int  # at once
    tokens: int  # of all requests together, where one counts `request_tokens(its max_tokens)`
    block_size: int
    scratch_tokens: int  # that a request needs beside its own

    def request_tokens(self, max_tokens: int) -> int:
        """What a request takes of `tokens`: whole blocks for its longest text and the scratch behind it."""
        return -(-(max_tokens + self.scratch_tokens) // self.block_size) * self.block_size


@dataclass(frozen=True)
class Admit:
    """A request joins: its tokens, the newest one just sampled, and the fused features of all positions before it."""

    request: str
    tokens: tuple[int, ...]
    features_SH: Tensor  # S = len(tokens) - 1
    max_tokens: int
    sampling: Sampling
    prompt_tokens: int = 0  # how many of the tokens are the prompt's; the rest is answer


@dataclass(frozen=True)
class Outcome:
    """What a verification gave: `accepted` tokens of the speculation, then the token `bonus`; and the features of the
    positions before it.

    `round` is the number of committed tokens that the verification started from, in `ServedSpeculation` too.
    """

    request: str
    round: int
    accepted: int
    bonus: int
    features_SH: Tensor  # S = accepted + 1: the newest token of the round before, and the accepted ones


@dataclass(frozen=True)
class ToDraft:
    """Target to draft process. What admits, reports or has `ping` set is answered. `stop` ends the process."""

    admits: tuple[Admit, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    retires: tuple[str, ...] = ()
    ping: bool = False
    stop: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether a `FromDraft` comes back."""
        return bool(self.admits or self.outcomes or self.ping)


@dataclass(frozen=True)
class ServedSpeculation:
    """The speculation for verification `round` of a request, and where it came from.

    `probs_KD` are the distributions the tokens were drawn from, fp32 and bit for bit; None where the tokens were
    chosen.
    """

    request: str
    round: int
    source: Source
    tokens: tuple[int, ...]
    probs_KD: Tensor | None = None


@dataclass(frozen=True)
class FromDraft:
    """Draft process to target: a speculation for each admit and outcome of a `ToDraft`; how long the drafter worked
    since the last.

    `requests` and `blocks` are what the drafter holds now, for the target to compare with its own books; `pong`
    answers a ping.
    """

    speculations: tuple[ServedSpeculation, ...]
    busy_seconds: float
    requests: int = 0
    blocks: int = 0
    pong: bool = False


Message = ToDraft | FromDraft | Ready


def pack(message: Message) -> bytes:
    """One contiguous buffer, read back by `unpack`."""
    tensors: list[Tensor] = []
    match message:
        case ToDraft():
            kind, body = "to", _to_draft(message, tensors)
        case FromDraft():
            kind, body = "from", _from_draft(message, tensors)
        case Ready():
            kind, body = "ready", asdict(message)
    layout = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = json.dumps({"kind": kind, "body": body, "tensors": layout}, separators=(",", ":")).encode()
    raw = [t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    return b"".join([_HEAD.pack(VERSION, len(header)), header, *raw])


def unpack(buffer: bytes | memoryview) -> Message:
    """The message in `buffer`. Another version is refused: both processes have to run the same code."""
    version, length = _HEAD.unpack_from(buffer)
    if version != VERSION:
        raise UserError(
            f"message of version {version}, this process speaks {VERSION}: "
            "start target and drafter from one installation"
        )
    header = json.loads(bytes(buffer[_HEAD.size : _HEAD.size + length]))
    tensors, offset = [], _HEAD.size + length
    for name, shape in header["tensors"]:
        dtype: torch.dtype = getattr(torch, name)
        size = int(np.prod(shape)) * dtype.itemsize
        flat = (
            torch.frombuffer(bytearray(buffer[offset : offset + size]), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors.append(flat.view(dtype).view(shape))
        offset += size
    kind, body = header["kind"], header["body"]
    if kind == "ready":
        return Ready(**body)
    return _read_to_draft(body, tensors) if kind == "to" else _read_from_draft(body, tensors)


def _to_draft(message: ToDraft, tensors: list[Tensor]) -> dict[str, Any]:
    tensors += [admit.features_SH for admit in message.admits] + [outcome.features_SH for outcome in message.outcomes]
    admits = [[a.request, a.tokens, a.max_tokens, asdict(a.sampling), a.prompt_tokens] for a in message.admits]
    outcomes = [[o.request, o.round, o.accepted, o.bonus] for o in message.outcomes]
    return {
        "admits": admits,
        "outcomes": outcomes,
        "retires": message.retires,
        "ping": message.ping,
        "stop": message.stop,
    }


def _read_to_draft(body: dict[str, Any], tensors: Sequence[Tensor]) -> ToDraft:
    admits = [
        Admit(request, tuple(tokens), tensors[i], max_tokens, _read_sampling(**sampling), prompt_tokens)
        for i, (request, tokens, max_tokens, sampling, prompt_tokens) in enumerate(body["admits"])
    ]
    outcomes = [
        Outcome(request, round_, accepted, bonus, tensors[i])
        for i, (request, round_, accepted, bonus) in enumerate(body["outcomes"], start=len(admits))
    ]
    return ToDraft(tuple(admits), tuple(outcomes), tuple(body["retires"]), body["ping"], body["stop"])


def _read_sampling(logit_bias: Sequence[Sequence[Any]], **fields: Any) -> Sampling:
    """JSON has no tuples."""
    return Sampling(**fields, logit_bias=tuple((token, bias) for token, bias in logit_bias))


def _from_draft(message: FromDraft, tensors: list[Tensor]) -> dict[str, Any]:
    tensors += [s.probs_KD for s in message.speculations if s.probs_KD is not None]
    served = [[s.request, s.round, s.source, s.tokens, s.probs_KD is not None] for s in message.speculations]
    return {"answers": served, "rest": [message.busy_seconds, message.requests, message.blocks, message.pong]}


def _read_from_draft(body: dict[str, Any], tensors: Sequence[Tensor]) -> FromDraft:
    rest = iter(tensors)
    served = [
        ServedSpeculation(request, round_, Source(source), tuple(tokens), next(rest) if drawn else None)
        for request, round_, source, tokens, drawn in body["answers"]
    ]
    return FromDraft(tuple(served), *body["rest"])
