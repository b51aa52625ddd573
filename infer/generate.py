"""Answer one prompt, or chat, in the terminal: `python -m infer.generate --recipe R --mode ssd --prompt TEXT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.base.errors import EXIT_INTERRUPTED, UserError, run_command
from infer.config import Mode
from infer.console import Parser, interruptible, loading, make_directory, note
from infer.recipe import load_engine_settings
from infer.tracing.profiler import profiling
from infer.tracing.spans import recording

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.engine.request import Request, SamplingParams
    from infer.evaluation.completion import Completion

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
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "logprobs"),
    *(f"{name}_penalty" for name in PENALTIES),
)

Message = dict[str, str]


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    settings = load_engine_settings(options.recipe, Mode(options.mode), options.overrides)
    from infer.launch import launch

    params = sampling_params(options)
    profile = make_directory("--profile", options.profile) if options.profile else None
    with ExitStack() as stack:
        stack.enter_context(recording(options.trace))  # the draft process is started as a part of the trace
        with loading(f"loading {settings.target}, mode {options.mode} ..."):
            engine = stack.enter_context(launch(settings, Mode(options.mode)))
        stack.enter_context(profiling(profile))
        if options.prompt is None:
            chat(engine, params)
            return 0
        return answer_prompt(engine, options, params)


def answer_prompt(engine: Engine, options: argparse.Namespace, params: SamplingParams) -> int:
    """Answer `--prompt`, `--n` times one after another. Returns the exit status."""
    answers: list[Completion] = []
    for number, own in enumerate(params.choices(options.n), start=1):
        if options.n > 1 and not options.json:
            note(f"answer {number} of {options.n}")
        answer = complete(
            engine, [{"role": "user", "content": options.prompt}], own, (lambda piece: None) if options.json else show
        )
        answers.append(answer)
        if not options.json:
            _finish_line(answer)
        if answer.interrupted:
            return EXIT_INTERRUPTED
    if options.json:
        from infer.evaluation.completion import summary

        objects = [summary(answer) for answer in answers]
        print(json.dumps(objects[0] if options.n == 1 else {"answers": objects}))
    return 0


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the options give. Raises `UserError` for a value out of range or a bad grammar."""
    from infer.engine.request import SamplingParams
    from infer.text.grammar import json_grammar, regex_grammar

    grammar = None
    if options.regex is not None:
        grammar = regex_grammar(options.regex)
    elif options.json_schema is not None:
        grammar = json_grammar(_schema_text(options.json_schema))
    given = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    return SamplingParams(
        **given, stop=tuple(options.stop), logit_bias=tuple(map(_bias, options.logit_bias)), grammar=grammar
    )


def _schema_text(value: str) -> str:
    """The value itself where it is a schema, else the content of the file of that name."""
    if value.lstrip().startswith("{"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--json-schema {value}: cannot read that file ({error.strerror}); give a file or the schema itself"
        ) from error


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UserError(f"--logit-bias {text}: write it as ID:BIAS, for example 198:-100") from None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `overrides` are the `key=value` settings."""
    parser = Parser("python -m infer.generate", DESCRIPTION, EXAMPLES)
    parser.add_recipe()
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default="ssd", help="how tokens are made (default: ssd)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the user's message; without it, a chat")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest token (default: 0; by --top-* or --min-p 1)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest likeliest tokens with this probability together"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="draw from tokens at least P times as likely as the likeliest one"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the draws: the same seed repeats the answer (default: 0)"
    )
    for name, text in PENALTIES.items():
        parser.add_argument(f"--{name}-penalty", type=float, metavar="X", help=text)
    parser.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID:BIAS", help="add to the logit of a token; repeatable"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; repeatable"
    )
    parser.add_argument(
        "--n", type=int, default=1, metavar="N", help="answer N times, each with a seed of its own (default: 1)"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities, also of the N likeliest tokens (0..20)",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--regex", metavar="PATTERN", help="the answer matches this regular expression as a whole")
    shape.add_argument(
        "--json-schema",
        metavar="FILE",
        help="the answer is JSON that follows the schema in FILE, or given itself as {...}",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the target's end token, up to the limit"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else; seconds and speed are of decoding"
    )
    parser.add_tracing()
    options = parser.read(argv)
    if options.prompt is not None and not options.prompt.strip():
        raise UserError("--prompt is empty: give the user's message, or leave --prompt out to chat")
    if options.json and options.prompt is None:
        raise UserError("--json needs a --prompt: a chat is not one object")
    if options.n < 1 or (options.n > 1 and options.prompt is None):
        raise UserError(f"--n {options.n}: give at least 1, and more than one answer only to a --prompt")
    if options.logprobs is not None and not options.json:
        raise UserError("--logprobs needs --json: log-probabilities stand in the object")
    return options


def complete(
    engine: Engine, messages: Sequence[Message], params: SamplingParams, on_text: Callable[[str], None]
) -> Completion:
    """Answer `messages`, passing new text to `on_text` after each round. The first Ctrl-C cancels the answer."""
    from data.chat.render import render_prompt
    from infer.evaluation.completion import Completion
    from infer.text.detokenize import AnswerText

    text, pieces = AnswerText(engine.target.tokenizer, params.stop), []

    def give(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    request_id = engine.submit(render_prompt(messages, engine.target.tokenizer, engine.settings.template), params)
    request: Request | None = None
    with interruptible() as interrupt:
        while engine.has_work and not interrupt:
            for output in engine.step():
                request = output.request
                give("".join(map(text.push, output.new_token_ids)))
    give(text.finish())
    interrupted = request is None or request.finish_reason is None
    if interrupted:
        engine.cancel(request_id)
    if request is None:
        raise KeyboardInterrupt
    if engine.mode is Mode.SSD and not engine.draft_alive:
        note("the draft process has died; answers go on at the target's own speed until it is started again", "yellow")
    return Completion(engine.mode, request, "".join(pieces), interrupted)


def chat(engine: Engine, params: SamplingParams) -> None:
    """Answer line after line, each with the whole conversation before it, until /quit or Ctrl-D."""
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
    """The conversation with the answer appended; without the last message where there was no answer."""
    try:
        answer = complete(engine, messages, params, show)
    except UserError as error:
        note(f"{error} (/clear forgets the conversation)", "red")
        return messages[:-1]
    except KeyboardInterrupt:
        return messages[:-1]
    _finish_line(answer)
    return [*messages, {"role": "assistant", "content": answer.text}] if answer.text else messages[:-1]


def _finish_line(answer: Completion) -> None:
    from infer.evaluation.completion import speed_line

    print(flush=True)
    note(speed_line(answer))


def _read_line() -> str | None:
    """The user's next line, stripped; empty after Ctrl-C, None after Ctrl-D."""
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


if __name__ == "__main__":
    sys.exit(run_command(main))
