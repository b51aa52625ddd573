"""Memory of a rank at its peak and bytes that a step moves, computed from shapes. Torch-free.

The peak is the end of a forward pass: masters, gradients of earlier forwards, Adam's moments, and everything kept for
the backward pass. Letters as in `plan`. Activations are bf16 under autocast, softmax is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from drafters.base.errors import UserError
from drafters.base.settings import read_yaml
from drafters.eagle3_ssd.config import DrafterConfig
from train.costs.plan import Forward, parameters

LOGITS = 256e6  # of the head's losses at a time, at most, on a GPU (`train.ops.head_loss.triton`)
LOSS_ROWS = 1024  # on a CPU (`train.ops.head_loss.cpu`)
HOST = 700e6  # Python, torch, transformers, numba and what it compiled, in the memory of a CPU process
CONTEXT = 600e6  # CUDA's context and libraries on a GPU
SLACK = 1.2  # what an allocator takes for what comes and goes


class Sharding(StrEnum):
    """What ranks share instead of each holding it: Adam's moments, + gradients, + weights."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP2 = "fsdp2"


def launch_sharding(launch: str | None) -> tuple[int, Sharding]:
    """Processes and sharding of an accelerate config; one process without one."""
    if launch is None:
        return 1, Sharding.NONE
    content = read_yaml(launch)
    kind, number = content.get("distributed_type", "NO"), content.get("num_processes", 1)
    stage = (content.get("deepspeed_config") or {}).get("zero_stage", 0)
    by_kind = {"NO": Sharding.NONE, "MULTI_CPU": Sharding.NONE, "MULTI_GPU": Sharding.NONE, "FSDP": Sharding.FSDP2}
    by_stage = {0: Sharding.NONE, 1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}
    found = by_stage.get(stage) if kind == "DEEPSPEED" else by_kind.get(kind)
    if found is None or not isinstance(number, int):
        raise UserError(
            f"{launch}: distributed_type {kind!r}, zero_stage {stage!r}, num_processes {number!r} "
            "cannot be planned for"
        )
    return number, found


class Part(NamedTuple):
    """A part of a rank's memory, in bytes; `shifts` when it comes and goes within a step."""

    name: str
    size: float
    shifts: bool = False


class Place(NamedTuple):
    """Where a rank lives: `target` is the bytes of the target's weights in it."""

    ranks: int
    sharding: Sharding
    on_gpu: bool
    target: float


def peak(parts: Sequence[Part]) -> float:
    """Bytes at the peak, the allocator's slack included."""
    return sum(part.size * (SLACK if part.shifts else 1.0) for part in parts)


def memory(config: DrafterConfig, forward: Forward, place: Place, recompute: bool) -> list[Part]:
    """What a rank holds at its peak. fp32 masters, moments and gradients; bf16 copies for autocast; frozen embeddings
    in fp32.
    """
    shared = {name: 1.0 for name in ("weights", "gradients", "moments")}
    order = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    level = (
        3 if place.sharding == Sharding.FSDP2 else order.index(place.sharding) + 1 if place.sharding in order else 0
    )
    for name in ("moments", "gradients", "weights")[:level]:
        shared[name] = 1.0 / place.ranks
    sizes = parameters(config)
    slots, logits = forward.rows * forward.length, 2 * config.draft_vocab_size
    kept = saved_bytes(config, forward, recompute, place.on_gpu)
    return [
        Part("CUDA context" if place.on_gpu else "Python and its libraries", CONTEXT if place.on_gpu else HOST),
        Part("target", place.target + 2 * config.draft_vocab_size * config.target_hidden_size),
        Part("frozen embeddings", 4 * sizes.frozen),
        Part("fp32 weights", 4 * sizes.trained * shared["weights"]),
        Part("gradients", 4 * sizes.trained * shared["gradients"]),
        Part("Adam's moments", 8 * sizes.trained * shared["moments"]),
        Part("weights gathered for a step", 4 * sizes.trained * (place.sharding == Sharding.FSDP2), shifts=True),
        Part("bf16 copies of the weights and of their gradients", (2 + 2) * sizes.trained, shifts=True),
        Part("features of the rows", slots * (2 * 4 * config.target_hidden_size + 5 * 8 + 4), shifts=True),
        Part("teacher probabilities", 2 * forward.teacher * config.draft_vocab_size, shifts=True),
        Part(
            "logits of a chunk",
            min(sum(forward.predictions) * logits, LOGITS if place.on_gpu else LOSS_ROWS * logits),
            shifts=True,
        ),
        Part(
            "gradients of one layer's activations",
            slots * 2 * (3 * config.intermediate_size + 4 * config.hidden_size),
            shifts=True,
        ),
        *(Part(name, size, shifts=True) for name, size in kept.items()),
    ]


def saved_bytes(config: DrafterConfig, forward: Forward, recompute: bool, on_gpu: bool = False) -> dict[str, float]:
    """What the forward pass keeps for the backward pass; with `recompute` one step's activations, and the edges of the
    others.

    On a GPU each layer's first step keeps its mask as numbers; elsewhere nothing grows with the square of a row.
    """
    hidden, slots, anchors = config.hidden_size, forward.rows * forward.length, forward.rows * forward.anchors
    first = _layers(config, slots) + config.num_hidden_layers * 2 * slots * forward.length * on_gpu
    steps_of_anchors, deeper = forward.depth, []
    if forward.replay:
        deeper = [_layers(config, anchors * forward.replay.lookahead)] * (1 + forward.replay.refresh)
        steps_of_anchors = forward.replay.lookahead
    deeper += [_layers(config, anchors)] * steps_of_anchors
    edges = (
        (4 + 2) * hidden + 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )  # inputs, and the step's keys
    if recompute:
        most = max([first, *deeper])
        steps = {
            "one step, computed again": most,
            "edges of the steps": edges * (slots + anchors * (forward.passes - 1)),
        }
    else:
        steps = {"first step": first, "deeper steps": float(sum(deeper))}
    return {**steps, "head": 4 * config.draft_vocab_size * hidden + sum(forward.predictions) * (2 + 2) * hidden}


def _layers(config: DrafterConfig, tokens: int) -> float:
    """Norms and linear maps keep their input; attention its rotated queries and keys, values, and a number a head
    beside its output, which is the input of a linear map. The first layer has a third norm, of fp32 embeddings.
    """
    hidden, heads, queries = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_attention_heads * config.head_dim,
    )
    attention = 2 * queries + 2 * 2 * config.num_key_value_heads * config.head_dim + 4 * heads
    ordinary = (2 + 2) * 2 * hidden + 2 * queries + 3 * 2 * config.intermediate_size + attention
    return tokens * (config.num_hidden_layers * ordinary + 4 * hidden + 2 * hidden)


class Moved(NamedTuple):
    """Bytes of one optimizer step of one rank: read from the feature store, through the optimizer, and to and from
    other ranks.
    """

    features: float
    optimizer: float
    exchanged: float


def moved_bytes(config: DrafterConfig, ranks: int, sharding: Sharding, rows_per_step: int, length: int) -> Moved:
    """AdamW reads weight, gradient and moments and writes three of them; ranks reduce gradients, and gather weights
    where those are shared.

    A ring moves 2 (n - 1) / n of a tensor to reduce it everywhere, and half of that to gather it or to reduce it to
    its owner.
    """
    trained = parameters(config).trained
    features = rows_per_step / ranks * length * (2 * 4 * config.target_hidden_size + 6 * 4)
    ring = (ranks - 1) / ranks * 4 * trained
    passes = 3 if sharding in (Sharding.ZERO3, Sharding.FSDP2) else 2
    return Moved(features, (16 + 12) * trained, passes * ring)
