"""Did this target write that text? How many answer tokens are the ones it would have chosen itself.

Greedy answers of the target reach all but a few near-ties of rounding; answers sampled at temperature 0.8 usually 0.7
to 0.9. Text of another model, or of another thinking mode, stays well below, and a drafter that learns from it drafts
badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from data.chat.render import Example
from drafters.targets.target import Target, tap_features

FOREIGN = 0.6  # below that share the target has hardly written the text
POSITIONS = 512  # whose logits are made at once


class Agreement(NamedTuple):
    """Of `tokens` answer tokens, the target's likeliest one stands at the share `chosen`."""

    tokens: int
    chosen: float


@torch.inference_mode()
def agreement(target: Target, examples: Sequence[Example]) -> Agreement:
    """Teacher-forced: the target reads each example, and its argmax before every answer token is compared with that
    token.
    """
    total = right = 0
    for example in examples:
        ids_BT = torch.tensor([example.token_ids], device=target.device)
        positions_BT = torch.arange(ids_BT.shape[1], device=target.device)[None]
        hidden_TH = tap_features(target, ids_BT, positions_BT, torch.ones_like(ids_BT), (0,)).last_hidden_BTH[0]
        places = [i for i in range(1, len(example.token_ids)) if example.turn_ids[i]]
        for start in range(0, len(places), POSITIONS):
            part = torch.tensor(places[start : start + POSITIONS], device=target.device)
            argmax = target.head(hidden_TH[part - 1]).argmax(-1)
            right += int((argmax == ids_BT[0, part]).sum())
        total += len(places)
    return Agreement(total, right / total if total else 0.0)
