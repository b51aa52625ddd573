"""Where a run's numbers go: a file of JSON lines, and Weights & Biases where it is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.config import TrainSettings


class Metrics:
    """`metrics.jsonl`, one object a line, and Weights & Biases where it is on. Silent in all but the first process."""

    def __init__(self, settings: TrainSettings, output: Path, writes: bool) -> None:
        self.file, self.run = None, None
        if not writes:
            return
        output.mkdir(parents=True, exist_ok=True)
        self.file = (output / "metrics.jsonl").open("a", encoding="utf-8")
        if settings.wandb.mode != "disabled":
            import wandb

            self.run = wandb.init(
                project=settings.wandb.project, mode=settings.wandb.mode, dir=output, config=settings.model_dump(mode="json")
            )

    def write(self, values: dict[str, Any]) -> None:
        """Add one record."""
        if self.file is not None:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        if self.run is not None:
            self.run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        """Finish the records."""
        if self.file is not None:
            self.file.close()
        if self.run is not None:
            self.run.finish()
