"""One module from features to a loss: the unroll, the supervision rule and the losses, so that a wrapper (DDP) sees one forward.

Shapes: B rows, T positions, A anchors of a row, P positions with a teacher, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.config import LossSettings
from train.features import Features
from train.losses import Figures, Mix, Teacher, head_losses, supervised, teacher_probabilities
from train.unroll import Rows, unroll


class Anchors(NamedTuple):
    """Where the deep steps run: slots [B, A], and which of them are real (rows have unequal numbers)."""

    places: Tensor
    valid: Tensor


class Counts(NamedTuple):
    """Supervised predictions of each depth 0..depth: those there are, and those that are computed."""

    all: Tensor
    sampled: Tensor


def choose_anchors(features: Features, per_row: int | None, row_keys: Sequence[str]) -> Anchors:
    """All anchors with a supervised second step, or `per_row` of them drawn at random, in each row.

    The draw depends on the row's key only, not on the batch or process the row is in.
    """
    device = features.turn_ids.device
    every = torch.arange(features.turn_ids.shape[1], device=device).expand_as(features.turn_ids)
    possible = supervised(features.document_ids, features.turn_ids, every, depth=1).cpu()
    chosen = []
    for row, key in enumerate(row_keys):
        places = possible[row].nonzero()[:, 0]
        if per_row is not None and len(places) > per_row:
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
            picks = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:per_row]
            places = places[picks.sort().values]
        chosen.append(places)
    widest = max(1, max(len(places) for places in chosen))
    padded = torch.zeros(len(chosen), widest, dtype=torch.int64)
    valid = torch.zeros(len(chosen), widest, dtype=torch.bool)
    for row, places in enumerate(chosen):
        padded[row, : len(places)] = places
        valid[row, : len(places)] = True
    return Anchors(padded.to(device), valid.to(device))


def predictions(features: Features, anchors: Anchors, depth: int) -> Tensor:
    """bool: which predictions of step `depth` are supervised; [B, T] for step 0, which runs at every slot, else [B, A]."""
    if depth == 0:
        every = torch.arange(features.turn_ids.shape[1], device=features.turn_ids.device).expand_as(features.turn_ids)
        return supervised(features.document_ids, features.turn_ids, every, 0)
    return supervised(features.document_ids, features.turn_ids, anchors.places, depth) & anchors.valid


def count(features: Features, anchors: Anchors, depth: int) -> Counts:
    """How many predictions each depth supervises, fp64 [depth + 1] each."""
    every = torch.arange(features.turn_ids.shape[1], device=features.turn_ids.device).expand_as(features.turn_ids)
    there_are = [supervised(features.document_ids, features.turn_ids, every, d).sum() for d in range(depth + 1)]
    computed = [predictions(features, anchors, d).sum() for d in range(depth + 1)]
    return Counts(torch.stack(there_are).double(), torch.stack(computed).double())


class Scales(NamedTuple):
    """What multiplies the loss sums of depths 0..depth (`losses.loss_scales`)."""

    base: Sequence[float]
    bonus: Sequence[float]


class Objective(nn.Module):
    """The training loss of a batch. Holds the drafter, the target's head for the draft vocabulary [Vd, Ht], and that vocabulary."""

    def __init__(
        self, drafter: Eagle3Drafter, target_head_VH: Tensor, draft_to_target_V: Tensor, settings: LossSettings, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.drafter, self.settings, self.dtype = drafter, settings, dtype
        self.mix = Mix(settings.kl, settings.acceptance, settings.bonus_temperature, settings.serving.fan_out)
        self.register_buffer("target_head", target_head_VH, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target_V, persistent=False)
        self.target_head: Tensor
        self.draft_to_target: Tensor

    def forward(self, features: Features, anchors: Anchors, depth: int, scales: Scales) -> tuple[Tensor, Tensor]:
        """Loss = sum over depths of scale_d * loss sum_d; and detached sums [depth + 1, C] of the columns of `losses.Figures`."""
        needed = _needs_teacher(features)
        teacher = self.teacher(features, needed)
        teacher_row = needed.flatten().cumsum(0).view_as(needed) - 1
        device = features.token_ids.device
        total, sums = torch.zeros((), device=device), []
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            fused = self.drafter.fuse(features.taps.to(self.dtype))
            rows = Rows(features.token_ids, features.positions, features.document_ids)
            steps = unroll(self.drafter, rows, fused, anchors.places, depth, self.settings.window, self.settings.recompute)
            for d, hidden in enumerate(steps):
                mask = predictions(features, anchors, d)
                row, slot = mask.nonzero(as_tuple=True)
                place = (slot if d == 0 else anchors.places[row, slot]) + d + EMBED_AHEAD  # where the teacher predicts the same token
                base = torch.full((len(row),), scales.base[d], device=device)
                bonus = torch.full_like(base, self.settings.bonus * scales.bonus[d]) if self.settings.bonus else None
                normed = self.drafter.norm(hidden[row, slot])
                parts = head_losses(normed, self.drafter.lm_head.weight, teacher, teacher_row[row, place], base, bonus, self.mix)
                total = total + parts.loss
                sums.append(parts.figures_nC.sum(0))
        return total, torch.stack(sums)

    def teacher(self, features: Features, needed_BT: Tensor) -> Teacher:
        """The target's predictions at the positions that are needed."""
        probs = teacher_probabilities(features.last_hidden[needed_BT], self.target_head, features.log_normaliser[needed_BT])
        best = features.argmax[needed_BT]
        place = torch.searchsorted(self.draft_to_target, best).clamp(max=len(self.draft_to_target) - 1)
        return Teacher(probs, place, self.draft_to_target[place] == best)


def step_values(sums_DC: Tensor, computed_D: Sequence[float]) -> dict[str, list[float]]:
    """Averages by depth of what is logged, from sums and numbers of predictions over all processes."""
    number = torch.tensor(computed_D, dtype=torch.float64).clamp(min=1)
    each = Figures(*(sums_DC.double().cpu() / number[:, None]).T.tolist())
    rejected = [1 - rejection for rejection in each.rejection]
    return {"kl": each.kl, "acceptance": rejected, "accuracy": each.correct, "teacher_mass_missing": each.missing, "bonus": each.bonus}


def step_counts(sums_DC: Tensor, computed_D: Sequence[float]) -> list[list[float]]:
    """What a tally of visits takes from the same sums."""
    each = Figures(*sums_DC.double().cpu().T.tolist())
    return [list(row) for row in zip(computed_D, each.correct, each.listed, each.found, strict=True)]


def _needs_teacher(features: Features) -> Tensor:
    """bool [B, T]: positions whose next token is supervised."""
    needed = torch.zeros_like(features.turn_ids, dtype=torch.bool)
    needed[:, :-1] = features.turn_ids[:, 1:] > 0
    return needed
