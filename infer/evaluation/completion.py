"""One answer with its figures: as the JSON object of `infer.generate --json`, and as one line for the terminal."""

from __future__ import annotations

from typing import Any, NamedTuple

from infer.config import Mode
from infer.engine.request import Request
from infer.evaluation.figures import hit_rate, tokens_per_round, tokens_per_second


class Completion(NamedTuple):
    """One answer: its text, and the request with its tokens and rounds; `interrupted` where Ctrl-C ended it."""

    mode: Mode
    request: Request
    text: str
    interrupted: bool

    @property
    def hit_rate(self) -> float | None:
        """Hits over outcomes looked up; None in the modes that look nothing up."""
        return hit_rate(self.request.rounds) if self.mode is Mode.SSD else None


def summary(answer: Completion) -> dict[str, Any]:
    """The object that `infer.generate --json` prints.

    `seconds` and `tokens_per_second` are of decoding (`infer.evaluation.figures`): the prompt's forward is left out.
    """
    request = answer.request
    logprobs = {"logprobs": [own._asdict() for own in request.logprobs]} if request.params.logprobs is not None else {}
    return {
        "text": answer.text,
        "token_ids": request.new_tokens,
        "prompt_tokens": len(request.prompt_ids),
        "new_tokens": len(request.new_tokens),
        "seconds": request.decode_seconds,
        "tokens_per_second": tokens_per_second([request]),
        "rounds": len(request.rounds),
        "tokens_per_round": tokens_per_round(request.rounds),
        "hit_rate": answer.hit_rate,
        "finish_reason": request.finish_reason,
        **logprobs,
    }


def speed_line(answer: Completion) -> str:
    """The figures of an answer in one line: "96 tokens, 101.3 tokens/s, 2.4 tokens per round, hit rate 71 %"."""
    request = answer.request
    parts = [f"{len(request.new_tokens)} tokens"]
    if (speed := tokens_per_second([request])) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if (per_round := tokens_per_round(request.rounds)) is not None:
        parts.append(f"{per_round:.1f} tokens per round")
    if answer.hit_rate is not None:
        parts.append(f"hit rate {answer.hit_rate:.0%}")
    if request.finish_reason == "length":
        parts.append("cut at the limit (--max-new-tokens or max_model_len)")
    return ", ".join(parts)
