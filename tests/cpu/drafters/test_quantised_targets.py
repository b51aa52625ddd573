"""Quantised targets as teachers: their features are those of the weights that the file stands for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.base.errors import UserError
from drafters.targets.taps import tap_features
from drafters.targets.target import load_target
from infer.kernels.decoder_layer.fused_layer import FusedDecoderLayer, fits
from infer.kernels.linear.fused import fuse
from infer.kernels.linear.packed import PackedLinear, pack
from tests.gguf_file import MERGED, write_gguf
from tests.tiny import save_tiny_target, tiny_model

TAPS = (1, 3, 5)


def features(path: Path, dtype: str, cache: Path, fuse_layers: bool = True) -> tuple[Tensor, Tensor]:
    """Taps and last hidden state of two rows of 20 tokens."""
    target = load_target(str(path), dtype, cache_dir=cache, fuse_layers=fuse_layers)
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    return tap_features(target, tokens, torch.arange(20).expand(2, -1), torch.ones_like(tokens), TAPS)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
@torch.no_grad()
def test_a_quantised_gguf_file_teaches_with_the_weights_it_stands_for(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind)
    model = tiny_model(vocab_size=MERGED + 1)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
            assert "embed" not in name or not torch.equal(rounded, weight)
            weight.copy_(rounded.bfloat16())
    model.save_pretrained(tmp_path / "plain")
    load_target(str(file), "float32", cache_dir=tmp_path).tokenizer.save_pretrained(tmp_path / "plain")
    for found, wanted in zip(
        features(file, "float32", tmp_path), features(tmp_path / "plain", "float32", tmp_path), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def save_fp8(directory: Path) -> tuple[Path, Path]:
    """The tiny target in fp8 with a scale per block, as Qwen3's and DeepSeek's checkpoints are; and the plain target
    it stands for.
    """
    plain, quantised = save_tiny_target(directory / "plain"), save_tiny_target(directory / "fp8")
    tensors, rounded = load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "proj" in name:
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.view(1, 1)
            rounded[name] = tensors[name].float() * scale
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    save_file({**load_file(plain / "model.safetensors"), **rounded}, plain / "model.safetensors", {"format": "pt"})
    describe(quantised, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
    return quantised, plain


def describe(directory: Path, quantisation: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


@pytest.mark.parametrize("fuse_layers", [False, True])
def test_an_fp8_checkpoint_teaches_on_a_cpu(tmp_path: Path, fuse_layers: bool) -> None:
    """Without a GPU transformers dequantises it at load; fused, packed or left alone it computes the same."""
    quantised, plain = save_fp8(tmp_path)
    found, wanted = (features(path, "float32", tmp_path, fuse_layers) for path in (quantised, plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=3e-2, atol=3e-2)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_quantisation_without_its_package_is_one_line(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    describe(target, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    with pytest.raises(UserError, match=r"could not be loaded from .*bitsandbytes"):
        load_target(str(target))


@pytest.mark.parametrize("fuse_layers", [False, True])
@torch.no_grad()
def test_a_bitsandbytes_checkpoint_teaches_as_its_weights_do(tmp_path: Path, fuse_layers: bool) -> None:
    """Four bits a weight, as bitsandbytes quantised and saved them; where the package is installed."""
    functional = pytest.importorskip("bitsandbytes").functional
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    plain, quantised = save_tiny_target(tmp_path / "plain"), save_tiny_target(tmp_path / "nf4")
    wide = LlamaConfig(
        **{**tiny_model().config.to_dict(), "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    )
    wide.initializer_range = 128**-0.5
    torch.manual_seed(0)
    LlamaForCausalLM(wide).save_pretrained(plain)  # bitsandbytes' CPU kernels want rows of whole blocks
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    arguments: dict[str, Any] = {"quantization_config": options, "dtype": torch.float32, "device_map": {"": "cpu"}}
    AutoModelForCausalLM.from_pretrained(plain, **arguments).save_pretrained(quantised)
    unrounded = features(plain, "float32", tmp_path)
    tensors = load_file(plain / "model.safetensors")
    for name, weight in tensors.items():
        if "proj" in name:
            tensors[name] = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4")).float()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    found, rounded = features(quantised, "float32", tmp_path, fuse_layers), features(plain, "float32", tmp_path)
    for own, theirs, before in zip(found, rounded, unrounded, strict=True):
        assert float((own - theirs).norm()) < 0.1 * float((own - before).norm())


class Quantised(nn.Linear):
    """Stands for a quantiser's own linear layer: a subclass whose weight is not the matrix."""


def test_layers_of_a_quantiser_are_left_as_they_are() -> None:
    model: Any = tiny_model(layers=2)
    attention = model.model.layers[0].self_attn
    attention.k_proj = Quantised(32, 16, bias=False)
    assert not fits(model.model.layers[0]) and fits(model.model.layers[1])
    assert not fuse(attention, ["q_proj", "k_proj", "v_proj"])
    pack(attention)
    kinds = [type(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert kinds == [PackedLinear, Quantised, PackedLinear, PackedLinear]
    layer = FusedDecoderLayer.of_llama(model.model.layers[1])
    assert isinstance(layer.qkv, PackedLinear)


@pytest.mark.parametrize("what", ["lm_head", "model.embed_tokens"])
def test_a_quantised_head_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    from transformers import LlamaForCausalLM

    target = save_tiny_target(tmp_path / "target")
    getter = "get_output_embeddings" if what == "lm_head" else "get_input_embeddings"
    stub = nn.Linear(32, 259, bias=False)
    stub.weight = nn.Parameter(torch.zeros(259, 32, dtype=torch.uint8), requires_grad=False)
    monkeypatch.setattr(LlamaForCausalLM, getter, lambda self: stub)
    name = "output head" if what == "lm_head" else "embeddings"
    with pytest.raises(UserError, match=rf"has its {name} quantised \(torch.uint8\)"):
        load_target(str(target), "float32")
