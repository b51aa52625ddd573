"""Parameters and FLOPs of training, computed from shapes before anything is loaded. Torch-free.

A *forward* below is one micro-batch in one process: B rows of T tokens, the first drafter step at every slot, deeper
steps at A anchors of a row. Matrix products are counted as the code asks for them, masked keys included; recomputation
is not work and is not counted.

Letters: H drafter's hidden size, Ht target's, I intermediate, N query heads, M key-value heads, D head dimension, V
vocabulary, Vd draft's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drafters.eagle3_ssd.config import DrafterConfig
from train.config import Stage


class Product(NamedTuple):
    """`calls` times `batch` products [m, k] @ [k, n]."""

    name: str
    m: int
    k: int
    n: int
    batch: int = 1
    calls: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each m, k, n."""
        return 2 * self.m * self.k * self.n * self.batch * self.calls


class Replayed(NamedTuple):
    """A replayed round: glue over K slots, 1 + refresh times, and K steps of a branch, after `stale` steps without a
    gradient.
    """

    lookahead: int
    stale: int
    refresh: int


class Forward(NamedTuple):
    """The sizes of one micro-batch: `predictions` are those supervised at depths 0..depth, `teacher` the positions
    with a teacher.
    """

    rows: int
    length: int
    anchors: int
    predictions: tuple[int, ...]
    teacher: int
    replay: Replayed | None = None

    @property
    def depth(self) -> int:
        """The deepest step of an unroll."""
        return len(self.predictions) - 1

    @property
    def passes(self) -> int:
        """Drafter steps one after another, step 0 included."""
        return 1 + self.depth if self.replay is None else 2 + sum(self.replay)


class Parameters(NamedTuple):
    """Of the drafter: those trained, and its frozen embeddings."""

    trained: int
    frozen: int


def parameters(config: DrafterConfig) -> Parameters:
    """Counts of `Eagle3Drafter(config)`."""
    layers = [_matrices(config, layer) for layer in range(config.num_hidden_layers)]
    norms = config.hidden_size * (
        2 * config.num_hidden_layers + 2
    )  # the first layer has three, and one stands before the head
    fused = 3 * config.target_hidden_size * config.hidden_size
    head = config.draft_vocab_size * config.hidden_size
    return Parameters(
        fused + head + norms + sum(k * n for layer in layers for _, k, n in layer),
        config.vocab_size * config.hidden_size,
    )


def _matrices(config: DrafterConfig, layer: int) -> list[tuple[str, int, int]]:
    """Name, inputs and outputs of a layer's linear maps; the first layer's attention reads token and feature."""
    hidden, middle = config.hidden_size, config.intermediate_size
    inputs = hidden if layer else 2 * hidden
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = [("q", inputs, queries), ("k", inputs, keys), ("v", inputs, keys), ("o", queries, hidden)]
    return [*attention, ("gate", hidden, middle), ("up", hidden, middle), ("down", middle, hidden)]


def products(config: DrafterConfig, forward: Forward) -> list[Product]:
    """Every matrix product of a micro-batch's forward and backward pass, the features given."""
    slots = forward.rows * forward.length
    fuse = Product("fuse", slots, 3 * config.target_hidden_size, config.hidden_size)
    done = [fuse, _weight_gradient(fuse)]  # features are given: nothing flows back into them
    trained = _layer_products(config, slots, 1) + _row_attention(config, forward)
    if forward.replay:
        lookahead, stale, refresh = forward.replay
        done += _steps(config, forward, 1, range(1, stale + 1))
        trained += _steps(config, forward, lookahead, [lookahead] * (1 + refresh))
        trained += _steps(config, forward, 1, range(lookahead + 1, 2 * lookahead + 1))
    else:
        trained += _steps(config, forward, 1, range(1, forward.depth + 1))
    trained += [
        Product("head", number, config.hidden_size, config.draft_vocab_size)
        for number in forward.predictions
        if number
    ]
    teacher = Product("teacher", forward.teacher, config.target_hidden_size, config.draft_vocab_size)
    return [
        *done,
        teacher,
        *trained,
        *(back for product in trained for back in (_input_gradient(product), _weight_gradient(product))),
    ]


def flops(parts: Iterable[Product]) -> int:
    """The sum over products."""
    return sum(part.flops for part in parts)


def _input_gradient(product: Product) -> Product:
    return product._replace(name=f"{product.name}, backward", k=product.n, n=product.k)


def _weight_gradient(product: Product) -> Product:
    return product._replace(name=f"{product.name}, backward", m=product.k, k=product.m)


def _layer_products(config: DrafterConfig, tokens: int, calls: int) -> list[Product]:
    matrices = [matrix for layer in range(config.num_hidden_layers) for matrix in _matrices(config, layer)]
    return [Product(name, tokens, k, n, calls=calls) for name, k, n in matrices]


def _row_attention(config: DrafterConfig, forward: Forward) -> list[Product]:
    """The first step: every slot against every slot of its row, though on CPUs what comes after a block of slots is
    left out.
    """
    batch, length, dim = forward.rows * config.num_attention_heads, forward.length, config.head_dim
    calls = config.num_hidden_layers
    return [Product("scores", length, dim, length, batch, calls), Product("mixing", length, length, dim, batch, calls)]


def _steps(config: DrafterConfig, forward: Forward, queries: int, own_keys: Sequence[int]) -> list[Product]:
    """Steps at the anchors, `queries` slots of each at once, against the step-0 keys of their row and so many own keys
    of the anchor.
    """
    groups, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    shared = config.num_attention_heads // groups * queries
    batch, calls = forward.rows * groups, len(own_keys) * layers
    if not calls:
        return []
    parts = _layer_products(config, forward.rows * forward.anchors * queries, len(own_keys))
    parts += [
        Product("scores", shared * forward.anchors, dim, forward.length, batch, calls),
        Product("mixing", shared * forward.anchors, forward.length, dim, batch, calls),
    ]
    for own in own_keys:
        each = forward.rows * groups * forward.anchors
        parts += [
            Product("own scores", shared, dim, own, each, layers),
            Product("own mixing", shared, own, dim, each, layers),
        ]
    return parts


def replayed(forward: Forward, lookahead: int, refresh: int, depth: int) -> Forward:
    """The same anchors, each replaying a round at the largest shift, depth - 2 K, with all of its 2 K predictions: the
    most it can take.
    """
    number = forward.rows * forward.anchors * lookahead
    round_at_most = Replayed(lookahead, depth - lookahead - 1, refresh)
    return forward._replace(predictions=(forward.predictions[0], number, number), replay=round_at_most)


def in_stage(forward: Forward, stage: Stage, lookahead: int, refresh: int) -> Forward:
    """A micro-batch of the same rows as a stage of the curriculum would run it, if every anchor had a prediction at
    every depth.
    """
    anchors = stage.anchors_per_row or forward.anchors
    deep = (forward.rows * anchors,) * stage.depth
    unrolled = forward._replace(anchors=anchors, predictions=(forward.predictions[0], *deep), replay=None)
    return replayed(unrolled, lookahead, refresh, stage.depth) if stage.replay else unrolled


def predictions(turns: Sequence[int], depth: int) -> int:
    """How many predictions of step `depth` turns of these many tokens supervise: `supervision.supervised`, counted.

    A turn of 4 tokens has anchors whose next token lies in it or just before it: 3 at depth 0, 2 at depth 1, 1 at
    depth 2.
    """
    return sum(max(0, size - 1 - depth) for size in turns)


def forwards(
    rows: Sequence[Sequence[int]], length: int, depth: int, anchors_per_row: int | None, rows_per_forward: int
) -> list[Forward]:
    """The micro-batches of one pass over rows of turns: anchors padded to the most in the batch, sampled ones counted
    as expected.
    """
    result = []
    for start in range(0, len(rows), rows_per_forward):
        part = rows[start : start + rows_per_forward]
        possible = [predictions(turns, 1) for turns in part]
        taken = [number if anchors_per_row is None else min(number, anchors_per_row) for number in possible]
        found = [sum(predictions(turns, 0) for turns in part)]
        for d in range(1, depth + 1):
            shares = zip(part, possible, taken, strict=True)
            found.append(round(sum(predictions(turns, d) * used / number for turns, number, used in shares if number)))
        teacher = sum(sum(turns) for turns in part)
        result.append(Forward(len(part), length, max(1, *taken, 0), tuple(found), teacher))
    return result
