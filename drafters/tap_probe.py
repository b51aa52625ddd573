"""Probe of a drafter's tap layers: top-1 agreement with its target, at the declared taps and one layer beside them.

A wrong tap convention costs nearly all acceptance and raises no error; the probe shows it in a minute. The target
writes short greedy answers. The drafter, teacher-forced, predicts each of their tokens from true features (depth 0)
and from its own outputs (depth 1).

Shapes: S slots of one answer, H drafter hidden size, C three taps behind each other, N query heads, M key-value heads,
D head dimension.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.base.errors import UserError
from drafters.eagle3_ssd.align import EMBED_AHEAD, PREDICT_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.taps import features_of_text
from drafters.targets.target import Target
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import PagedContext, PagedRequest
from infer.kernels.sampling.sample import greedy_ids

DEPTHS = 2  # depth 0 and depth 1
NEAR_ZERO = 0.05
CLEARLY_BETTER = 0.05


class GreedyAnswer(NamedTuple):
    """A prompt and the target's greedy answer to it; the answer starts at `token_ids[answer_start]`."""

    token_ids: list[int]
    answer_start: int


class TapAgreement(NamedTuple):
    """Share of the target's tokens that the drafter ranks first, by depth, with taps moved by `shift` layers."""

    shift: int
    taps: tuple[int, ...]
    by_depth: tuple[float, ...]
    num_tokens: int


def probe_taps(
    drafter: Eagle3Drafter,
    vocab: VocabMap,
    target: Target,
    prompts: Sequence[Sequence[dict[str, str]]],
    new_tokens: int,
) -> list[TapAgreement]:
    """Agreement at the drafter's taps (first), one layer lower and one layer higher, over the chats `prompts`."""
    rendered = [_prompt_ids(target.tokenizer, messages) for messages in prompts]
    written = greedy_answers(target, rendered, new_tokens)
    declared = drafter.config.tap_hidden_states_ids
    shifts = [
        shift for shift in (0, -1, 1) if min(declared) + shift >= 0 and max(declared) + shift < len(target.layers)
    ]
    taps = sorted({tap + shift for tap in declared for shift in shifts})
    hits = {shift: torch.zeros(DEPTHS) for shift in shifts}
    counts = torch.zeros(DEPTHS)
    for answer in written:
        states = features_of_text(target, answer.token_ids, taps).taps_BTC
        by_tap = dict(zip(taps, states.chunk(len(taps), dim=-1), strict=True))
        counts += torch.tensor([float(_num_predictions(answer, depth)) for depth in range(DEPTHS)])
        for shift in shifts:
            features = torch.cat([by_tap[tap + shift] for tap in declared], dim=-1)
            hits[shift] += torch.tensor(correct_by_depth(drafter, vocab, features, answer))
    return [
        TapAgreement(
            shift,
            tuple(tap + shift for tap in declared),
            tuple((hits[shift] / counts.clamp_min(1)).tolist()),
            int(counts[0]),
        )
        for shift in shifts
    ]


def tap_warnings(found: Sequence[TapAgreement]) -> list[str]:
    """Warnings where shifted taps agree better than the declared ones, or where the drafter agrees with nothing."""
    declared, best = found[0], max(found, key=lambda agreement: agreement.by_depth[0])
    if best.by_depth[0] > declared.by_depth[0] + CLEARLY_BETTER:
        taps = " ".join(map(str, best.taps))
        return [
            f"taps {list(best.taps)} agree better than the declared {list(declared.taps)} ({best.by_depth[0]:.2f} "
            f"against {declared.by_depth[0]:.2f}): the file seems to count the other side of a layer; "
            f"import again with --taps {taps}"
        ]
    if best.by_depth[0] < NEAR_ZERO:
        return [
            f"the drafter agrees with the target on {best.by_depth[0]:.0%} of the tokens: another target, another "
            "tokenizer, a wrong embedding, or it was never trained"
        ]
    return []


def read_chats(paths: Sequence[Path], limit: int) -> list[list[dict[str, str]]]:
    """The first `limit` chats of JSONL files with `messages` or `prompt`, one from each file in turn."""
    files = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"no such file: {path}; give JSONL files with 'messages' or 'prompt' rows")
        lines = path.read_text(encoding="utf-8").splitlines()
        files.append([_chat(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()])
    mixed = (chat for chat in chain.from_iterable(zip_longest(*files)) if chat is not None)
    return list(islice(mixed, limit))


def _chat(line: str, where: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
        return row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{where} is no JSON object with 'messages' or 'prompt'") from error


@torch.inference_mode()
def greedy_answers(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyAnswer]:
    """Greedy decoding of all prompts together; an end-of-turn token is the last of its answer."""
    facts, slots = target.facts, max(map(len, prompts)) + new_tokens
    pool = KvPool.of_shape(facts.num_hidden_layers, len(prompts), slots, facts.kv, like=target.embed_weight)
    rows, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(new_tokens):
        fresh = [row[start:] for row, start in zip(rows, done, strict=True)]
        requests = [
            PagedRequest((i,), len(row), len(new)) for i, (row, new) in enumerate(zip(rows, fresh, strict=True))
        ]
        places = [place for row, start in zip(rows, done, strict=True) for place in range(start, len(row))]
        ids, positions = (
            torch.tensor([values], device=target.device) for values in (list(chain.from_iterable(fresh)), places)
        )
        context = PagedContext.build(pool, requests, target.device)
        output = target.model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, context=context)
        last = torch.tensor([len(new) for new in fresh]).cumsum(0) - 1
        chosen = greedy_ids(target.head(output.last_hidden_state[0, last.to(target.device)]))
        done = [len(row) for row in rows]
        for row, token in zip(rows, chosen, strict=True):
            row.append(int(token))
    return [_until_end(row, len(prompt), facts.end_token_ids) for row, prompt in zip(rows, prompts, strict=True)]


@torch.inference_mode()
def correct_by_depth(drafter: Eagle3Drafter, vocab: VocabMap, taps_1SC: Tensor, answer: GreedyAnswer) -> list[float]:
    """Number of the answer's tokens that the drafter's first choice equals, by depth: a plain unroll from all anchors.

    `taps_1SC` are the target's features of `answer`.
    """
    ids = torch.tensor([answer.token_ids], device=taps_1SC.device)
    hidden = drafter.fuse(taps_1SC.to(drafter.fc.weight.dtype))
    steps: list[dict[int, tuple[Tensor, Tensor]]] = []
    correct = []
    for depth in range(DEPTHS):
        anchors = ids.shape[1] - EMBED_AHEAD - depth  # those whose embedded token exists
        places = torch.arange(depth, depth + anchors, device=ids.device)[None]
        embeds = drafter.embed(ids[:, EMBED_AHEAD + depth :])
        hidden = drafter(embeds, hidden[:, :anchors], places, _attend_own(steps, anchors))
        first = max(0, answer.answer_start - PREDICT_AHEAD - depth)
        wanted = ids[0, first + PREDICT_AHEAD + depth :]
        guessed = vocab.to_target(drafter.logits(hidden[0, first : first + len(wanted)]).argmax(-1))
        correct.append(float((guessed == wanted).sum()))
    return correct


def _attend_own(steps: list[dict[int, tuple[Tensor, Tensor]]], anchors: int) -> Any:
    """Attention of the next step: anchor p sees the step-0 keys of slots <= p and its own key of every later step."""
    steps.append({})
    earlier_or_same = torch.ones(anchors, anchors, dtype=torch.bool).tril()
    visible = torch.cat([earlier_or_same] + [torch.eye(anchors, dtype=torch.bool)] * (len(steps) - 1), dim=1)

    def attend(layer: int, query_1SND: Tensor, key_1SMD: Tensor, value_1SMD: Tensor) -> Tensor:
        steps[-1][layer] = (key_1SMD, value_1SMD)
        keys, values = (
            torch.cat([step[layer][i][:, :anchors] for step in steps], dim=1).transpose(1, 2) for i in (0, 1)
        )
        mask = visible.to(query_1SND.device)
        return F.scaled_dot_product_attention(
            query_1SND.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)

    return attend


def _num_predictions(answer: GreedyAnswer, depth: int) -> int:
    """Number of the answer's tokens that a step of this depth predicts: after a short prompt not the first ones."""
    return len(answer.token_ids) - max(answer.answer_start, PREDICT_AHEAD + depth)


def _until_end(row: list[int], prompt_length: int, end_token_ids: Sequence[int]) -> GreedyAnswer:
    for place in range(prompt_length, len(row)):
        if row[place] in end_token_ids:
            return GreedyAnswer(row[: place + 1], prompt_length)
    return GreedyAnswer(row, prompt_length)


def _prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    else:
        text = messages[-1]["content"]
    return list(tokenizer(text, add_special_tokens=False).input_ids)
