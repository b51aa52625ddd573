"""Lossless verification: which drafted tokens the target keeps, and the bonus token it adds (infer/README.md, section
2; Leviathan et al. 2023, Chen et al. 2023).

K drafted tokens, L = K + 1 target distributions, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.sampling.sample import sample_from
from infer.kernels.sampling.verdict import Proposal, Verdict


def accept_greedy(argmax_L: Sequence[int], drafted: Sequence[int]) -> Verdict:
    """Temperature 0: accept while the drafted token is the target's argmax; `argmax_L[j]` follows `drafted[:j]`."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == argmax_L[accepted]:
        accepted += 1
    return Verdict(accepted, argmax_L[accepted])


def accept(
    target_probs_LV: Tensor,
    drafted: Sequence[int],
    proposal: Proposal | None,
    accept_uniforms: Sequence[float],
    bonus_uniforms: Sequence[float],
) -> Verdict:
    """Judge K drafted tokens so that what is committed is distributed as the target's own samples.

    `target_probs_LV[j]` fp32 is the target's processed distribution after `drafted[:j]`. `proposal` None: the tokens
    were not drawn but chosen (point masses). Token j is accepted iff `accept_uniforms[j] * q'(token) < p_j(token)`,
    strictly, so that p = 0 is never accepted. At the first rejection, k, the bonus token is drawn with
    `bonus_uniforms[k]` from norm(max(p_k - q'_k, 0)), or from p_k where rounding left no residual; after no rejection
    from p_K with `bonus_uniforms[K]`.
    """
    num_drafted = len(drafted)
    assert target_probs_LV.shape[0] == num_drafted + 1, (target_probs_LV.shape, num_drafted)
    assert proposal is None or len(proposal.probs_KD) == num_drafted, (
        proposal and proposal.probs_KD.shape,
        num_drafted,
    )
    accepted = _num_accepted(target_probs_LV, drafted, proposal, accept_uniforms) if drafted else 0
    weights_V = target_probs_LV[accepted]
    if accepted < num_drafted:
        residual_V = _residual(weights_V, drafted[accepted], proposal, accepted)
        if float(residual_V.sum()) > 0:
            weights_V = residual_V
    uniform_1 = torch.tensor([bonus_uniforms[accepted]], dtype=torch.float64, device=weights_V.device)
    return Verdict(accepted, int(sample_from(weights_V[None], uniform_1)))


def _num_accepted(
    target_probs_LV: Tensor, drafted: Sequence[int], proposal: Proposal | None, uniforms: Sequence[float]
) -> int:
    tokens_K = torch.tensor(drafted, dtype=torch.int64, device=target_probs_LV.device)
    p_K = target_probs_LV[:-1].gather(-1, tokens_K[:, None]).squeeze(-1).tolist()
    q_K = [1.0] * len(drafted)
    if proposal is not None:
        draft_ids_K = torch.searchsorted(proposal.draft_to_target_D, tokens_K)
        q_K = proposal.probs_KD.gather(-1, draft_ids_K[:, None]).squeeze(-1).tolist()
    for k, (u, q, p) in enumerate(zip(uniforms, q_K, p_K, strict=False)):
        if not u * q < p:
            return k
    return len(drafted)


def _residual(target_probs_V: Tensor, rejected: int, proposal: Proposal | None, k: int) -> Tensor:
    """max(p - q', 0), not normalised; of a point mass: p without the rejected token."""
    residual_V = target_probs_V.clone()
    if proposal is None:
        residual_V[rejected] = 0.0
        return residual_V
    kept_D = residual_V[proposal.draft_to_target_D] - proposal.probs_KD[k]
    residual_V[proposal.draft_to_target_D] = kept_D.clamp_(min=0.0)
    return residual_V
