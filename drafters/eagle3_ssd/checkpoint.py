"""Saving and loading a drafter directory: `model.safetensors` (EAGLE-3 keys), `config.json` and the drafter card.

Loading is strict: a missing, unknown or misshaped tensor is an error (drafters/eagle3_ssd/README.md, section 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base.errors import UserError
from drafters.base.files import atomic_write_directory
from drafters.eagle3_ssd.card import DrafterCard, read_card, write_card
from drafters.eagle3_ssd.config import DrafterConfig, from_config_json, to_config_json
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap

if TYPE_CHECKING:
    from drafters.targets.identity import TargetFacts

WEIGHTS_FILE = "model.safetensors"
EMBEDDINGS = "embed_tokens.weight"


class DrafterFiles(NamedTuple):
    """The checked content of a drafter directory; `tensors` hold `embed_tokens.weight` only where the file does."""

    config: DrafterConfig
    card: DrafterCard
    vocab: VocabMap
    tensors: dict[str, Tensor]


class LoadedDrafter(NamedTuple):
    """A drafter read from a directory. `warnings` say, line by line, in what the target differs from the drafter's."""

    model: Eagle3Drafter
    vocab: VocabMap
    config: DrafterConfig
    card: DrafterCard
    warnings: list[str]


def save_drafter(
    directory: str | Path, model: Eagle3Drafter, vocab: VocabMap, card: DrafterCard, with_embeddings: bool = False
) -> Path:
    """Write the canonical directory in bf16, whole or not at all (see `write_files`).

    The embeddings are the target's and left out, unless the drafter was read with its own or another engine has to
    read the file.
    """
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    if not with_embeddings and not model.own_embeddings:
        del tensors[EMBEDDINGS]
    return write_files(directory, {**tensors, **vocab_tensors(vocab)}, to_config_json(model.config), card)


def write_files(
    directory: str | Path, tensors: Mapping[str, Tensor], config_json: Mapping[str, Any], card: DrafterCard
) -> Path:
    """Write the three files atomically: an interrupted write leaves the old directory as it was."""

    def write(place: Path) -> None:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, place / WEIGHTS_FILE, metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
        write_card(place, card)

    return atomic_write_directory(Path(directory), write)


def vocab_tensors(vocab: VocabMap) -> dict[str, Tensor]:
    """`d2t` (offsets) and `t2d` (membership), as checkpoints hold them."""
    return {"d2t": vocab.d2t().cpu(), "t2d": vocab.t2d().cpu()}


def read_files(directory: str | Path) -> DrafterFiles:
    """Read a drafter directory, strictly: a missing, extra or misshaped tensor is a `UserError` that names it."""
    place = Path(directory)
    config = from_config_json(read_config_json(place), str(place / "config.json"))
    card = read_card(place)
    tensors = _read_tensors(place / WEIGHTS_FILE)
    vocab = take_vocab(tensors, config, place / WEIGHTS_FILE)
    check_tensors(config, tensors, place / WEIGHTS_FILE)
    return DrafterFiles(config, card, vocab, tensors)


def load_drafter(
    directory: str | Path,
    target_facts: TargetFacts | None = None,
    embed_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedDrafter:
    """Read a drafter directory as a model; strict, like `read_files`.

    `embed_tokens` [V, H] are the target's, needed where the file leaves them out. With `target_facts`, a drafter made
    for another tokenizer, vocabulary or hidden size is refused; other target weights or another chat template are
    warnings.
    """
    config, card, vocab, tensors = read_files(directory)
    warnings = [] if target_facts is None else check_fits(config, card, target_facts, str(directory))
    if EMBEDDINGS not in tensors and embed_tokens is None:
        raise UserError(
            f"{directory} holds no {EMBEDDINGS}: it takes the target's embeddings; load it together with its target"
        )
    model = model_of(config, tensors, embed_tokens, dtype, device)
    return LoadedDrafter(model, vocab.to(device), config, card, warnings)


def model_of(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    embed_tokens: Tensor | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Drafter:
    """The drafter with the parameters `tensors`; the target's `embed_tokens` [V, H] stand in where they hold none."""
    whole = dict(tensors)
    if EMBEDDINGS not in whole:
        assert embed_tokens is not None, f"no {EMBEDDINGS} among {len(whole)} tensors, and none from the target"
        whole[EMBEDDINGS] = embed_tokens.detach()
    check_tensors(config, whole, "the drafter with its target's embeddings")
    with torch.device("meta"):
        model = Eagle3Drafter(config)
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in whole.items()}, strict=True, assign=True)
    model.embed_tokens.weight.requires_grad_(False)
    model.own_embeddings = EMBEDDINGS in tensors
    return model


def check_fits(config: DrafterConfig, card: DrafterCard, facts: TargetFacts, where: str) -> list[str]:
    """Warnings about differences between the target and the one the drafter was trained for.

    Raises `UserError` for another tokenizer, vocabulary size or hidden size, with which it cannot work.
    """
    needs = "use the target named in its card, or train a drafter for this one"
    for name, made_for, given in (
        ("tokenizer", card.tokenizer_hash, facts.tokenizer_hash),
        ("vocabulary size", config.vocab_size, facts.vocab_size),
        ("hidden size", config.target_hidden_size, facts.hidden_size),
    ):
        if made_for is not None and made_for != given:
            raise UserError(
                f"drafter {where} was made for {name} {made_for} (target {card.target}), "
                f"{facts.name} has {given}; {needs}"
            )
    warnings = []
    if card.tokenizer_hash is None:
        warnings.append(
            f"drafter {where} was imported without its target: nobody compared its tokenizer with that of {facts.name}"
        )
    for name, made_for, given in (
        ("weights", card.target_weight_hash, facts.weight_hash),
        ("chat template", card.template_hash, facts.template_hash),
    ):
        if made_for is not None and made_for != given:
            warnings.append(
                f"drafter {where} was trained on other target {name} ({card.target}): expect lower acceptance"
            )
    return warnings


def read_config_json(place: Path) -> dict[str, Any]:
    """The content of a drafter directory's `config.json`, in whatever format."""
    file = place / "config.json"
    if not file.is_file():
        raise UserError(f"no such file: {file}; a drafter is a directory with config.json and its weights")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} has to hold an object, not a {type(content).__name__}")
    return content


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(
            f"no such file: {file}; drafters are read from safetensors only "
            "(python -m drafters.convert import reads others)"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(
            f"{file} is not a readable safetensors file ({error}); copy or train the drafter again"
        ) from error


def take_vocab(tensors: dict[str, Tensor], config: DrafterConfig, where: Path | str) -> VocabMap:
    """Take `d2t` and `t2d` out of `tensors`; they have to fit each other and the configured sizes."""
    if "d2t" not in tensors:
        raise UserError(f"{where}: tensor 'd2t' is missing; without it draft ids cannot be translated")
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d", None)
    if tuple(d2t.shape) != (config.draft_vocab_size,):
        raise UserError(
            f"{where}: tensor 'd2t' has shape {tuple(d2t.shape)}, config.json says ({config.draft_vocab_size},)"
        )
    vocab = VocabMap.from_offsets(d2t, config.vocab_size)
    if t2d is None or t2d.shape != (config.vocab_size,) or not torch.equal(t2d.bool(), vocab.t2d()):
        raise UserError(f"{where}: tensor 't2d' is missing or disagrees with 'd2t'; export the drafter again")
    return vocab


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Refuse, by name, a tensor that is missing, unknown or misshaped. Embeddings may be left out: they are the
    target's.
    """
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Eagle3Drafter(config).state_dict().items()}
    for name in sorted(expected.keys() - tensors.keys() - {EMBEDDINGS}):
        raise UserError(
            f"{where}: tensor {name!r} is missing; "
            "the drafter is incomplete, or its config.json belongs to another one"
        )
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(
            f"{where}: tensor {name!r} is unknown to this drafter (variants with other parts are not supported)"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                f"{where}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {expected[name]}"
            )
