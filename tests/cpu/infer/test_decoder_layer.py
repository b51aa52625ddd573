"""The fused Llama layer and its parts against plain twins."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding, apply_rotary_pos_emb

from infer.kernels.attention.context import DocumentContext, attend_in_context
from infer.kernels.decoder_layer.fused_layer import FusedDecoderLayer, fits
from infer.kernels.decoder_layer.reference import rotate


def _config(**changes: object) -> LlamaConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    return LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def test_rotation_is_transformers_rotation() -> None:
    config = _config()
    torch.manual_seed(1)
    x = torch.randn(2, 5, 6, 8)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(5).expand(2, 5) + 3)
    expected = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0].transpose(1, 2)
    torch.testing.assert_close(rotate(x, cos, sin), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_layer_computes_what_transformers_does(bias: bool) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("fused-layer-test", attend_in_context)
    config = _config(attention_bias=bias, mlp_bias=bias)
    config._attn_implementation = "fused-layer-test"
    torch.manual_seed(2)
    layer = LlamaDecoderLayer(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    hidden = torch.randn(2, 9, 32)
    tables = LlamaRotaryEmbedding(config)(hidden, torch.arange(9).expand(2, 9))
    context = DocumentContext(torch.tensor([[1] * 9, [1] * 4 + [2] * 5]))
    with torch.no_grad():
        expected = layer(hidden, position_embeddings=tables, context=context)
        torch.testing.assert_close(
            FusedDecoderLayer.of_llama(layer)(hidden, tables, context), expected, rtol=1e-4, atol=1e-5
        )


def test_only_layers_of_this_structure_are_replaced() -> None:
    assert fits(LlamaDecoderLayer(_config(), 0))
    assert not fits(LlamaDecoderLayer(_config(hidden_act="gelu"), 0))
    assert not fits(torch.nn.Linear(2, 2))
