"""Tap features of a target: hidden states at its tap layers, read by forward hooks.

Shapes: B packed rows, T positions, H target hidden size, C = number of taps * H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafters.targets.support import forward_in
from drafters.targets.target import Target
from infer.kernels.attention.context import DocumentContext


class TapOutput(NamedTuple):
    """Features of packed rows: the concatenated taps, and the last hidden state (after the final norm)."""

    taps_BTC: Tensor
    last_hidden_BTH: Tensor


@contextmanager
def taps_of(target: Target, tap_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Context in which every forward of the target stores the inputs of the layers `tap_ids` in the yielded mapping.

    `tap_ids` are indices into transformers' `hidden_states`: tap i is the INPUT of decoder layer i.
    """
    found: dict[int, Tensor] = {}

    def keep(tap: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [target.layers[tap].register_forward_pre_hook(keep(tap), with_kwargs=True) for tap in tap_ids]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()  # not inference_mode: training saves these tensors for its backward
def tap_features(
    target: Target, token_ids_BT: Tensor, positions_BT: Tensor, document_ids_BT: Tensor, tap_ids: Sequence[int]
) -> TapOutput:
    """One forward over packed rows; attention stays inside documents. No logits are computed."""
    context = DocumentContext(document_ids_BT)
    with taps_of(target, tap_ids) as found:
        hidden = forward_in(context, target.model, token_ids_BT, positions_BT, target.sharded)
    return TapOutput(torch.cat([found[tap] for tap in tap_ids], dim=-1), hidden)


@torch.inference_mode()
def features_of_text(target: Target, token_ids: Sequence[int], tap_ids: Sequence[int]) -> TapOutput:
    """Taps and last hidden states [1, T, ...] of one text, as the target reads it (teacher forcing)."""
    ids_1T = torch.tensor([token_ids], device=target.device)
    positions_1T = torch.arange(ids_1T.shape[1], device=target.device)[None]
    return tap_features(target, ids_1T, positions_1T, torch.ones_like(ids_1T), tap_ids)
