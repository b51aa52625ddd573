"""Which families of models can be targets: `python -m drafters.targets.families` makes the table.

For each causal-LM class of the installed transformers a tiny random model is made, saved and loaded as any target is.
It either computes what transformers computes, in fp32: the logits of a forward over a prompt, and greedy tokens over
paged keys, beside another request. Or it is refused, by a line that names the field of its config that is the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.base.errors import CommandParser, UserError, run_command, unknown_name
from drafters.targets.taps import tap_features
from drafters.targets.target import Target, load_target
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import PagedContext, PagedRequest

VOCAB, LAYERS, LENGTH = 259, 6, 512
CLOSE = 1e-4  # between our logits and transformers', fp32
PROMPT, NEW_TOKENS = 24, 12

# Sizes by the names that configs have for them; each is given where a config has it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size",), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp", "d_inner", "dff", "dim_ff"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size",), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_dim", "d_head", "dim_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), LENGTH),
    **dict.fromkeys(("model_max_length", "max_target_positions", "original_max_position_embeddings"), LENGTH),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "router_hidden_size", "adapter_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_num_heads", "time_step_rank", "mamba_dt_rank", "rotary_dim", "d_rel"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_d_ssm": 64,
    "index_topk": 64,
    "num_kv_shared_layers": 0,
    "is_decoder": True,
    **dict.fromkeys(("pad_token_id", "eos_token_id"), 2),
    "bos_token_id": 1,
}
# Given where the default is None too, because models cannot be made without.
FILLED = (
    *("num_key_value_heads", "head_dim", "num_experts_per_tok", "n_routed_experts"),
    *("pad_token_id", "eos_token_id", "bos_token_id"),
)

# What a family needs beside, or in place of, SIZES; LEFT_OUT is not given.
LEFT_OUT = object()
QSA = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8},
    **{"indexer_budget": 8, "indexer_compress_ratio": 2},
}
FULL = ["full_attention"] * LAYERS
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"vocab_size": VOCAB, "encoder_hash_byte_group_vocab": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "logit_scale": 0.25,
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"layer_types": FULL},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 8},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), {"logits_scaling": 8.0}),
    "hyperclovax": {"logits_scaling": 0.5},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "qwen4_exp": {"text_config": QSA},
    "qwen4_exp_text": QSA,
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Configs that people have beside a family's default: what is refused without one field, or with one.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo, attention_types global": ("gpt_neo", {"attention_types": [[["global"], LAYERS]]}),
    "lfm2, layer_types full_attention": ("lfm2", {"layer_types": FULL}),
    "mistral, sliding_window None": ("mistral", {"sliding_window": None}),
    "mixtral, sliding_window 8": ("mixtral", {"sliding_window": 8}),
    "phi3, sliding_window 8": ("phi3", {"sliding_window": 8}),
    "qwen2, use_sliding_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "starcoder2, sliding_window 8": ("starcoder2", {"sliding_window": 8}),
    "exaone4, layer_types full_attention": ("exaone4", {"sliding_window": None, "layer_types": FULL}),
    "olmo3, layer_types full_attention": ("olmo3", {"layer_types": FULL}),
    "cohere2, layer_types full_attention": ("cohere2", {"layer_types": FULL, "logit_scale": 0.5}),
    "gemma2, layer_types full_attention": ("gemma2", {"layer_types": FULL}),
    "gemma2, no soft-capped scores": ("gemma2", {"layer_types": FULL, "attn_logit_softcapping": None}),
    "gemma3_text, layer_types full_attention": ("gemma3_text", {"layer_types": FULL}),
}


class Verdict(StrEnum):
    """What became of a family."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERS = "DIFFERS"  # a mistake of ours
    NO_CONFIG = "no tiny config"


class Row(NamedTuple):
    """One line of the table; `about` is the reason, or how close it is."""

    family: str
    kind: str  # the class
    verdict: Verdict
    about: str


def families() -> Mapping[str, str]:
    """Model types of the installed transformers that have a causal-LM class, with its name; and VARIANTS."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return known | {name: known[own] for name, (own, _) in VARIANTS.items()}


def tiny_config(family: str) -> Any:
    """A config of this model type with SIZES. Raises whatever the config's own checks raise."""
    from transformers import CONFIG_MAPPING

    own, more = VARIANTS.get(family, (family, {}))
    return _tiny(CONFIG_MAPPING[own], {**OVERRIDES.get(own, {}), **more})


def _tiny(kind: Any, overrides: Mapping[str, Any]) -> Any:
    default = vars(kind(**{name: overrides[name] for name in overrides.get("default", ())}))  # without properties
    given = {
        name: value
        for name, value in SIZES.items()
        if name in default and (default[name] is not None or name in FILLED)
    }
    for name in getattr(kind, "sub_configs", None) or {}:
        if default.get(name) is not None:
            given[name] = _tiny(type(default[name]), overrides.get(name, {}))
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = given.get("num_attention_heads")  # latent keys have no groups
    parts = {name for name in given if isinstance(overrides.get(name), dict) and hasattr(given[name], "to_dict")}
    given |= {name: value for name, value in overrides.items() if name != "default" and name not in parts}
    return kind(**{name: value for name, value in given.items() if value is not LEFT_OUT})


def save_tiny(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a random model with clear argmaxes, and a tokenizer of bytes, as a transformers directory."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    numbers = sum(weight.numel() for weight in model.parameters())
    if numbers > 2e7:
        raise ValueError(f"{numbers} weights: not tiny")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5, generator=generator)
            else:  # norms away from one, biases away from zero: what is left out is seen
                weight.add_(torch.empty_like(weight).normal_(0.0, 0.1, generator=generator))
    model.save_pretrained(directory)
    _byte_tokenizer().save_pretrained(directory)
    return directory


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


def prompts() -> list[list[int]]:
    """Two prompts of unequal length."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (PROMPT, PROMPT // 2 + 1)]


def plain_model(directory: Path) -> Any:
    """The model as transformers loads it, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def plain_greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """A plain loop of whole forwards."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def our_logits(target: Target, prompt: Sequence[int]) -> Tensor:
    """[T, V], by the forward that features are made with."""
    ids = torch.tensor([list(prompt)])
    places = torch.arange(len(prompt))[None]
    return target.head(tap_features(target, ids, places, torch.ones_like(ids), (2, 3, 4)).last_hidden_BTH[0])


@torch.no_grad()
def our_greedy(target: Target, both: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The prompts answered together over paged keys."""
    pool = KvPool.of_shape(
        target.facts.num_hidden_layers, len(both), PROMPT + new_tokens, target.facts.kv, target.embed_weight
    )
    rows, done = [list(prompt) for prompt in both], [0] * len(both)
    for _ in range(new_tokens):
        fresh = [row[start:] for row, start in zip(rows, done, strict=True)]
        requests = [
            PagedRequest((i,), len(row), len(new)) for i, (row, new) in enumerate(zip(rows, fresh, strict=True))
        ]
        places = [place for row, start in zip(rows, done, strict=True) for place in range(start, len(row))]
        output = target.model.get_decoder()(
            input_ids=torch.tensor([sum(fresh, [])]),
            position_ids=torch.tensor([places]),
            use_cache=False,
            context=PagedContext.build(pool, requests, target.device),
        )
        last = torch.tensor([len(new) for new in fresh]).cumsum(0) - 1
        done = [len(row) for row in rows]
        for row, token in zip(rows, target.head(output.last_hidden_state[0, last]).argmax(-1).tolist(), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, both, strict=True)]


def row_of(family: str) -> Row:
    """The line of one family."""
    kind = families()[family]
    with tempfile.TemporaryDirectory(prefix="ssd-drafters-family-") as folder, _quiet():
        try:
            place = save_tiny(family, Path(folder) / family)
            plain = plain_model(place)
        except Exception as error:  # what a config's own checks, or a model's code, say to our sizes
            return Row(family, kind, Verdict.NO_CONFIG, f"{type(error).__name__}: {_line(error)[:120]}")
        try:
            target = load_target(str(place), "float32")
        except UserError as error:
            return Row(family, kind, Verdict.REFUSED, _line(error).replace(str(place), "").removeprefix("target '' "))
        load_target(str(place), "bfloat16")
        return _compared(family, kind, target, plain)


def _compared(family: str, kind: str, target: Target, plain: Any) -> Row:
    both = prompts()
    with torch.no_grad():
        theirs = plain(input_ids=torch.tensor(both[:1]), use_cache=False).logits[0]
    ours = our_logits(target, both[0])
    far = float((ours - theirs).abs().max())
    if not far <= CLOSE:
        return Row(family, kind, Verdict.DIFFERS, f"logits differ by {far:.2g} of {float(theirs.abs().max()):.1f}")
    expected = [plain_greedy(plain, prompt, NEW_TOKENS) for prompt in both]
    if our_greedy(target, both, NEW_TOKENS) != expected:
        return Row(family, kind, Verdict.DIFFERS, "greedy tokens differ")
    law = target.head.law
    parts = [f"logits within {far:.0e}"]
    parts += [f"scaled by {law.scale:g}"] * (law.scale != 1.0) + [f"soft-capped at {law.softcap}"] * bool(law.softcap)
    parts += ["head with a bias"] * (target.head.bias is not None)
    return Row(family, kind, Verdict.EQUAL, "; ".join(parts))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    noise = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(noise), contextlib.redirect_stdout(noise):
        warnings.simplefilter("ignore")
        yield


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def markdown(rows: Sequence[Row]) -> str:
    """The table, with its sums above."""
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    said = ", ".join(f"{number} {verdict.value}" for verdict, number in counts.items() if number)
    lines = [f"{len(rows)} families: {said}.", "", "| model_type | class | | |", "|---|---|---|---|"]
    lines += [f"| {r.family} | {r.kind} | {r.verdict.value} | {r.about.replace('|', chr(92) + '|')} |" for r in rows]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The table on stdout; 1 where a family differs, or ends in a traceback."""
    parser = CommandParser(
        "python -m drafters.targets.families", __doc__ or "", "  python -m drafters.targets.families granite phi"
    )
    parser.add_argument("family", nargs="*", help="model types (default: all)")
    chosen: argparse.Namespace = parser.parse_args(argv)
    known = families()
    for name in chosen.family:
        if name not in known:
            raise unknown_name("family", name, known)
    rows = []
    for name in chosen.family or known:
        rows.append(row_of(name))
        print(f"{name}: {rows[-1].verdict.value}", file=sys.stderr, flush=True)
    print(markdown(rows))
    return int(any(row.verdict is Verdict.DIFFERS for row in rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
