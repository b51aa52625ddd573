"""Identity and facts of a target: hashes of weights, tokenizer and chat template, and sizes from its config.

Drafter cards and data manifests keep the hashes: a drafter serves the target whose text it was trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drafters.base.errors import UserError
from drafters.targets.files import resolve_target
from infer.kernels.attention.kv_pool import KvShape

# Keys of a config that say how the weights were loaded, not what they are.
LOADING_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}


class TargetIdentity(NamedTuple):
    """Hashes of a target's weights, tokenizer and chat template."""

    weight_hash: str
    tokenizer_hash: str
    template_hash: str


@dataclass(frozen=True)
class TargetFacts:
    """Name, hashes and sizes of a target, as drafters, cards and manifests need them."""

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
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)  # transformers 5: theta, type, scaling
    kv: KvShape = KvShape(0, 0, 0)  # what a token leaves in each layer's pool (`support.examine` finds it)

    @property
    def identity(self) -> TargetIdentity:
        """Its hashes."""
        return TargetIdentity(self.weight_hash, self.tokenizer_hash, self.template_hash)


def identify(spec: str, cache_dir: Path | None = None) -> TargetIdentity:
    """The identity of a target as `load_target` gives it, without loading its weights."""
    from transformers import AutoConfig

    path = resolve_target(spec, cache_dir)
    tokenizer = read_tokenizer(spec, path)
    return TargetIdentity(
        _weight_hash(Path(path), AutoConfig.from_pretrained(path)),
        tokenizer_hash(tokenizer),
        template_hash(tokenizer),
    )


def load_tokenizer(spec: str, cache_dir: Path | None = None) -> Any:
    """The tokenizer of a target alone. Raises `UserError` as `load_target` does."""
    return read_tokenizer(spec, resolve_target(spec, cache_dir))


def read_tokenizer(spec: str, path: str) -> Any:
    """The tokenizer in `path`, where `resolve_target` found the target `spec`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target {spec!r} could not be loaded from {path}: {error}") from error


def facts_of(spec: str, path: Path, model: Any, tokenizer: Any, kv: KvShape) -> TargetFacts:
    """The facts of a loaded transformers model, whose files lie in `path`."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some models state it for each kind of layer
    return TargetFacts(
        name=spec,
        weight_hash=_weight_hash(path, model.config),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
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


def template_hash(tokenizer: Any) -> str:
    """Identity of a chat template: its text."""
    return _sha256(str(tokenizer.chat_template).encode())


def _weight_hash(path: Path, config: Any) -> str:
    """Hash of a directory's safetensors (name, size, first and last MiB of each), else of the config."""
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
        content = {key: value for key, value in config.to_dict().items() if key not in LOADING_KEYS}
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
