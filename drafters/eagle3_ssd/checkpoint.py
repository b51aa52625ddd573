"""The canonical drafter directory: `model.safetensors` (EAGLE-3 keys, bf16), `config.json` and the card. Loading is strict."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.eagle3_ssd.card import DrafterCard, read_card, write_card
from drafters.eagle3_ssd.config import DrafterConfig, from_config_json, to_config_json
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.errors import UserError

if TYPE_CHECKING:
    from drafters.targets import TargetFacts

WEIGHTS_FILE = "model.safetensors"
EMBEDDINGS = "embed_tokens.weight"


class LoadedDrafter(NamedTuple):
    """A drafter read from a directory. `warnings` are lines for the user: the drafter works, but was made for something else."""

    model: Eagle3Drafter
    vocab: VocabMap
    config: DrafterConfig
    card: DrafterCard
    warnings: list[str]


def save_drafter(directory: str | Path, model: Eagle3Drafter, vocab: VocabMap, card: DrafterCard, with_embeddings: bool = False) -> Path:
    """Write the canonical directory, beside and then renamed, so that an interrupted write leaves the old one whole.

    The embeddings are the target's: they are left out unless another engine has to read the file.
    """
    final = Path(directory)
    beside = final.with_name(f".{final.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if not with_embeddings:
        del tensors[EMBEDDINGS]
    tensors["d2t"], tensors["t2d"] = vocab.d2t().cpu(), vocab.t2d().cpu()
    save_file(tensors, beside / WEIGHTS_FILE, metadata={"format": "pt"})
    (beside / "config.json").write_text(json.dumps(to_config_json(model.config), indent=2) + "\n", encoding="utf-8")
    write_card(beside, card)
    _replace_directory(beside, final)
    return final


def load_drafter(
    directory: str | Path,
    target_facts: TargetFacts | None = None,
    embed_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedDrafter:
    """Read a drafter directory, strictly: a missing, extra or misshaped tensor is a `UserError` that names it.

    `embed_tokens` [V, H] are the target's, needed where the file leaves them out. With `target_facts`, a drafter made for
    another tokenizer, vocabulary or hidden size is refused; other target weights or another chat template are warnings.
    """
    place = Path(directory)
    config = _read_config(place)
    card = read_card(place)
    warnings = [] if target_facts is None else check_fits(config, card, target_facts, str(place))
    tensors = _read_tensors(place / WEIGHTS_FILE)
    vocab = _take_vocab(tensors, config, place)
    if EMBEDDINGS not in tensors:
        if embed_tokens is None:
            raise UserError(f"{place} holds no {EMBEDDINGS}: it takes the target's embeddings; load it together with its target")
        tensors[EMBEDDINGS] = embed_tokens.detach()
    with torch.device("meta"):
        model = Eagle3Drafter(config)
    _check_tensors(model, tensors, place / WEIGHTS_FILE)
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    model.load_state_dict(placed, strict=True, assign=True)
    model.embed_tokens.weight.requires_grad_(False)
    return LoadedDrafter(model, vocab.to(device), config, card, warnings)


def check_fits(config: DrafterConfig, card: DrafterCard, facts: TargetFacts, where: str) -> list[str]:
    """Refuse a drafter that cannot serve this target; return warnings where it can, but was made for something else."""
    needs = "use the target named in its card, or train a drafter for this one"
    for name, made_for, given in (
        ("tokenizer", card.tokenizer_hash, facts.tokenizer_hash),
        ("vocabulary size", config.vocab_size, facts.vocab_size),
        ("hidden size", config.target_hidden_size, facts.hidden_size),
    ):
        if made_for != given:
            raise UserError(f"drafter {where} was made for {name} {made_for} (target {card.target}), {facts.name} has {given}; {needs}")
    warnings = []
    for name, made_for, given in (
        ("weights", card.target_weight_hash, facts.weight_hash),
        ("chat template", card.template_hash, facts.template_hash),
    ):
        if made_for != given:
            warnings.append(f"drafter {where} was trained on other target {name} ({card.target}): expect lower acceptance")
    return warnings


def _read_config(place: Path) -> DrafterConfig:
    file = place / "config.json"
    if not file.is_file():
        raise UserError(f"no such file: {file}; a drafter is a directory with config.json, {WEIGHTS_FILE} and its card")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    return from_config_json(content, str(file))


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(f"no such file: {file}; drafters are read from safetensors only")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is not a readable safetensors file ({error}); copy or train the drafter again") from error


def _take_vocab(tensors: dict[str, Tensor], config: DrafterConfig, place: Path) -> VocabMap:
    if "d2t" not in tensors:
        raise UserError(f"{place / WEIGHTS_FILE}: tensor 'd2t' is missing; without it draft ids cannot be translated")
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d", None)
    if tuple(d2t.shape) != (config.draft_vocab_size,):
        raise UserError(f"{place / WEIGHTS_FILE}: tensor 'd2t' has shape {tuple(d2t.shape)}, config.json says ({config.draft_vocab_size},)")
    vocab = VocabMap.from_offsets(d2t, config.vocab_size)
    if t2d is None or t2d.shape != (config.vocab_size,) or not torch.equal(t2d.bool(), vocab.t2d()):
        raise UserError(f"{place / WEIGHTS_FILE}: tensor 't2d' is missing or disagrees with 'd2t'; export the drafter again")
    return vocab


def _check_tensors(model: Eagle3Drafter, tensors: dict[str, Tensor], file: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{file}: tensor {name!r} is missing; the drafter is incomplete, or its config.json belongs to another one")
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{file}: tensor {name!r} is unknown to this drafter (variants with other parts are not supported)")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{file}: tensor {name!r} has shape {tuple(tensors[name].shape)}, config.json asks for {shape}")


def _replace_directory(beside: Path, final: Path) -> None:
    """Put `beside` in the place of `final`; a directory cannot be renamed over a full one, so the old one steps aside first."""
    aside = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(aside)
    beside.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
