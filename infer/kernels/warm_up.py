"""Compiling ahead: every CPU kernel that a decoder layer needs in serving."""

from __future__ import annotations

from torch import Tensor

from infer.kernels.attention import cpu as attention
from infer.kernels.decoder_layer import cpu as decoder_layer


def compile_now(like: Tensor) -> None:
    """Compile the kernels for the device and dtype of `like`, unless they are on disk.

    Takes seconds that must not fall into an answer: a draft process that compiled in its first round would be taken
    for dead.
    """
    decoder_layer.compile_now(like)
    attention.compile_now(like)
