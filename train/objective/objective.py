"""The training objective as one module, from features to a loss, so that a wrapper (DDP) sees one forward: anchors,
unroll or glue replay, supervision, head losses (train/README.md, sections 2 and 3).

Shapes: B rows, T positions, A anchors of a row, P positions with a teacher, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.targets.head import TargetHead
from train.config import LossSettings
from train.objective.accelerate import accelerate
from train.objective.supervision import supervised
from train.objective.unroll import Rows, deeper_steps, first_step, glue_replay, stale_features
from train.objective.visits import DepthVisits
from train.ops.head_loss.op import head_losses, teacher_probabilities
from train.ops.head_loss.terms import LossOptions, PredictionStats, Teacher
from train.ops.weight_gradients import gathered_over_calls
from train.target_features.features import Features


class Rounds(NamedTuple):
    """Which round of serving each anchor trains, int64 [B, A]: the newest true slot is anchor + shift, and the branch
    is at `fork`.
    """

    shifts: Tensor
    forks: Tensor
    lookahead: int
    refresh: int = 0


class Anchors(NamedTuple):
    """Where the deep steps run: slots [B, A], and which of them are real (rows have unequal numbers); rounds where
    they are replayed.
    """

    places: Tensor
    valid: Tensor
    rounds: Rounds | None = None


class Counts(NamedTuple):
    """Supervised predictions of each depth 0..depth: those there are, those that are computed, and those of them that
    are forks.
    """

    all: Tensor
    sampled: Tensor
    forks: Tensor


def choose_anchors(
    features: Features, per_row: int | None, row_keys: Sequence[str], serving: DepthVisits | None = None
) -> Anchors:
    """All anchors with a supervised second step, or `per_row` of them drawn at random, in each row.

    With `serving`, each anchor draws a round to replay, as often as serving visits it. The draws depend on the row's
    key only, not on the batch or process the row is in.
    """
    device = features.turn_ids.device
    possible = supervised(features.document_ids, features.turn_ids, _every_slot(features), depth=1).cpu()
    widest = max(1, min(int(possible.sum(1).max()), per_row or possible.shape[1]))
    places = torch.zeros(len(row_keys), widest, dtype=torch.int64)
    valid = torch.zeros(len(row_keys), widest, dtype=torch.bool)
    draws = torch.zeros(2, len(row_keys), widest, dtype=torch.float64)
    for row, key in enumerate(row_keys):
        chosen = possible[row].nonzero()[:, 0]
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        if per_row is not None and len(chosen) > per_row:
            chosen = chosen[torch.randperm(len(chosen), generator=generator)[:per_row].sort().values]
        places[row, : len(chosen)] = chosen
        valid[row, : len(chosen)] = True
        draws[:, row, : len(chosen)] = torch.rand(2, len(chosen), generator=generator, dtype=torch.float64)
    anchors = Anchors(places.to(device), valid.to(device))
    return (
        anchors
        if serving is None
        else anchors._replace(rounds=_rounds(features, anchors.places, draws.to(device), serving))
    )


def _rounds(features: Features, places_BA: Tensor, draws_2BA: Tensor, serving: DepthVisits) -> Rounds:
    """A shift by the shares of rounds, a fork by the outcomes at that shift. Shifts that would leave the turn become
    0.
    """
    shares = torch.tensor(serving.shifts, dtype=torch.float64, device=places_BA.device)
    shifts = (draws_2BA[0][..., None] >= shares.cumsum(0)[:-1]).sum(-1)
    stays = supervised(features.document_ids, features.turn_ids, places_BA, shifts + 1)
    shifts = torch.where(stays, shifts, 0)
    reach = torch.tensor(serving.reach, dtype=torch.float64, device=places_BA.device)  # [shift, K + 1], falling
    forks = (draws_2BA[1][..., None] < reach[shifts][..., 1:]).sum(-1)
    return Rounds(shifts, forks, reach.shape[1] - 1, serving.refresh)


class PlannedPredictions(NamedTuple):
    """What some of the drafter's outputs predict, [B, S] each: token anchor + 2 + ahead, `depth` steps from a true
    feature.
    """

    anchors: Tensor
    ahead: Tensor
    depth: Tensor
    forks: Tensor  # bool: the bonus loss is trained here
    supervised: Tensor  # bool


def planned_predictions(features: Features, anchors: Anchors, depth: int) -> list[PlannedPredictions]:
    """Of step 0 at every slot, then of steps 1..depth; or, where rounds are replayed, of their glue slots 1..K and
    branches' steps.

    A glue slot is a fork where the round reaches it, up to K - 1: beyond full acceptance nothing is rejected.
    """
    every = _every_slot(features)
    first = _planned(
        features,
        every,
        torch.zeros_like(every),
        torch.zeros_like(every),
        torch.ones_like(every, dtype=torch.bool),
        None,
    )
    places = anchors.places
    if anchors.rounds is None:
        steps = [torch.full_like(places, d) for d in range(1, depth + 1)]
        return [
            first,
            *(_planned(features, places, d, d, torch.ones_like(anchors.valid), anchors.valid) for d in steps),
        ]
    shifts, forks, lookahead, refresh = anchors.rounds
    step = torch.arange(1, lookahead + 1, device=places.device)
    anchor, valid, shift, fork = (
        x.repeat_interleave(lookahead, dim=1) for x in (places, anchors.valid, shifts, forks)
    )
    step = step.repeat(places.shape[1]).expand_as(anchor)
    glue_depth, fork_depth = (torch.where(k <= refresh, k, shift + k) for k in (step, fork))  # as `visits.fork_depth`
    glue = _planned(features, anchor, shift + step, glue_depth, (step <= fork) & (step < lookahead), valid)
    branch = _planned(features, anchor, shift + fork + step, fork_depth + step, torch.zeros_like(valid), valid)
    return [first, glue, branch]


def _planned(
    features: Features, anchors: Tensor, ahead: Tensor, depth: Tensor, forks: Tensor, valid: Tensor | None
) -> PlannedPredictions:
    mask = supervised(features.document_ids, features.turn_ids, anchors, ahead)
    return PlannedPredictions(anchors, ahead, depth, forks, mask if valid is None else mask & valid)


def predictions(features: Features, anchors: Anchors, depth: int) -> Tensor:
    """bool: which predictions of step `depth` are supervised; [B, T] for step 0, which runs at every slot, else [B,
    A].
    """
    if depth == 0:
        return supervised(features.document_ids, features.turn_ids, _every_slot(features), 0)
    return supervised(features.document_ids, features.turn_ids, anchors.places, depth) & anchors.valid


def count(features: Features, anchors: Anchors, depth: int) -> Counts:
    """How many predictions each depth supervises, fp64 [depth + 1] each."""
    there_are = [
        supervised(features.document_ids, features.turn_ids, _every_slot(features), d).sum() for d in range(depth + 1)
    ]
    parts = planned_predictions(features, anchors, depth)
    computed = torch.cat([part.depth[part.supervised] for part in parts])
    forks = torch.cat([part.depth[part.supervised & part.forks] for part in parts])
    return Counts(
        torch.stack(there_are).double(), *(torch.bincount(d, minlength=depth + 1).double() for d in (computed, forks))
    )


class Scales(NamedTuple):
    """What multiplies the loss sums of depths 0..depth (`supervision.loss_scales`)."""

    base: Sequence[float]
    bonus: Sequence[float]


class Objective(nn.Module):
    """The training loss of a batch. Holds the drafter, whose layers it accelerates in place, the draft vocabulary, and
    the target's head for it.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target_head: TargetHead,
        draft_to_target_V: Tensor,
        settings: LossSettings,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.drafter, self.settings, self.dtype = drafter, settings, dtype
        self.weights_are_whole = (
            False  # set where no wrapper takes them apart: then gradients of steps are gathered on CPUs
        )
        accelerate(drafter)
        self.options = LossOptions(
            settings.cross_entropy, settings.total_variation, settings.bonus_temperature, settings.fan_out
        )
        self.target_head = target_head
        self.register_buffer("draft_to_target", draft_to_target_V, persistent=False)
        self.draft_to_target: Tensor

    def forward(self, features: Features, anchors: Anchors, depth: int, scales: Scales) -> tuple[Tensor, Tensor]:
        """Loss = sum over depths of scale_d * loss sum_d; and detached sums [depth + 1, C] of the columns of
        `PredictionStats`.
        """
        needed = needs_teacher(features)
        teacher = self.teacher(features, needed)
        teacher_row = needed.flatten().cumsum(0).view_as(needed) - 1
        device = features.token_ids.device
        base_D, bonus_D = (torch.tensor(each, device=device) for each in scales)
        with self._gathering(device), torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden, depths, forks, rows = [], [], [], []
            for output, part in zip(
                self.outputs(features, anchors, depth), planned_predictions(features, anchors, depth), strict=True
            ):
                row, slot = part.supervised.nonzero(as_tuple=True)
                place = (
                    part.anchors[row, slot] + part.ahead[row, slot] + EMBED_AHEAD
                )  # where the teacher predicts the same token
                hidden.append(output[row, slot])
                depths.append(part.depth[row, slot])
                forks.append(part.forks[row, slot])
                rows.append(teacher_row[row, place])
            at, fork, row = torch.cat(depths), torch.cat(forks), torch.cat(rows)
            bonus = self.settings.bonus * bonus_D[at] * fork if self.settings.bonus else None
            normed = self.drafter.head_input(
                torch.cat(hidden)
            )  # one pass over the head: its gradient is held once, not for each depth
            losses = head_losses(normed, self.drafter.lm_head.weight, teacher, row, base_D[at], bonus, self.options)
        sums = torch.zeros(depth + 1, len(PredictionStats._fields), device=device)
        return losses.loss, sums.index_add(0, at, losses.stats_nC)

    def _gathering(self, device: torch.device) -> AbstractContextManager[None]:
        gathers = self.weights_are_whole and device.type == "cpu" and not self.settings.recompute
        return gathered_over_calls(self.drafter) if gathers else nullcontext()

    def outputs(self, features: Features, anchors: Anchors, depth: int) -> Iterator[Tensor]:
        """The drafter's pre-norm outputs [B, S, H], in the order of `planned_predictions`."""
        rows = Rows(features.token_ids, features.positions, features.document_ids)
        fused = self.drafter.fuse(features.taps.to(self.dtype))
        recompute = self.settings.recompute
        first = first_step(self.drafter, rows, fused, recompute)
        yield first.hidden
        if anchors.rounds is None:
            yield from deeper_steps(self.drafter, rows, first, anchors.places, depth, self.settings.window, recompute)
            return
        shifts, forks, lookahead, refresh = anchors.rounds
        stale = stale_features(self.drafter, rows, first, anchors.places, shifts, lookahead)
        replay = glue_replay(self.drafter, rows, first, anchors.places + shifts, stale, forks, refresh, recompute)
        yield replay.glue[:, :, 1:].flatten(1, 2)
        yield replay.branch.flatten(1, 2)

    def teacher(self, features: Features, needed_BT: Tensor) -> Teacher:
        """The target's predictions at the positions that are needed."""
        probs = teacher_probabilities(
            features.last_hidden[needed_BT], self.target_head, features.log_normaliser[needed_BT]
        )
        best = features.argmax[needed_BT]
        place = torch.searchsorted(self.draft_to_target, best).clamp(max=len(self.draft_to_target) - 1)
        return Teacher(probs, place, self.draft_to_target[place] == best)


def step_values(sums_DC: Tensor, computed_D: Sequence[float]) -> dict[str, list[float | None]]:
    """Averages by depth of what is logged, from sums and numbers of predictions over all processes; None where there
    was none.
    """
    columns = PredictionStats(*sums_DC.double().cpu().T.tolist())

    def average(sums_D: Sequence[float]) -> list[float | None]:
        return [value / number if number else None for value, number in zip(sums_D, computed_D, strict=True)]

    accepted = [number - rejected for number, rejected in zip(computed_D, columns.rejection, strict=True)]
    logged = {"cross_entropy": columns.cross_entropy, "acceptance": accepted, "accuracy": columns.correct}
    logged |= {"teacher_mass_missing": columns.missing, "bonus": columns.bonus}
    return {name: average(sums) for name, sums in logged.items()}


def step_counts(sums_DC: Tensor, computed_D: Sequence[float]) -> list[list[float]]:
    """What a tally of visits takes from the same sums."""
    each = PredictionStats(*sums_DC.double().cpu().T.tolist())
    return [list(row) for row in zip(computed_D, each.correct, each.listed, each.found, strict=True)]


def _every_slot(features: Features) -> Tensor:
    return torch.arange(features.turn_ids.shape[1], device=features.turn_ids.device).expand_as(features.turn_ids)


def needs_teacher(features: Features) -> Tensor:
    """bool [B, T]: positions whose next token is supervised."""
    needed = torch.zeros_like(features.turn_ids, dtype=torch.bool)
    needed[:, :-1] = features.turn_ids[:, 1:] > 0
    return needed
