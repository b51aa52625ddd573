"""A tiny target in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from tests.tiny import SPECIALS, tiny_model, tiny_tokenizer

MERGED = 259  # the token behind those of the tiny tokenizer


def write_gguf(path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> Path:
    """A tiny target as llama.cpp's converter writes it: rotary pairs interleaved in q and k; one merged token, `ab`.

    `kind` is what matrices are stored as.
    """
    model, tokenizer = tiny_model(vocab_size=MERGED + 1), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(list(range(MERGED))), "ab"])
    writer.add_token_types([3] * len(SPECIALS) + [1] * (MERGED + 1 - len(SPECIALS)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(str(tokenizer.chat_template))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else 2
            array = np.ascontiguousarray(array.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(array.shape))
        place = names.get_name(name, (".weight",))
        assert place is not None, name
        stored = kind if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(place, gguf.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
