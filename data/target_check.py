"""Did this target write that text? Share of the answer tokens that are the target's likeliest next token.

Greedy answers of the target reach nearly 1 (near-ties of rounding aside), answers sampled at temperature 0.8 usually
0.7 to 0.9. Text of another model, or of another thinking mode, stays well below, and a drafter trained on it drafts
badly (data/README.md, section 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from data.chat.render import Example
from drafters.targets.taps import features_of_text
from drafters.targets.target import Target

FOREIGN = 0.6  # a share below this means that the target has hardly written the text
POSITIONS = 512  # logits are computed for this many at once


class Top1(NamedTuple):
    """`share` of `tokens` answer tokens are the target's likeliest next token."""

    tokens: int
    share: float


@torch.inference_mode()
def top1_share(target: Target, examples: Sequence[Example]) -> Top1:
    """Compare every answer token of `examples` with the target's argmax before it, teacher-forced."""
    total = right = 0
    for example in examples:
        ids_T = torch.tensor(example.token_ids, device=target.device)
        hidden_TH = features_of_text(target, example.token_ids, (0,)).last_hidden_BTH[0]
        places = [i for i in range(1, len(example.token_ids)) if example.turn_ids[i]]
        for start in range(0, len(places), POSITIONS):
            part = torch.tensor(places[start : start + POSITIONS], device=target.device)
            argmax = target.head(hidden_TH[part - 1]).argmax(-1)
            right += int((argmax == ids_T[part]).sum())
        total += len(places)
    return Top1(total, right / total if total else 0.0)
