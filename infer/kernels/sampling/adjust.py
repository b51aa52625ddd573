"""What a request does to its logits before anything is drawn, greedy or not: logit bias, penalties on tokens it has
seen, a grammar's mask.

R rows of one request, V vocabulary of the logits, U tokens that a penalty touches. Row r follows the committed text
and `paths[r]`: in a verification `paths[j]` are the first j drafted tokens, so that p_j is the distribution after them
(infer/README.md, section 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.kernels.sampling.params import Sampling


class Text(NamedTuple):
    """The committed tokens, as the penalties see them: the repetition penalty counts the prompt in, the other two do
    not.
    """

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()


def adjust_logits(
    logits_RV: Tensor,
    sampling: Sampling,
    text: Text,
    paths: Sequence[Sequence[int]],
    target_to_draft_V: Tensor | None = None,
) -> Tensor:
    """Logits with bias and penalties, fp32 [R, V], in a tensor of their own.

    Bias is added first. Then, as in CTRL (arXiv 1909.05858), a positive logit of a token in prompt, answer or path is
    divided by the repetition penalty and a negative one multiplied; then logits of tokens in answer or path lose the
    presence penalty, and the frequency penalty for each time they stand there. Tokens are target ids;
    `target_to_draft_V` gives their place in the logits of a drafter, below 0 for none.
    """
    assert len(paths) == len(logits_RV), (len(paths), logits_RV.shape)
    result_RV = logits_RV.float() if logits_RV.dtype is not torch.float32 else logits_RV.clone()
    if sampling.logit_bias:
        tokens, values = zip(*sampling.logit_bias, strict=True)
        columns, kept = _columns(tokens, target_to_draft_V, result_RV.device)
        result_RV[:, columns] += torch.tensor(values, dtype=torch.float32, device=result_RV.device)[kept]
    if sampling.penalised:
        _penalise(result_RV, sampling, text, paths, target_to_draft_V)
    return result_RV


def mask_logits(logits_RV: Tensor, allowed_RV: Tensor) -> None:
    """Take out, in place, what a grammar refuses. A row of which nothing would be left stays as it is: a drafter,
    whose vocabulary is smaller than the target's, has nothing to propose there.
    """
    some_R1 = allowed_RV.any(-1, keepdim=True)
    logits_RV.masked_fill_(~allowed_RV & some_R1, -torch.inf)


def _penalise(
    logits_RV: Tensor, sampling: Sampling, text: Text, paths: Sequence[Sequence[int]], target_to_draft_V: Tensor | None
) -> None:
    """Gather the touched columns, change them, put them back."""
    prompt = frozenset(text.prompt) if sampling.repetition_penalty != 1.0 else frozenset()
    answer = Counter(text.answer)
    tokens = list(prompt.union(answer, *paths))
    place = {token: u for u, token in enumerate(tokens)}
    counts_RU = torch.tensor([answer[token] for token in tokens], dtype=torch.float32).repeat(len(paths), 1)
    for row, path in enumerate(paths):
        for token in path:
            counts_RU[row, place[token]] += 1
    columns, kept = _columns(tokens, target_to_draft_V, logits_RV.device)
    counts_RU = counts_RU.to(logits_RV.device)[:, kept]
    in_prompt_U = torch.tensor([token in prompt for token in tokens], dtype=torch.bool, device=logits_RV.device)[kept]
    touched_RU = logits_RV[:, columns]
    in_answer_RU = counts_RU > 0
    repetition = sampling.repetition_penalty
    repeated_RU = torch.where(touched_RU > 0, touched_RU / repetition, touched_RU * repetition)
    touched_RU = torch.where(in_answer_RU | in_prompt_U, repeated_RU, touched_RU)
    logits_RV[:, columns] = (
        touched_RU - sampling.presence_penalty * in_answer_RU - sampling.frequency_penalty * counts_RU
    )


def _columns(tokens: Sequence[int], target_to_draft_V: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where `tokens` stand in the logits, and a mask of those that do."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    if target_to_draft_V is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    ids = target_to_draft_V[ids]
    return ids[ids >= 0], ids >= 0
