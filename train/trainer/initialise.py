"""The drafter to start from (the target's own parts, random, or a directory) and its draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.chat.render import Example
from drafters.base.errors import UserError
from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.eagle3_ssd.config import DrafterConfig, default_taps
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.rope import RopeScaling, scaling_of_target
from drafters.eagle3_ssd.vocab import VocabMap, cached_vocabulary
from drafters.targets.model import usable, whole
from drafters.targets.taps import tap_features
from drafters.targets.target import Target
from train.config import DrafterSettings


class Start(NamedTuple):
    """Where training starts from; `notes` are lines for the user, `coverage` the draft vocabulary's share of the
    supervised tokens.
    """

    drafter: Eagle3Drafter
    vocab: VocabMap
    notes: list[str]
    coverage: float


def start(settings: DrafterSettings, target: Target, examples: Sequence[Example], seed: int, cache: Path) -> Start:
    """The drafter that the settings ask for, in fp32, with the target's embeddings, and its draft vocabulary (kept in
    `cache`).
    """
    counts = supervised_counts(examples, target.facts.vocab_size)
    if settings.init not in ("target", "random"):
        return _from_directory(settings, target, counts)
    vocab = cached_vocabulary(counts, settings.draft_vocab_size, target.facts.tokenizer_hash, cache)
    covered = vocab.coverage(counts)
    notes = [f"draft vocabulary: {len(vocab)} of {len(counts)} tokens cover {covered:.2%} of the supervised tokens"]
    torch.manual_seed(seed)
    scaling, cannot_follow = scaling_of_target(target.facts.rope_parameters)
    notes += [cannot_follow] if cannot_follow else []
    drafter = Eagle3Drafter(_config(settings, target, scaling))
    drafter.embed_tokens.weight.data.copy_(target.embed_weight)
    if settings.init == "target":
        notes += take_over(drafter, target, vocab)
    set_norms(drafter, settings, target, examples)
    return Start(drafter, vocab, notes, covered)


SCALE_TOKENS = 256  # tokens of each of so many conversations that the scale of the target's features is measured on
SCALE_EXAMPLES = 8


@torch.no_grad()
def set_norms(drafter: Eagle3Drafter, settings: DrafterSettings, target: Target, examples: Sequence[Example]) -> None:
    """Start the norms of features and taps at the scale of the target's upper tap, and freeze those that are to stay
    there.
    """
    norms = {"feature_norm": drafter.feature_norm, "fc_norm": drafter.fc_norm}
    if not any(norms.values()):
        return
    scale = feature_scale(target, examples, drafter.config.tap_hidden_states_ids[-1])
    for name, module in norms.items():
        for parameter in module.parameters() if module is not None else ():
            parameter.fill_(scale).requires_grad_(getattr(settings, name) == "learnt")


def feature_scale(target: Target, examples: Sequence[Example], tap: int) -> float:
    """The median root mean square of a tap over tokens of the data, as a number that bf16 holds.

    The first tokens of a text carry activations hundreds of times as large: an average would be theirs.
    """
    sizes = []
    for example in examples[:SCALE_EXAMPLES]:
        token_ids = torch.tensor([example.token_ids[:SCALE_TOKENS]], device=target.device)
        places = torch.arange(token_ids.shape[1], device=target.device)[None]
        taps = tap_features(target, token_ids, places, torch.ones_like(token_ids), [tap]).taps_BTC
        sizes.append(taps[0].float().pow(2).mean(-1).sqrt())
    return torch.cat(sizes).median().bfloat16().item()


def supervised_counts(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """int64 [V]: how often each target id occurs in the answers."""
    tokens = [
        token for example in examples for token, turn in zip(example.token_ids, example.turn_ids, strict=True) if turn
    ]
    if not tokens:
        raise UserError(
            "the training data hold no answer tokens; give conversations with assistant turns (data.paths)"
        )
    return torch.bincount(torch.tensor(tokens), minlength=vocab_size)


@torch.no_grad()
def take_over(drafter: Eagle3Drafter, target: Target, vocab: VocabMap) -> list[str]:
    """Start from the target: head rows, final norm and last layers, `fc` passing the upper tap. Returns what could not
    be taken.

    The first layer's attention reads [token | feature]: the target's weights go to the feature half, and the token
    half starts small. With n layers the drafter's are the target's last n.
    """
    config = drafter.config
    if config.hidden_size != config.target_hidden_size:
        return [
            f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: layers start at random"
        ]
    drafter.lm_head.weight.copy_(target.lm_head_weight[vocab.draft_to_target] * target.head.law.scale)
    upper = torch.eye(config.hidden_size)
    drafter.fc.weight.copy_(torch.cat((0.0 * upper, 0.0 * upper, upper), dim=1) + 0.01 * drafter.fc.weight)
    notes = _copy(drafter.norm, getattr(target.model.get_decoder(), "norm", nn.Module()), "final norm: ")
    count = config.num_hidden_layers
    for index, source in enumerate(target.layers[-count:]):
        notes += _copy(drafter.midlayer if index == 0 else drafter.layers[str(index)], source, f"layer {index}: ")
    return notes


def _copy(own: nn.Module, source: nn.Module, where: str) -> list[str]:
    theirs = dict(source.named_parameters())
    notes = []
    for name, parameter in own.named_parameters():
        first_layer_name = name.replace("hidden_norm", "input_layernorm")  # the feature side carries the target's norm
        if name == "input_layernorm.weight" and hasattr(own, "hidden_norm"):
            continue  # the token side: embeddings are no layer's input, the norm starts at one
        given = theirs.get(first_layer_name)
        if given is None:
            notes.append(f"{where}{name} has no counterpart in the target and starts at random")
            continue
        given = whole(given)
        if not usable(given):
            notes.append(f"{where}{name} is quantised in the target ({given.dtype}) and starts at random")
        elif given.shape == parameter.shape:
            parameter.copy_(given)
        elif given.shape[0] == parameter.shape[0] and 2 * given.shape[-1] == parameter.shape[-1]:
            token_half = 0.1 * parameter[:, : given.shape[-1]]
            parameter.copy_(torch.cat((token_half, given.to(parameter)), dim=1))
        else:
            notes.append(
                f"{where}{name} has shape {tuple(parameter.shape)}, the target's {tuple(given.shape)}: "
                "it starts at random"
            )
    return notes


def _from_directory(settings: DrafterSettings, target: Target, counts_V: Tensor) -> Start:
    loaded = load_drafter(settings.init, target.facts, target.embed_weight, torch.float32)
    config = loaded.config
    found = {
        "num_hidden_layers": config.num_hidden_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_output": config.norm_output,
    }
    for name, value in found.items():
        asked = getattr(settings, name)
        if name in settings.model_fields_set and asked != value:
            raise UserError(
                f"drafter.{name} = {asked}, but drafter.init = {settings.init} has {value}: "
                "leave it out or take init 'target'"
            )
    for name, module in (("feature_norm", loaded.model.feature_norm), ("fc_norm", loaded.model.fc_norm)):
        asked = getattr(settings, name)
        if name in settings.model_fields_set and (asked != "none") != (module is not None):
            has = "none" if module is None else "one"
            raise UserError(
                f"drafter.{name} = {asked}, but drafter.init = {settings.init} has {has}: "
                "leave it out or take init 'target'"
            )
        for parameter in module.parameters() if module is not None else ():
            parameter.requires_grad_(asked == "learnt")
    layers, size = config.num_hidden_layers, config.draft_vocab_size
    covered = loaded.vocab.coverage(counts_V)
    note = (
        f"going on from {settings.init}: {layers} layers, draft vocabulary {size}, "
        f"which covers {covered:.2%} of the supervised tokens"
    )
    return Start(loaded.model, loaded.vocab, [note, *loaded.warnings], covered)


def _config(settings: DrafterSettings, target: Target, scaling: RopeScaling | None) -> DrafterConfig:
    facts = target.facts
    return DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        num_hidden_layers=settings.num_hidden_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=facts.max_position_embeddings,
        vocab_size=facts.vocab_size,
        draft_vocab_size=settings.draft_vocab_size,
        target_hidden_size=facts.hidden_size,
        tap_hidden_states_ids=settings.tap_hidden_states_ids or default_taps(facts.num_hidden_layers),
        fc_norm=settings.fc_norm != "none",
        feature_norm=settings.feature_norm != "none",
        norm_output=settings.norm_output,
    )
