"""A tiny target made on the spot: a byte-level tokenizer with a ChatML template and a random Llama that fits in a
megabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.eagle3_ssd.card import DrafterCard, Measured, OutcomeLaw
from drafters.eagle3_ssd.checkpoint import save_drafter
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.target import Target

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, plus three special ones: 259 entries, `<|im_end|>` ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIALS})
    fast.chat_template = template
    return fast


def tiny_model(seed: int = 0, layers: int = 6, vocab_size: int = 259, sharpness: float = 4.0) -> LlamaForCausalLM:
    """A random Llama: hidden 32, 4 heads, 2 kv heads, in fp32. `sharpness` scales the head, so that argmaxes are
    clear.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, sharpness / 32**0.5 if "lm_head" in name else 1.5 / 32**0.5)
    return model


def save_tiny_target(
    directory: Path, seed: int = 0, layers: int = 6, vocab_size: int = 259, sharpness: float = 4.0
) -> Path:
    """Write tokenizer and model as a transformers directory; `--target DIRECTORY` loads it."""
    tiny_model(seed, layers, vocab_size, sharpness).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def save_tiny_drafter(
    directory: Path,
    target: Target,
    layers: int = 1,
    draft_vocab_size: int = 200,
    seed: int = 1,
    norms: Sequence[str] = (),
) -> Path:
    """Write a random drafter for a tiny target, with a card whose tables let every policy run. `norms`: config
    switches to set.
    """
    torch.manual_seed(seed)
    facts = target.facts
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=layers,
        rms_norm_eps=1e-6,
        rope_theta=facts.rope_theta,
        max_position_embeddings=facts.max_position_embeddings,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=facts.hidden_size,
        tap_hidden_states_ids=(2, 3, 4),
        fc_norm="fc_norm" in norms,
        feature_norm="feature_norm" in norms,
        norm_output="norm_output" in norms,
    )
    model = Eagle3Drafter(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2 and weight.requires_grad:
                weight.normal_(0.0, 1.5 / weight.shape[1] ** 0.5)
        for name, weight in model.named_parameters():
            if (
                norms and "norm" in name
            ):  # a stream as large as a trained one: what a random layer adds to a small one is chaos
                weight.uniform_(4.0, 8.0) if name in ("feature_norm.weight", "norm.weight") else weight.uniform_(
                    0.5, 1.5
                )
        model.embed_tokens.weight.copy_(target.embed_weight)
    table = Measured(reach=(0.5, 0.2, 0.1, 0.1, 0.1), recall=((0.2, 0.3, 0.4),) * 5)
    card = DrafterCard(
        target=facts.name,
        target_weight_hash=facts.weight_hash,
        tokenizer_hash=facts.tokenizer_hash,
        template_hash=facts.template_hash,
        lookahead=4,
        trained_depth=9,
        trained_length=512,
        law=OutcomeLaw(a=0.5, r=0.5, miss_rejected=0.8, miss_accepted=0.7),
        measured_fresh=table,
        measured_lagged=table,
    )
    ids = torch.randperm(facts.vocab_size)[:draft_vocab_size].sort().values
    return save_drafter(directory, model, VocabMap(ids, facts.vocab_size), card)
