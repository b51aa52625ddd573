"""Command that imports EAGLE-3 heads from other projects and exports drafters to the formats of other engines.

python -m drafters.convert import SOURCE --out DIR [--target T]
python -m drafters.convert export DRAFTER --to FORMAT --out DIR [--target T]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.base.errors import CommandParser, UserError, run_command
from drafters.formats.layouts import (
    FIRST_LAYER,
    READERS,
    Format,
    TargetNumbers,
    emit_config,
    refuse_unrepresentable,
    rename_first_layer,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3_ssd.card import DrafterCard
    from drafters.formats.foreign import ForeignDrafter
    from drafters.tap_probe import TapAgreement
    from drafters.targets.target import Target

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "prompts"
EMBEDDING_NAMES = tuple(
    f"{prefix}embed_tokens.weight" for prefix in ("model.", "model.language_model.", "language_model.model.")
)
USUAL_DEPTH, USUAL_LENGTH = 7, 2048  # of EAGLE-3's public heads, which do not state them
DESCRIPTION = "Import EAGLE-3 heads that other projects trained, and export drafters to the engines that read them."
EXAMPLES = """\
  python -m drafters.convert import path/to/eagle3-head --out runs/imported/mine-eagle3 --target TARGET
  python -m drafters.convert export runs/train/mine/best-eagle3 --to sglang --out runs/mine-eagle3 --target TARGET
  fine-tune what was imported:
  accelerate launch train/eagle3_selfcond.py --config RECIPE drafter.init=runs/imported/mine-eagle3"""
IMPORT_DESCRIPTION = """\
Read an EAGLE-3 head of EAGLE, SpecForge (SGLang), vLLM or speculators, and write it as a drafter directory: training
goes on from it (drafter.init), serving loads it. Pickled files are read for their tensors alone.

With --target it ends with a probe: the target answers a few prompts, and the drafter's agreement is shown at its taps
and at those one layer beside, since a wrong tap convention raises no error and costs nearly all acceptance."""
EXPORT_DESCRIPTION = """\
Write a drafter in the format of another engine: eagle, sglang (SpecForge too), vllm, speculators, or ssd (the SSD
reference engine). What a format cannot hold is refused by name. The embeddings are the target's; --target names it
where the drafter's file leaves them out."""


def main(argv: Sequence[str]) -> int:
    """The command."""
    options = parse(argv)
    return import_head(options) if options.action == "import" else export_drafter(options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `action` is import or export."""
    parser = CommandParser("python -m drafters.convert", DESCRIPTION, EXAMPLES)
    actions = parser.add_subparsers(dest="action", required=True, metavar="import|export")
    taking_in: Any = actions.add_parser(
        "import", description=IMPORT_DESCRIPTION, examples=EXAMPLES, help="read a head of another project"
    )
    taking_in.add_argument(
        "source", metavar="SOURCE", help="directory with config.json and .safetensors or .bin files, or a hub id"
    )
    taking_in.add_argument("--out", required=True, metavar="DIR", help="drafter directory to write; must not exist")
    taking_in.add_argument(
        "--target", metavar="T", help="the head's target: a directory, hub id, .gguf file or builtin:smollm2-135m"
    )
    taking_in.add_argument(
        "--taps", type=int, nargs=3, metavar="I", help="tap layers, as indices into hidden_states (input of layer I)"
    )
    taking_in.add_argument(
        "--target-layers", type=int, metavar="N", help="layers of the target, for default taps without --target"
    )
    depth, length = "steps it was unrolled in training", "tokens of the longest text it was trained on"
    taking_in.add_argument(
        "--trained-depth", type=int, default=USUAL_DEPTH, metavar="D", help=f"{depth} (default: {USUAL_DEPTH})"
    )
    taking_in.add_argument(
        "--trained-length", type=int, default=USUAL_LENGTH, metavar="N", help=f"{length} (default: {USUAL_LENGTH})"
    )
    taking_in.add_argument(
        "--prompts", nargs="+", metavar="FILE", help="JSONL files of chats for the probe (default: data/prompts)"
    )
    taking_in.add_argument(
        "--num-prompts", type=int, default=6, metavar="N", help="prompts of the probe; 0 leaves it out (default: 6)"
    )
    taking_in.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="tokens the target writes for each (default: 32)"
    )
    taking_in.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"), help="of the probe"
    )
    giving_out: Any = actions.add_parser(
        "export", description=EXPORT_DESCRIPTION, examples=EXAMPLES, help="write a drafter for an engine"
    )
    giving_out.add_argument("drafter", metavar="DRAFTER", help="drafter directory")
    giving_out.add_argument("--to", required=True, choices=[kind.value for kind in Format], help="format to write")
    giving_out.add_argument("--out", required=True, metavar="DIR", help="directory to write; must not exist")
    giving_out.add_argument("--target", metavar="T", help="the drafter's target, for its embeddings and its config")
    options = parser.parse_args(argv)
    if Path(options.out).exists():
        raise UserError(f"--out {options.out} exists; give a directory that does not, or remove it")
    return options


def import_head(options: argparse.Namespace) -> int:
    """Read, check, write, probe."""
    import torch

    from drafters.eagle3_ssd.checkpoint import EMBEDDINGS, check_fits, model_of, vocab_tensors, write_files
    from drafters.eagle3_ssd.config import to_config_json
    from drafters.formats.foreign import read_foreign
    from drafters.tap_probe import probe_taps
    from drafters.targets.target import DTYPES, load_target

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = options.target_layers or (_target_numbers(options.target).num_hidden_layers if options.target else None)
    head = read_foreign(_local(options.source), options.taps, layers)
    chats = _chats(options)
    target = load_target(options.target, options.dtype, device) if options.target else None  # last: it takes longest
    card = _card_of_import(options, head, target)
    warnings = check_fits(head.config, card, target.facts, options.source) if target else []
    notes = head.notes + _settle_embeddings(head.tensors, target, head.config.hidden_size)
    dtype = str(head.tensors["fc.weight"].dtype).removeprefix("torch.")
    write_files(options.out, {**head.tensors, **vocab_tensors(head.vocab)}, to_config_json(head.config, dtype), card)
    taps = ", ".join(map(str, head.config.tap_hidden_states_ids))
    kept = "own embeddings" if EMBEDDINGS in head.tensors else "the target's embeddings"
    sizes = f"{head.config.num_hidden_layers} layer(s), draft vocabulary {len(head.vocab)}"
    print(f"{options.out}: from {head.kind} format; {sizes}, {kept}, taps {taps}")
    for note in notes:
        print(f"note: {note}")
    if target and chats:
        model = model_of(head.config, head.tensors, target.embed_weight, DTYPES[options.dtype], device)
        warnings += _show_probe(
            probe_taps(model, head.vocab.to(device), target, chats, options.new_tokens), len(chats)
        )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def export_drafter(options: argparse.Namespace) -> int:
    """Read, refuse what the format cannot hold, write."""
    from drafters.eagle3_ssd.checkpoint import EMBEDDINGS, read_files, vocab_tensors, write_files

    kind = Format(options.to)
    if kind is Format.SSD and "eagle" not in Path(options.out).name.lower():
        raise UserError(
            f"--out {options.out}: the SSD reference engine knows EAGLE drafters by 'eagle' in the directory's name"
        )
    files = read_files(options.drafter)
    target = _target_numbers(options.target) if options.target else None
    refuse_unrepresentable(kind, files.config, target)
    tensors = dict(files.tensors)
    same_size = files.config.hidden_size == files.config.target_hidden_size
    if kind is Format.SSD and same_size:
        tensors.pop(EMBEDDINGS, None)  # that engine takes the target's, and its first versions know no such key
    elif EMBEDDINGS not in tensors:
        if not options.target:
            named = files.card.target
            raise UserError(
                f"{options.drafter} leaves the embeddings to its target, {kind} files hold them: add --target {named}"
            )
        embeddings = _target_embeddings(options.target)
        wanted = (files.config.vocab_size, files.config.hidden_size)
        if tuple(embeddings.shape) != wanted:
            raise UserError(
                f"--target {options.target}: embeddings of shape {tuple(embeddings.shape)}, the drafter wants {wanted}"
            )
        tensors[EMBEDDINGS] = embeddings.to(tensors["fc.weight"].dtype)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    content = emit_config(kind, files.config, dtype, files.card.lookahead, target)
    named = rename_first_layer({**tensors, **vocab_tensors(files.vocab)}, FIRST_LAYER, READERS[kind].first_layer)
    write_files(options.out, named, content, files.card)
    print(f"{options.out}: {kind} format, for {READERS[kind].engine}")
    return 0


def _card_of_import(options: argparse.Namespace, head: ForeignDrafter, target: Target | None) -> DrafterCard:
    """The card that lies beside the source, where one of ours does; else what is known, and what was assumed."""
    from drafters.eagle3_ssd.card import CARD_FILE, DrafterCard, read_card

    place = _local(options.source)
    if (place / CARD_FILE).is_file():
        return read_card(place)
    facts = target and target.facts
    return DrafterCard(
        target=facts.name if facts else "unknown",
        target_weight_hash=facts and facts.weight_hash,
        tokenizer_hash=facts and facts.tokenizer_hash,
        template_hash=facts and facts.template_hash,
        training={"imported_from": options.source, "format": head.kind.value},
        lookahead=max(1, (options.trained_depth - 1) // 2),
        trained_depth=options.trained_depth,
        trained_length=options.trained_length,
    )


def _settle_embeddings(tensors: dict[str, Tensor], target: Target | None, hidden_size: int) -> list[str]:
    """Drop a copy of the target's embeddings; keep others, with a note. A head with none needs the target's size."""
    import torch

    from drafters.eagle3_ssd.checkpoint import EMBEDDINGS

    if target is None:
        return []
    own, theirs = tensors.get(EMBEDDINGS), target.embed_weight.cpu()
    if own is None:
        if theirs.shape[1] != hidden_size:
            raise UserError(
                f"the head has no {EMBEDDINGS} and hidden_size {hidden_size}, the target's is {theirs.shape[1]}: "
                "import it with its own target"
            )
        return []
    if own.shape == theirs.shape and torch.equal(own.to(theirs.dtype), theirs):
        del tensors[EMBEDDINGS]
        return []
    return [f"{EMBEDDINGS} differs from the target's and is kept: wrong if the head belongs to another target"]


def _chats(options: argparse.Namespace) -> list[list[dict[str, str]]]:
    """The prompts of the probe, none where it is left out."""
    from drafters.tap_probe import read_chats

    paths = [Path(path) for path in options.prompts] if options.prompts else sorted(PROMPTS.glob("*.jsonl"))
    return read_chats(paths, options.num_prompts) if options.target and options.num_prompts else []


def _show_probe(found: Sequence[TapAgreement], num_prompts: int) -> list[str]:
    """Print the table; returns the warnings."""
    from drafters.tap_probe import DEPTHS, tap_warnings

    print(
        f"probe: {num_prompts} prompts, {found[0].num_tokens} tokens of the target's answers; "
        "share on which the drafter agrees"
    )
    print(f"  {'taps (hidden_states)':32}" + "".join(f"{f'depth {depth}':>9}" for depth in range(DEPTHS)))
    names = {0: "as declared", -1: "one layer lower", 1: "one layer higher"}
    for agreement in found:
        label = f"{', '.join(map(str, agreement.taps))}  {names[agreement.shift]}"
        print(f"  {label:32}" + "".join(f"{share:9.2f}" for share in agreement.by_depth))
    return tap_warnings(found)


def _local(source: str) -> Path:
    """The source's directory; a hub id is downloaded into the hub's cache."""
    place = Path(source)
    if place.is_dir():
        return place
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(f"{source} is no directory and no hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{source} could not be fetched from the hub: {str(error).splitlines()[0]}") from error


def _target_numbers(spec: str) -> TargetNumbers:
    """Numbers of the target's config, read without its weights."""
    from transformers import AutoConfig

    from drafters.targets.files import resolve_target

    try:
        whole = AutoConfig.from_pretrained(resolve_target(spec))
    except (OSError, ValueError) as error:
        raise UserError(f"--target {spec}: its config could not be read: {str(error).splitlines()[0]}") from error
    config = whole.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
    return TargetNumbers(spec, tuple(whole.architectures or ()), config.num_hidden_layers, theta)


def _target_embeddings(spec: str) -> Tensor:
    """The target's embeddings [V, H]; from a directory of safetensors only that tensor is read."""
    from safetensors import safe_open

    from drafters.targets.files import resolve_target
    from drafters.targets.target import load_target

    for file in sorted(Path(resolve_target(spec)).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in EMBEDDING_NAMES:
                    return tensors.get_tensor(name)
    return load_target(spec).embed_weight


if __name__ == "__main__":
    sys.exit(run_command(main))
