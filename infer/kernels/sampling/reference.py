"""Sampling in plain Python and torch, from the definitions: the truth that the fast versions of the same names are
tested against.

K drafted tokens, L = K + 1 target distributions, R rows, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.sampling.adjust import Text
from infer.kernels.sampling.params import Sampling
from infer.kernels.sampling.verdict import Proposal, Verdict


def adjust_logits(logits_RV: Tensor, sampling: Sampling, text: Text, paths: Sequence[Sequence[int]]) -> Tensor:
    """See `adjust.adjust_logits`: token by token, over the target's vocabulary."""
    rows = []
    for logits_V, path in zip(logits_RV.tolist(), paths, strict=True):
        answer = [*text.answer, *path]
        for token, bias in sampling.logit_bias:
            logits_V[token] += bias
        for token in {*text.prompt, *answer}:
            value = logits_V[token]
            logits_V[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        for token in set(answer):
            logits_V[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
        rows.append(logits_V)
    return torch.tensor(rows, dtype=torch.float32)


def process_logits(logits_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """See `sample.process_logits`: softmax and a full sort of each row."""
    rows = []
    for logits_V, row in zip(logits_RV.float(), sampling, strict=True):
        probs_V = (logits_V / row.temperature).softmax(-1)
        probs_V = torch.where(probs_V >= row.min_p * probs_V.max(), probs_V, 0.0)
        values = probs_V.sort(descending=True).values.tolist()[: row.top_k]
        kept, mass = 0, 0.0
        while kept < len(values) and (row.top_p == 1.0 or mass < row.top_p * sum(values)):
            mass += values[kept]
            kept += 1
        probs_V = torch.where(probs_V >= values[kept - 1], probs_V, 0.0)
        rows.append(probs_V / probs_V.sum())
    return torch.stack(rows)


def top_f(scores_RD: Tensor, count: int) -> Tensor:
    """See `saguaro.top_f`: a stable descending sort of whole rows."""
    return scores_RD.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def accept(
    target_probs_LV: Tensor,
    drafted: Sequence[int],
    proposal: Proposal | None,
    accept_uniforms: Sequence[float],
    bonus_uniforms: Sequence[float],
) -> Verdict:
    """See `accept.accept`: on lists over the whole target vocabulary."""
    for k, token in enumerate(drafted):
        p = target_probs_LV[k].tolist()
        q = [0.0] * len(p)
        if proposal is None:
            q[token] = 1.0
        else:
            for target_id, probability in zip(
                proposal.draft_to_target_D.tolist(), proposal.probs_KD[k].tolist(), strict=True
            ):
                q[target_id] = probability
        if not accept_uniforms[k] * q[token] < p[token]:
            residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            return Verdict(k, _draw_plain(residual if sum(residual) > 0 else p, bonus_uniforms[k]))
    return Verdict(len(drafted), _draw_plain(target_probs_LV[len(drafted)].tolist(), bonus_uniforms[len(drafted)]))


def _draw_plain(weights: Sequence[float], uniform: float) -> int:
    target, total = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if weight > 0 and total > target:
            return token
    return max(i for i, weight in enumerate(weights) if weight > 0)
