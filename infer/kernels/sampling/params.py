"""How one request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen. `temperature` 0 is greedy: the argmax of the logits after bias and
    penalties.

    Bias and penalties change the logits first (`infer.kernels.sampling.adjust`); temperature, min-p, top-k and top-p
    make them a distribution (`infer.kernels.sampling.sample`).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each token once
    grammar: str | None = None  # what it refuses is masked, after bias and penalties (`infer.text.grammar`)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the text so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before anything is drawn."""
        return self.penalised or bool(self.logit_bias) or self.grammar is not None
