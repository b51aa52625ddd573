"""Messages come out as they went in: every field, every bit of every tensor, and nothing of another version."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.base.errors import UserError
from infer.ipc.messages import (
    VERSION,
    Admit,
    FromDraft,
    Message,
    Outcome,
    Ready,
    ServedSpeculation,
    Source,
    ToDraft,
    pack,
    unpack,
)
from infer.kernels.sampling.params import Sampling

H = 6
ids = st.text(max_size=12)
tokens = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
counts = st.integers(0, 2**31)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=st.none() | st.integers(1, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, width: int = H) -> Tensor:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    shape = (draw(st.integers(0, 4)), width)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    return values.T.contiguous().T if draw(st.booleans()) else values  # not every feature lies behind the other


to_draft = st.builds(
    ToDraft,
    admits=st.lists(st.builds(Admit, ids, tokens, tensors(), counts, samplings, counts), max_size=3).map(tuple),
    outcomes=st.lists(st.builds(Outcome, ids, counts, counts, counts, tensors()), max_size=3).map(tuple),
    retires=st.lists(ids, max_size=3).map(tuple),
    ping=st.booleans(),
    stop=st.booleans(),
)
from_draft = st.builds(
    FromDraft,
    speculations=st.lists(
        st.builds(ServedSpeculation, ids, counts, st.sampled_from(Source), tokens, st.none() | tensors(11)), max_size=4
    ).map(tuple),
    busy_seconds=st.floats(0, 1e6),
    requests=counts,
    blocks=counts,
    pong=st.booleans(),
)
ready = st.builds(Ready, counts, counts, counts, st.integers(1, 64), counts)


def flat(message: object) -> object:
    """Comparable: tensors become their dtype, shape and bytes."""
    if isinstance(message, Tensor):
        return str(message.dtype), tuple(message.shape), message.contiguous().view(torch.uint8).tolist()
    if isinstance(message, (ToDraft, FromDraft, Ready, Admit, Outcome, ServedSpeculation)):
        return type(message).__name__, {name: flat(value) for name, value in vars(message).items()}
    if isinstance(message, tuple):
        return tuple(flat(part) for part in message)
    return type(message).__name__, message


@settings(max_examples=60, deadline=None)
@given(to_draft | from_draft | ready)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    buffer = pack(message)
    assert flat(unpack(buffer)) == flat(message) == flat(unpack(memoryview(buffer)))


def test_what_was_read_does_not_hang_on_the_buffer() -> None:
    buffer = bytearray(pack(ToDraft(outcomes=(Outcome("r", 1, 0, 7, torch.ones(1, H)),))))
    message = unpack(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert isinstance(message, ToDraft) and message.outcomes[0].features_SH.tolist() == [[1.0] * H]
    message.outcomes[0].features_SH.add_(1)  # and may be written to


def test_tensors_keep_their_order_and_special_values() -> None:
    odd = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    answers = (
        ServedSpeculation("a", 0, Source.HIT, (1,), odd),
        ServedSpeculation("b", 1, Source.NONE, ()),
        ServedSpeculation("c", 2, Source.JIT, (2,), odd[:0]),
    )
    message = FromDraft(answers, 0.1)
    assert flat(unpack(pack(message))) == flat(message)


def test_another_version_is_refused() -> None:
    buffer = struct.pack("<I", VERSION + 1) + pack(ToDraft(stop=True))[4:]
    with pytest.raises(UserError, match=f"message of version {VERSION + 1}, this process speaks {VERSION}"):
        unpack(buffer)
