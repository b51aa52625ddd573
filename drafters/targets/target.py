"""Targets: resolve what the user names, convert once where needed, load, and read taps. Used by data, train and infer
alike.

Shapes: B packed rows, T positions, H target hidden size, V vocabulary, C = number of taps * H.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafters.base.errors import UserError
from drafters.targets.files import TargetIdentity, resolve_target
from drafters.targets.head import TargetHead
from drafters.targets.support import ATTENTION, check_config, compare_paged, examine, layers_of
from infer.kernels.attention.paged import DocumentContext, KvShape, attend_in_context
from infer.kernels.decoder_layer.fused import FusedDecoderLayer, fits
from infer.kernels.linear.packed import PackedLinear, fuse, is_plain, pack

LOADED_OTHERWISE = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
}  # of a config: how it is loaded, not what it is
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class TargetFacts:
    """What drafters, cards and manifests have to know of a target."""

    name: str
    weight_hash: str
    tokenizer_hash: str
    template_hash: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    end_token_ids: tuple[int, ...]
    rope_parameters: Mapping[str, Any] = field(
        default_factory=dict
    )  # as transformers 5 states them: theta, type, scaling
    kv: KvShape = KvShape(0, 0, 0)  # what a token leaves in each layer's pool, as the target's attention asks for it

    @property
    def identity(self) -> TargetIdentity:
        """Its hashes."""
        return TargetIdentity(self.weight_hash, self.tokenizer_hash, self.template_hash)


@dataclass(frozen=True)
class Target:
    """A loaded target: frozen transformers model (attention through `context=`), tokenizer and facts."""

    model: Any
    tokenizer: Any
    facts: TargetFacts
    head: TargetHead  # from the last hidden state to logits
    embed_weight: Tensor  # [V, H]
    weights_read: int  # weights that decoding a token reads: all, but for embeddings that the head does not share
    sharded: bool = False  # each process holds a part: a forward is a collective

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers = layers_of(self.model)
        assert layers is not None, "a target without layers is refused at load"
        return layers

    @property
    def lm_head_weight(self) -> Tensor:
        """The head's weight [V, H]. It alone is not the logits: see `head`."""
        return self.head.weight

    @property
    def device(self) -> torch.device:
        """Where the model's first weights live."""
        return self.embed_weight.device


class TapOutput(NamedTuple):
    """Features of packed rows: the taps behind each other, and what the head reads (after the final norm)."""

    taps_BTC: Tensor
    last_hidden_BTH: Tensor


def load_target(
    spec: str,
    dtype: str = "bfloat16",
    device: str = "cpu",
    cache_dir: Path | None = None,
    fuse_layers: bool = True,
    shards: int = 1,
) -> Target:
    """Load a target named by directory, hub id, `.gguf` file or `builtin:smollm2-135m`.

    `shards` > 1: so many processes share its weights (`target_model.load_model`); it is then not fused.
    Raises `UserError` where it cannot be found or read, or where the dtype is not one of `DTYPES`.
    """
    from transformers import AttentionInterface

    from drafters.targets.model import load_config, load_model, whole, whole_weight

    AttentionInterface.register(ATTENTION, attend_in_context)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    path = resolve_target(spec, cache_dir)
    tokenizer = _tokenizer(spec, path)
    check_config(spec, load_config(spec, path))
    model = load_model(spec, path, DTYPES[dtype], device, ATTENTION, shards)
    weight = whole_weight(model.get_output_embeddings(), spec, "output head")
    embed = whole_weight(model.get_input_embeddings(), spec, "embeddings")
    examined = examine(spec, model, weight, shards > 1)
    facts = _facts(spec, Path(path), model, tokenizer, examined.kv)
    read = sum(weight.numel() for weight in model.parameters())
    read -= 0 if model.get_input_embeddings().weight is model.get_output_embeddings().weight else embed.numel()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if fuse_layers and shards == 1:
        _speed_up(model)
    if shards == 1:
        compare_paged(spec, model, examined)
    linear = model.get_output_embeddings() if shards == 1 else None
    head = TargetHead(weight, None if bias is None else whole(bias.detach()), examined.law, linear)
    return Target(model, tokenizer, facts, head, embed, read, shards > 1)


def identify(spec: str, cache_dir: Path | None = None) -> TargetIdentity:
    """The identity of a target as `load_target` gives it, without loading its weights."""
    from transformers import AutoConfig

    path = resolve_target(spec, cache_dir)
    tokenizer = _tokenizer(spec, path)
    return TargetIdentity(
        _weight_hash(Path(path), AutoConfig.from_pretrained(path)),
        tokenizer_hash(tokenizer),
        _template_hash(tokenizer),
    )


def load_tokenizer(spec: str, cache_dir: Path | None = None) -> Any:
    """The tokenizer of a target alone. Raises `UserError` as `load_target` does."""
    return _tokenizer(spec, resolve_target(spec, cache_dir))


def _tokenizer(spec: str, path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target {spec!r} could not be loaded from {path}: {error}") from error


@contextmanager
def taps_of(target: Target, tap_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward leaves the inputs of the layers `tap_ids` in the mapping it gives.

    `tap_ids` are indices into transformers' `hidden_states`: tap i is the INPUT of decoder layer i.
    """
    found: dict[int, Tensor] = {}

    def keep(tap: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [target.layers[tap].register_forward_pre_hook(keep(tap), with_kwargs=True) for tap in tap_ids]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()  # not inference_mode: training saves these tensors for its backward
def tap_features(
    target: Target, token_ids_BT: Tensor, positions_BT: Tensor, document_ids_BT: Tensor, tap_ids: Sequence[int]
) -> TapOutput:
    """One forward over packed rows; attention stays inside documents. No logits are computed."""
    context = DocumentContext(document_ids_BT)
    arguments: dict[str, Any] = {
        "input_ids": token_ids_BT,
        "position_ids": positions_BT,
        "use_cache": False,
        "context": context,
    }
    with taps_of(target, tap_ids) as found:
        hidden = (
            _through_whole(target.model, arguments)
            if target.sharded
            else target.model.get_decoder()(**arguments).last_hidden_state
        )
    return TapOutput(torch.cat([found[tap] for tap in tap_ids], dim=-1), hidden)


def _through_whole(model: Any, arguments: dict[str, Any]) -> Tensor:
    """The decoder's output, by a forward of the whole model: FSDP gathers and frees weights from its root down. One
    logit row is made.
    """
    kept: list[Tensor] = []
    handle = model.get_decoder().register_forward_hook(lambda _, __, output: kept.append(output.last_hidden_state))
    try:
        model(**arguments, logits_to_keep=1)
    finally:
        handle.remove()
    return kept[0]


def _speed_up(model: Any) -> None:
    layers = layers_of(model)
    assert layers is not None, "examined before"
    for index, layer in enumerate(layers):
        if fits(layer):
            layers[index] = FusedDecoderLayer.of_llama(layer)
            continue
        if attention := getattr(layer, "self_attn", None):
            fuse(attention, ["q_proj", "k_proj", "v_proj"])
        if mlp := getattr(layer, "mlp", None):
            fuse(mlp, ["gate_proj", "up_proj"])
    head = model.get_output_embeddings()
    pack(model.get_decoder())
    if is_plain(head):  # by name on the model itself: the embedding that may share the weight stays plain
        name = next(name for name, child in model.named_children() if child is head)
        setattr(model, name, PackedLinear(head.weight, head.bias))


def _facts(spec: str, path: Path, model: Any, tokenizer: Any, kv: KvShape) -> TargetFacts:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # of models that state it for each kind of layer
    return TargetFacts(
        name=spec,
        weight_hash=_weight_hash(path, model.config),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=_template_hash(tokenizer),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        max_position_embeddings=config.max_position_embeddings,
        end_token_ids=_end_tokens(model, tokenizer),
        rope_parameters=dict(rope),
        kv=kv,
    )


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    many = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return tuple(sorted({int(token) for token in many if token is not None}))


def tokenizer_hash(tokenizer: Any) -> str:
    """Identity of a vocabulary: every token with its id."""
    return _sha256(json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])).encode())


def _template_hash(tokenizer: Any) -> str:
    return _sha256(str(tokenizer.chat_template).encode())


def _weight_hash(path: Path, config: Any) -> str:
    """Of the files where the target is a directory (sampled: first and last MiB of each, and the size), of the config
    elsewhere.
    """
    digest = hashlib.sha256()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    if not files:
        content = {key: value for key, value in config.to_dict().items() if key not in LOADED_OTHERWISE}
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
