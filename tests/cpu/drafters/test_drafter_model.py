"""The drafter's arithmetic against transformers' Llama and against the formula written out; the slot alignment; the
vocabulary map.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafters.base.errors import UserError
from drafters.eagle3_ssd.align import Slot, num_slots, slot
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter, RMSNorm, rotary
from drafters.eagle3_ssd.vocab import VocabMap, cached_vocabulary
from infer.kernels.decoder_layer.reference import rotate

CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
    max_position_embeddings=64,
    vocab_size=40,
    draft_vocab_size=24,
    target_hidden_size=20,
    tap_hidden_states_ids=(1, 2, 3),
)
POSITIONS = torch.arange(3, 10)[None]


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_upper_layer_is_a_llama_layer() -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(CONFIG)
    llama = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    llama._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(llama, 0)
    layer.load_state_dict(drafter.layers["1"].state_dict())
    hidden = torch.randn(1, 7, 32)
    theirs = layer(hidden, position_embeddings=LlamaRotaryEmbedding(llama)(hidden, POSITIONS))
    ours = drafter.layers["1"](hidden, rotary(POSITIONS, CONFIG.rope), causal)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_first_layer_is_the_formula() -> None:
    """r += attn(cat(norm(e), norm(r))); r += mlp(norm(r)); logits = lm_head(norm(r)); r is fed back."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter(CONFIG.model_copy(update={"num_hidden_layers": 1}))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    mid = drafter.midlayer
    e, r = torch.randn(1, 7, 32), torch.randn(1, 7, 32)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x = torch.cat((norm(e, mid.input_layernorm.weight), norm(r, mid.hidden_norm.weight)), dim=-1)
    q, k, v = (
        F.linear(x, p.weight).unflatten(-1, (-1, 8))
        for p in (mid.self_attn.q_proj, mid.self_attn.k_proj, mid.self_attn.v_proj)
    )
    cos_sin = rotary(POSITIONS, CONFIG.rope)
    want = r + F.linear(causal(0, rotate(q, *cos_sin), rotate(k, *cos_sin), v).flatten(2), mid.self_attn.o_proj.weight)
    y = norm(want, mid.post_attention_layernorm.weight)
    gated = F.silu(F.linear(y, mid.mlp.gate_proj.weight)) * F.linear(y, mid.mlp.up_proj.weight)
    want = want + F.linear(gated, mid.mlp.down_proj.weight)
    got = drafter(e, r, POSITIONS, causal)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        drafter.logits(got), F.linear(norm(want, drafter.norm.weight), drafter.lm_head.weight), rtol=1e-4, atol=1e-5
    )


def test_norm_works_in_fp32_inside() -> None:
    norm = RMSNorm(64, 1e-5).to(torch.bfloat16)
    x = (1000 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), exact.to(torch.bfloat16), rtol=0, atol=0)


def test_embeddings_never_loaded_show() -> None:
    assert Eagle3Drafter(CONFIG).embed(torch.tensor([3])).isnan().all()


def test_alignment() -> None:
    assert slot(7) == Slot(embedded=8, feature=7, rotary=7, predicted=9)
    assert slot(7, 2) == Slot(embedded=10, feature=9, rotary=9, predicted=11)
    # prefill of 4 tokens: features of 0..3 and the bonus token 4, so four slots, the last of which predicts token 5
    assert num_slots(num_features=4, num_tokens=5) == 4
    assert num_slots(num_features=4, num_tokens=4) == 3
    assert num_slots(0, 0) == 0


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(31, 40))
def test_vocabulary_round_trips(chosen: set[int], vocab_size: int) -> None:
    ids = torch.tensor(sorted(chosen))
    vocab = VocabMap(ids, vocab_size)
    again = VocabMap.from_offsets(vocab.d2t(), vocab_size)
    assert torch.equal(again.draft_to_target, ids)
    assert [i for i, inside in enumerate(vocab.t2d().tolist()) if inside] == sorted(chosen)
    assert torch.equal(vocab.to_draft(vocab.to_target(torch.arange(len(vocab)))), torch.arange(len(vocab)))
    assert [bool(vocab.contains(torch.tensor(i))) for i in range(vocab_size)] == [
        i in chosen for i in range(vocab_size)
    ]


def test_vocabulary_by_frequency_breaks_ties_by_id() -> None:
    vocab = VocabMap.by_frequency(torch.tensor([1, 5, 0, 5, 1, 1]), 3)
    assert vocab.draft_to_target.tolist() == [0, 1, 3]
    assert vocab.d2t().tolist() == [0, 0, 1]


def test_a_cached_vocabulary_belongs_to_its_tokenizer_data_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = torch.tensor([1, 5, 0, 5, 1, 1])
    first = cached_vocabulary(counts, 3, "tokenizer", tmp_path)
    assert first.draft_to_target.tolist() == [0, 1, 3] and first.coverage(counts) == 11 / 13
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(VocabMap, "by_frequency", None)  # read, not chosen again
        assert cached_vocabulary(counts, 3, "tokenizer", tmp_path).draft_to_target.tolist() == [0, 1, 3]
    others = [(counts, 2, "tokenizer"), (counts, 3, "another"), (torch.tensor([1, 5, 0, 5, 2, 1]), 3, "tokenizer")]
    assert [cached_vocabulary(*other, tmp_path).draft_to_target.tolist() for other in others] == [
        [1, 3],
        [0, 1, 3],
        [1, 3, 4],
    ]
    assert len(list(tmp_path.iterdir())) == 4
    offsets = load_file(file)["d2t"]
    assert offsets.tolist() == [0, 0, 1]  # offsets, as everywhere on disk


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [5, 6, 40], [-1, 2], []])
def test_damaged_vocabularies_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="draft vocabulary"):
        VocabMap(torch.tensor(ids, dtype=torch.int64), 40)


def test_target_ids_outside_are_an_error_not_a_draft_id() -> None:
    with pytest.raises(AssertionError, match="outside the draft vocabulary"):
        VocabMap(torch.tensor([1, 3]), 6).to_draft(torch.tensor([3, 2]))
