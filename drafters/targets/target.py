"""Loading a target: a frozen transformers model with our attention and fused layers, its tokenizer and its facts.

Shapes: H target hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base.errors import UserError
from drafters.targets.files import resolve_target
from drafters.targets.head import TargetHead
from drafters.targets.identity import TargetFacts, facts_of, read_tokenizer
from drafters.targets.support import ATTENTION, check_config, compare_paged, examine, layers_of
from infer.kernels.attention.context import attend_in_context
from infer.kernels.decoder_layer.fused_layer import FusedDecoderLayer, fits
from infer.kernels.linear.fused import fuse
from infer.kernels.linear.packed import PackedLinear, is_plain, pack

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


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


def load_target(
    spec: str,
    dtype: str = "bfloat16",
    device: str = "cpu",
    cache_dir: Path | None = None,
    fuse_layers: bool = True,
    shards: int = 1,
) -> Target:
    """Load a target named by directory, hub id, `.gguf` file or `builtin:smollm2-135m`.

    `shards` > 1: that many processes share its weights (`drafters.targets.model.load_model`); it is then not fused.
    Raises `UserError` where it cannot be found or read, where the dtype is not one of `DTYPES`, or where serving would
    not compute what the target's own forward computes (`drafters.targets.support`).
    """
    from transformers import AttentionInterface

    from drafters.targets.model import load_config, load_model, whole, whole_weight

    AttentionInterface.register(ATTENTION, attend_in_context)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    path = resolve_target(spec, cache_dir)
    tokenizer = read_tokenizer(spec, path)
    check_config(spec, load_config(spec, path))
    model = load_model(spec, path, DTYPES[dtype], device, ATTENTION, shards)
    weight = whole_weight(model.get_output_embeddings(), spec, "output head")
    embed = whole_weight(model.get_input_embeddings(), spec, "embeddings")
    examined = examine(spec, model, weight, shards > 1)
    if shards > 1:
        _reshard(model)
    facts = facts_of(spec, Path(path), model, tokenizer, examined.kv)
    read = sum(weight.numel() for weight in model.parameters())
    read -= 0 if model.get_input_embeddings().weight is model.get_output_embeddings().weight else embed.numel()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if fuse_layers and shards == 1:
        _accelerate(model)
    if shards == 1:
        compare_paged(spec, model, examined)
    linear = model.get_output_embeddings() if shards == 1 else None
    head = TargetHead(weight, None if bias is None else whole(bias.detach()), examined.law, linear)
    return Target(model, tokenizer, facts, head, embed, read, shards > 1)


def _reshard(model: Any) -> None:
    """Give back what FSDP keeps whole after a forward, the outer weights: the examination ran one."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _accelerate(model: Any) -> None:
    """Replace layers by fused ones where they are Llama's, else fuse their projections; pack plain linear weights."""
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
