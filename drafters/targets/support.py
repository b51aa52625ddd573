"""Whether our serving computes what a target's own forward computes: found at load, or refused by the field that is
the cause.

`check_config` reads the config alone, before any weight is loaded. `examine` then runs a few tokens through the loaded
model as transformers does and as we do, and learns on the way what the target leaves in the KV pool, and its head's
law. `compare_paged` repeats it over paged keys with the layers that will serve.

P tokens of the examination, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.base.errors import UserError
from drafters.targets.head import HeadLaw, find_law
from infer.kernels.attention.context import CURRENT, AttentionContext, DocumentContext
from infer.kernels.attention.kv_pool import KvPool, KvShape
from infer.kernels.attention.paged import PagedContext, PagedRequest

ATTENTION = "ssd_context"  # the name under which our attention function is registered with transformers
TOKENS, FIRST = 8, 5  # what is examined; the pool is read from after the first ones
FAR = {torch.float32: 1e-3}  # relative distance of hidden states that is another computation; else HALF
HALF = 0.25  # bf16 and fp16, where layers round, and a router may choose another expert in some rows
LOUD = 50.0  # the largest logit of the examination: where a soft cap is seen
OWN_ATTENTION = "its attention is not computed through transformers' attention interface"
FACTS = ("hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")  # a config has to state these
REMEDY = "take a target whose layers all have full causal attention"
# What a model's code raises when it is called in a way it does not know.
FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)


class Cause(NamedTuple):
    """A field of the config, the value that is the cause, and what cannot be computed."""

    field: str
    value: Any
    what: str


class Examined(NamedTuple):
    """What the examination found."""

    kv: KvShape
    law: HeadLaw
    tokens_1P: Tensor
    hidden_PH: Tensor  # as transformers computes it


def refusal(spec: str, config: Any, what: str, cause: Cause | None = None) -> UserError:
    """The error for a target: the field that is the cause, else its model type, which names its code."""
    cause = cause or Cause("model_type", config.model_type, "")
    about = f"{what}: {cause.what}" if what and cause.what else what or cause.what
    return UserError(
        f"target {spec!r} cannot be served: {cause.field} = {_short(cause.value)} in its config: {about}; {REMEDY}"
    )


def check_config(spec: str, config: Any) -> None:
    """Refuse what a config says to be beyond our attention function, rather than serve wrong text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    for cause in _certain(text):
        raise refusal(spec, text, "", cause)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if text is config else None
    for kind in found if isinstance(found, tuple) else (found,):
        if kind is not None and not kind._can_set_attn_implementation():
            raise refusal(spec, text, OWN_ATTENTION)


def _certain(config: Any) -> Iterator[Cause]:
    """Fields that by themselves mean another kind of layer."""
    if getattr(config, "is_encoder_decoder", False):
        yield Cause("is_encoder_decoder", True, "an encoder and cross attention are not served")
    kinds = getattr(config, "layer_types", None) or ()
    if others := sorted(set(kinds) - {"full_attention"}):
        yield Cause("layer_types", others, "only layers of full attention are served")
    window = getattr(config, "sliding_window", None)
    if window is not None and not kinds and getattr(config, "use_sliding_window", True):
        yield Cause("sliding_window", window, "sliding-window attention is not served")
    for name, what in (
        ("attn_logit_softcapping", "soft-capped attention scores are not served"),
        ("alibi", "ALiBi biases of attention scores are not served"),
        ("attention_chunk_size", "attention in chunks is not served"),
        ("keep_window_size", "attention with a dynamic mask is not served"),
    ):
        if value := getattr(config, name, None):
            yield Cause(name, value, what)
    for name in ("index_topk", "index_topk_blocks"):
        if not kinds and (value := getattr(config, name, None)):
            yield Cause(name, value, "sparse attention, whose indexer keeps a state of its own, is not served")


def _suspected(config: Any) -> Cause | None:
    """The field that most likely is the cause where an examination failed."""
    if getattr(config, "is_decoder", True) is False:
        return Cause("is_decoder", False, "attention is bidirectional, or positions are its own")
    return None


def layers_of(model: Any) -> nn.ModuleList | None:
    """The decoder's layers: its list of as many modules as the config says there are."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    return next((child for child in lists if len(child) == count), None)


@dataclass(frozen=True)
class Recorder:
    """Attention inside one document, and what each layer asked for."""

    inside: DocumentContext
    shapes: dict[int, KvShape] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)

    def attend(self, layer: int, query_1NRD: Tensor, key_1MRD: Tensor, value_1MRD: Tensor, scale: float) -> Tensor:
        """See `AttentionContext.attend`."""
        self.shapes[layer] = KvShape(key_1MRD.shape[1], key_1MRD.shape[-1], value_1MRD.shape[-1])
        self.calls[layer] += 1
        return self.inside.attend(layer, query_1NRD, key_1MRD, value_1MRD, scale)


@torch.no_grad()
def examine(spec: str, model: Any, head_VH: Tensor, sharded: bool) -> Examined:
    """Compare a forward of a few tokens with transformers' own, before any layer is replaced. Raises `UserError`.

    For a sharded model it is a collective, like every forward.
    """
    config = model.config.get_text_config()
    suspected = _suspected(config)

    def refuse(what: str) -> UserError:
        return refusal(spec, config, what, suspected)

    layers = layers_of(model)
    if layers is None:
        raise refuse("its decoder has no list of decoder layers")
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise refuse("its decoder takes no position_ids: it counts positions by itself")
    for name in FACTS:
        if getattr(config, name, None) is None:
            raise refusal(spec, config, "", Cause(name, None, "drafters have to know it"))
    for name, size in (("vocab_size", head_VH.shape[0]), ("hidden_size", head_VH.shape[1])):
        if (stated := getattr(config, name)) != size:
            raise refusal(spec, config, "", Cause(name, stated, f"the output head has {size}"))
    ids = (torch.arange(TOKENS, device=head_VH.device)[None] * 7 + 3) % config.vocab_size
    bias = getattr(model.get_output_embeddings(), "bias", None)
    with _refusing(refuse, "its own forward fails"):
        hidden_PH, law = _own_forward(model, ids, head_VH, bias)
    if hidden_PH is None or hidden_PH.shape != (TOKENS, head_VH.shape[1]):
        raise refuse("its decoder does not give the state that its head reads")
    if law is None:
        raise refuse("its logits are not the head's output, scaled or soft-capped by a field of the config")
    _keep_context(model.get_decoder())
    recorder = Recorder(DocumentContext(torch.ones_like(ids)))
    with _refusing(refuse, "its forward fails with attention of ours"), _inputs_of(layers) as inputs:
        positions = torch.arange(TOKENS, device=ids.device)[None]
        ours_PH = forward_in(recorder, model, ids, positions, sharded)[0]
    if [tuple(x.shape) for x in inputs] != [(1, TOKENS, head_VH.shape[1])] * len(layers):
        raise refuse("its layers do not each read one state of hidden_size once, which drafters tap")
    if not recorder.calls:
        raise refuse(OWN_ATTENTION)
    if recorder.calls != Counter(range(len(layers))):
        odd = sorted({*range(len(layers)), *recorder.calls} - {i for i, n in recorder.calls.items() if n == 1})
        raise refuse(f"layers {odd[:8]} do not keep their state in the keys and values of one attention")
    if len({*recorder.shapes.values()}) > 1:
        raise refuse("its layers keep keys and values of different sizes")
    if (distance := _distance(ours_PH, hidden_PH)) > FAR.get(hidden_PH.dtype, HALF):
        raise refuse(f"its hidden states differ by {distance:.0%} between transformers' attention and ours")
    return Examined(recorder.shapes[0], law, ids, hidden_PH)


@torch.no_grad()
def compare_paged(spec: str, model: Any, examined: Examined) -> None:
    """The same tokens over paged keys, in two forwards beside another request, with the layers as they serve."""
    config = model.config.get_text_config()

    def refuse(what: str) -> UserError:
        return refusal(spec, config, what, _suspected(config))

    ids_1P, hidden_PH = examined.tokens_1P, examined.hidden_PH
    pool = KvPool.of_shape(len(layers_of(model) or ()), 2, TOKENS, examined.kv, like=hidden_PH)
    parts = []
    with _refusing(refuse, "its forward fails over paged keys"):
        for start, stop in ((0, FIRST), (FIRST, TOKENS)):
            requests = [PagedRequest((0,), 1, 1), PagedRequest((1,), stop, stop - start)]
            context = PagedContext.build(pool, requests, ids_1P.device)
            rows = torch.cat([ids_1P[:, -1:], ids_1P[:, start:stop]], dim=1)
            places = torch.tensor([[0, *range(start, stop)]], device=rows.device)
            parts.append(forward_in(context, model, rows, places, sharded=False)[0, 1:])
    if (distance := _distance(torch.cat(parts), hidden_PH)) > FAR.get(hidden_PH.dtype, HALF):
        raise refuse(f"its hidden states over paged keys differ by {distance:.0%} from transformers'")


def _own_forward(
    model: Any, ids_1P: Tensor, head_VH: Tensor, bias_V: Tensor | None
) -> tuple[Tensor | None, HeadLaw | None]:
    """The decoder's last states, and the law of the head: learnt from loud states that are put in their place, so that
    a soft cap is seen.
    """
    kept: list[Tensor] = []
    loud = torch.randn(ids_1P.shape[1], head_VH.shape[1], generator=torch.Generator().manual_seed(0)).to(head_VH)
    loud *= LOUD / (loud @ head_VH.T).abs().max().clamp_min(1e-6)

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        kept.append(output.last_hidden_state[0])
        output.last_hidden_state = loud[None]
        return output

    handle = model.get_decoder().register_forward_hook(replace)
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=ids_1P, use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION)
        handle.remove()
    if len(kept) != 1:
        return None, None
    plain = F.linear(loud, head_VH, None if bias_V is None else bias_V.to(loud))
    return kept[0], find_law(model.config.get_text_config(), plain, logits[0])


def forward_in(context: AttentionContext, model: Any, ids_BT: Tensor, positions_BT: Tensor, sharded: bool) -> Tensor:
    """The decoder's last hidden states [B, T, H], with attention in `context`.

    A sharded model is run from its root, since FSDP gathers weights from there down. The head then computes one row of
    logits, which is dropped.
    """
    arguments: dict[str, Any] = {
        "input_ids": ids_BT,
        "position_ids": positions_BT,
        "use_cache": False,
        "context": context,
    }
    if not sharded:
        return model.get_decoder()(**arguments).last_hidden_state
    kept: list[Tensor] = []
    handle = model.get_decoder().register_forward_hook(lambda _, __, output: kept.append(output.last_hidden_state))
    try:
        model(**arguments, logits_to_keep=1)
    finally:
        handle.remove()
    return kept[0]


def _keep_context(decoder: Any) -> None:
    """Let attention find the `context=` of a forward where the layers between do not hand it down."""
    parameters = inspect.signature(decoder.forward).parameters.values()
    hands_down = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if context := kwargs.get("context"):
            CURRENT.set(context)
            kwargs = kwargs if hands_down else {name: x for name, x in kwargs.items() if name != "context"}
        return args, kwargs

    def after(*_: Any) -> None:
        CURRENT.set(None)

    decoder.register_forward_pre_hook(before, with_kwargs=True)
    decoder.register_forward_hook(after, always_call=True)


@contextmanager
def _inputs_of(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """While open, the inputs of the layers, as they are called."""
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _refusing(refuse: Callable[[str], UserError], what: str) -> Iterator[None]:
    try:
        yield
    except FAULTS as error:
        raise refuse(f"{what} ({type(error).__name__}: {' '.join(str(error).split())[:160]})") from error


def _distance(ours_PH: Tensor, theirs_PH: Tensor) -> float:
    """The median over rows of |ours - theirs| / |theirs|; infinite where a number is not finite."""
    ours, theirs = ours_PH.float(), theirs_PH.float()
    each = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    return float(each.median()) if bool(each.isfinite().all()) else float("inf")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
