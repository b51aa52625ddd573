"""One answer, or a chat, in the terminal: `python -m infer.generate --recipe R --mode ssd --prompt TEXT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from drafters.errors import EXIT_INTERRUPTED, UserError, run_command
from infer.config import Mode
from infer.console import Parser, interruptible, loading, note
from infer.recipe import load_engine_settings

if TYPE_CHECKING:
    from infer.engine import Engine
    from infer.request import Request, SamplingParams

DESCRIPTION = """\
Answer one prompt with a language model, or chat with it where no --prompt is given.

The text is the same in each mode, only its speed differs:
  ar   the target alone, one token at a time
  sd   speculative decoding: a small drafter proposes tokens, the target checks them, in turns
  ssd  both at once: while the target checks, the drafter prepares for the outcomes it expects"""
EXAMPLES = """\
  python -m infer.generate --recipe recipes/smollm2-135m/serve.yaml --prompt "Why is the sky blue?"
  python -m infer.generate --recipe recipes/smollm2-135m/serve.yaml --mode ar --prompt "Hi" --json
  python -m infer.generate --recipe recipes/smollm2-135m/serve.yaml lookahead=4      (a chat)"""
CHAT_HELP = "/clear forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"

PENALTIES = {
    "presence": "-2..2, taken from the logit of each token of the answer",
    "frequency": "-2..2, the same for each time the token stands there",
    "repetition": "above 1: makes tokens of prompt and answer less likely",
}
SAMPLING = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos"),
    *(f"{name}_penalty" for name in PENALTIES),
)

Message = dict[str, str]


class Answer(NamedTuple):
    """An answer's text and its request; `interrupted` where Ctrl-C ended it."""

    mode: Mode
    request: Request
    text: str
    interrupted: bool

    @property
    def hit_rate(self) -> float | None:
        """Hits over outcomes looked up; None in the modes that look nothing up."""
        from infer.figures import hit_rate

        return hit_rate(self.request.rounds) if self.mode is Mode.SSD else None


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    settings = load_engine_settings(options.recipe, Mode(options.mode), options.overrides)
    from infer.launch import launch
    from infer.request import SamplingParams

    params = SamplingParams(**{name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None})
    with loading(f"loading {settings.target}, mode {options.mode} ..."):
        engine = launch(settings, Mode(options.mode))
    with engine:
        if options.prompt is None:
            chat(engine, params)
            return 0
        answer = complete(engine, [{"role": "user", "content": options.prompt}], params, (lambda piece: None) if options.json else show)
    if options.json and not answer.interrupted:
        print(json.dumps(summary(answer)))
    elif not options.json:
        _finish_line(answer)
    return EXIT_INTERRUPTED if answer.interrupted else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `overrides` are the `key=value` settings."""
    parser = Parser("python -m infer.generate", DESCRIPTION, EXAMPLES)
    parser.add_recipe()
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="ssd", help="how tokens are made (default: ssd)")
    parser.add_argument("--prompt", metavar="TEXT", help="the user's message; without it, a chat")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default: 256)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: 0; by --top-* or --min-p 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest likeliest tokens with this probability together")
    parser.add_argument("--min-p", type=float, metavar="P", help="draw from tokens at least P times as likely as the likeliest one")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws: the same seed repeats the answer (default: 0)")
    for name, text in PENALTIES.items():
        parser.add_argument(f"--{name}-penalty", type=float, metavar="X", help=text)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the target's end token, up to the limit")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else; seconds and speed are of decoding")
    options = parser.read(argv)
    if options.prompt is not None and not options.prompt.strip():
        raise UserError("--prompt is empty: give the user's message, or leave --prompt out to chat")
    if options.json and options.prompt is None:
        raise UserError("--json needs a --prompt: a chat is not one object")
    return options


def complete(engine: Engine, messages: Sequence[Message], params: SamplingParams, on_text: Callable[[str], None]) -> Answer:
    """Let the engine answer `messages` and hand over its text while it comes; the first Ctrl-C cancels the answer."""
    from data.render import render_prompt
    from infer.text import Detokenizer

    detokenizer, pieces = Detokenizer(engine.target.tokenizer), []

    def give(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    request_id = engine.submit(render_prompt(messages, engine.target.tokenizer, engine.settings.template), params)
    request: Request | None = None
    with interruptible() as interrupt:
        while engine.has_work and not interrupt:
            for output in engine.step():
                request = output.request
                give("".join(map(detokenizer.push, output.new_token_ids)))
    give(detokenizer.flush())
    interrupted = request is None or request.finish_reason is None
    if interrupted:
        engine.cancel(request_id)
    if request is None:
        raise KeyboardInterrupt
    if engine.mode is Mode.SSD and not engine.draft_alive:
        note("the draft process has died; answers go on at the target's own speed until it is started again", "yellow")
    return Answer(engine.mode, request, "".join(pieces), interrupted)


def chat(engine: Engine, params: SamplingParams) -> None:
    """Read a line, answer it, with all that was said before, until /quit or Ctrl-D."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and a history

        note(CHAT_HELP)
    messages: list[Message] = []
    while (line := _read_line()) not in (None, "/quit"):
        if line == "/clear":
            messages = []
        elif line:
            messages = _turn(engine, [*messages, {"role": "user", "content": line}], params)


def _turn(engine: Engine, messages: list[Message], params: SamplingParams) -> list[Message]:
    """The conversation after one more answer; without the question where there was no answer."""
    try:
        answer = complete(engine, messages, params, show)
    except UserError as error:
        note(f"{error} (/clear forgets the conversation)", "red")
        return messages[:-1]
    except KeyboardInterrupt:
        return messages[:-1]
    _finish_line(answer)
    return [*messages, {"role": "assistant", "content": answer.text}] if answer.text else messages[:-1]


def _finish_line(answer: Answer) -> None:
    print(flush=True)
    note(speed_line(answer))


def _read_line() -> str | None:
    """The next line of the user without blanks around it; empty after Ctrl-C, None after Ctrl-D."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""


def show(piece: str) -> None:
    """Print a piece of the answer at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def summary(answer: Answer) -> dict[str, Any]:
    """What `--json` prints. `seconds` and `tokens_per_second` are of decoding (`infer.figures`), without the prompt's forward."""
    from infer.figures import tokens_per_round, tokens_per_second

    request = answer.request
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
    }


def speed_line(answer: Answer) -> str:
    """One line about the answer: "96 tokens, 101.3 tokens/s, 2.4 tokens per round, hit rate 71 %"."""
    from infer.figures import tokens_per_round, tokens_per_second

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


if __name__ == "__main__":
    sys.exit(run_command(main))
