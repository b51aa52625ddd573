"""Export of a trained drafter: the canonical checkpoint directory with its card."""

from __future__ import annotations

import subprocess
from pathlib import Path

from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.checkpoint import save_drafter
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.trainer.run import Run
from train.validation.heldout import HeldoutFigures


def write_drafter(run: Run, name: str, drafter: Eagle3Drafter, step: int, figures: HeldoutFigures) -> None:
    """The canonical directory `name`, with a card that says what was done."""
    settings, setup = run.settings, run.setup
    facts = setup.target.facts
    stages = [settings.stage_at(done) for done in range(step)]
    card = DrafterCard(
        target=facts.name,
        target_weight_hash=facts.weight_hash,
        tokenizer_hash=facts.tokenizer_hash,
        template_hash=facts.template_hash,
        template_options=settings.data.template.recorded(),
        commit=_commit(),
        data=setup.data,
        training={"steps": step, **settings.model_dump(mode="json", exclude={"wandb", "output", "features"})},
        heldout=figures.values,
        lookahead=settings.heldout.lookahead,
        trained_depth=max(stage.depth for stage in stages) + 1,
        trained_length=settings.data.row_length,
        **figures.for_serving(),
    )
    save_drafter(run.output / name, drafter, setup.start.vocab, card)


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return None
    return found.stdout.strip() or None
