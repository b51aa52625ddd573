"""Offline inference in Python: load a model once, then answer lists of prompts, or stream the answers.

    from infer.llm import LLM, SamplingParams

    with LLM("recipes/smollm2-135m/serve.yaml", batch_size=8) as llm:
        for answer in llm.generate(["The capital of France is", "Two and two is"], SamplingParams(max_new_tokens=8)):
            print(answer.text, answer.tokens_per_second, answer.hit_rate)
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
        for piece in llm.stream("Once upon a time"):
            print(piece.text, end="", flush=True)

A prompt is a text or a list of token ids; a chat is a list of messages, which the target's template renders. One
prompt gives one answer, a list of prompts a list of answers in the same order. They are answered together,
`batch_size` at a time.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

from data.chat.render import render_prompt
from drafters.base.errors import UserError
from drafters.base.progress import ProgressDisplay
from infer.config import Mode
from infer.console import stderr
from infer.engine.engine import Engine
from infer.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from infer.evaluation.figures import hit_rate, tokens_per_round, tokens_per_second
from infer.kernels.sampling.verdict import TokenLogprob
from infer.launch import launch
from infer.recipe import Recipe, mode_named, read_recipe
from infer.text.detokenize import AnswerText

__all__ = ["LLM", "Answer", "Piece", "SamplingParams"]

Prompt = str | Sequence[int]
Chat = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams]
DEFAULT = SamplingParams()


@dataclass(frozen=True)
class Answer:
    """One finished answer with its figures. Times in seconds; figures are None where there was nothing to count."""

    prompt_ids: tuple[int, ...]
    text: str  # without special tokens, and up to a stop string
    token_ids: tuple[int, ...]  # the stop token included
    finish_reason: FinishReason
    prefill_seconds: float  # up to the first token
    decode_seconds: float  # after it
    rounds: int
    tokens_per_second: float | None  # of decoding
    tokens_per_round: float | None
    hit_rate: float | None  # mode ssd: speculations that had been prepared, of those that were looked up
    logprobs: tuple[TokenLogprob, ...] = ()  # of `token_ids`, where `params.logprobs` asks for them


@dataclass(frozen=True)
class Piece:
    """The text and tokens that one round added to an answer; the last piece holds the whole answer."""

    index: int  # of the prompt in what was asked
    text: str
    token_ids: tuple[int, ...]
    answer: Answer | None = None


class PendingCall(NamedTuple):
    """One call's unfinished requests: the number of the prompt by request id, and engine outputs not read yet."""

    names: dict[str, int]
    inbox: deque[RequestOutput]


class LLM:
    """A target, with its drafter in the modes sd and ssd, that answers prompts until it is closed."""

    def __init__(self, recipe: str | Path | None = None, mode: Mode | str = Mode.SSD, **settings: Any) -> None:
        """From a recipe file, or from `target=` and `drafter=` paths; `settings` (`infer.config.EngineSettings`) win
        over the recipe's.

        Raises `UserError` where a file, name or value does not fit.
        """
        chosen = mode_named(mode, "LLM")
        source = read_recipe(str(recipe)) if recipe is not None else Recipe("LLM", {}, {})
        self.engine: Engine = launch(source.settings(chosen, settings), chosen)
        self._names = itertools.count()
        self._inboxes: dict[
            str, deque[RequestOutput]
        ] = {}  # by request, one for each stream: several may be read in turns

    @overload
    def generate(self, prompts: str, params: Params = ..., progress: bool | None = ...) -> Answer: ...
    @overload
    def generate(self, prompts: Sequence[int], params: Params = ..., progress: bool | None = ...) -> Answer: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params = ..., progress: bool | None = ...
    ) -> list[Answer]: ...
    def generate(self, prompts: Any, params: Params = DEFAULT, progress: bool | None = None) -> Answer | list[Answer]:
        """Answer a prompt, or many: see the module. `params` for all, or one for each prompt.

        `progress` shows a bar on stderr (default: for several prompts, in a terminal). Raises `UserError` before
        anything runs where a prompt cannot be answered; it names the prompt by its number.
        """
        single = _is_prompt(prompts)
        answers = self._answers(self._token_ids([prompts] if single else prompts), params, progress)
        return answers[0] if single else answers

    @overload
    def chat(self, messages: Chat, params: Params = ..., progress: bool | None = ...) -> Answer: ...
    @overload
    def chat(self, messages: Sequence[Chat], params: Params = ..., progress: bool | None = ...) -> list[Answer]: ...
    def chat(self, messages: Any, params: Params = DEFAULT, progress: bool | None = None) -> Answer | list[Answer]:
        """Answer a chat, or many: `generate` with lists of `{"role": ..., "content": ...}` in place of prompts."""
        single = _is_chat(messages)
        answers = self._answers(self._rendered([messages] if single else messages), params, progress)
        return answers[0] if single else answers

    def stream(self, prompts: Prompt | Sequence[Prompt], params: Params = DEFAULT) -> Iterator[Piece]:
        """The answers piece by piece, as rounds give them. Who closes the iterator cancels what is left."""
        many: Any = [prompts] if _is_prompt(prompts) else prompts
        return self._pieces(self._submit(self._token_ids(many), params))

    def stream_chat(self, messages: Chat | Sequence[Chat], params: Params = DEFAULT) -> Iterator[Piece]:
        """`stream`, of chats."""
        many: Any = [messages] if _is_chat(messages) else messages
        return self._pieces(self._submit(self._rendered(many), params))

    def close(self) -> None:
        """End the draft process."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        tokenizer = self.engine.target.tokenizer
        return [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    def _rendered(self, chats: Sequence[Chat]) -> list[list[int]]:
        target, template = self.engine.target, self.engine.settings.template
        return [render_prompt(list(map(dict, chat)), target.tokenizer, template) for chat in chats]

    def _answers(self, prompts: Sequence[Sequence[int]], params: Params, progress: bool | None) -> list[Answer]:
        call = self._submit(prompts, params)
        answers: dict[int, Answer] = {}
        shown = progress if progress is not None else len(prompts) > 1 and sys.stderr.isatty()
        with ProgressDisplay("prompts", len(prompts), console=stderr, quiet=not shown) as display:
            for piece in self._pieces(call):
                if piece.answer is not None:
                    answers[piece.index] = piece.answer
                    display.advance()
        return [answers[index] for index in range(len(prompts))]

    def _pieces(self, call: PendingCall) -> Iterator[Piece]:
        """What the rounds give these requests, until all have ended."""
        names, inbox = call
        tokenizer = self.engine.target.tokenizer
        texts: dict[str, AnswerText] = {}
        try:
            while names:
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    name, index = output.request_id, names[output.request_id]
                    if name not in texts:
                        texts[name] = AnswerText(tokenizer, output.request.params.stop)
                    if output.finish_reason is not None:
                        del names[name], self._inboxes[name]
                    yield _piece(index, output, texts[name], self.engine.mode)
        finally:
            self._cancel(names)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)

    def _cancel(self, names: Iterable[str]) -> None:
        for name in names:
            self.engine.cancel(name)
            self._inboxes.pop(name, None)

    def _submit(self, prompts: Sequence[Sequence[int]], params: Params) -> PendingCall:
        """Queue all prompts, or none."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"params: {len(each)} were given for {len(prompts)} prompts; give one for all, or one for each"
            )
        names: dict[str, int] = {}
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                names[self.engine.submit(prompt, own, f"llm-{next(self._names)}")] = index
            except UserError as error:
                self._cancel(names)
                raise UserError(f"prompt {index}: {error}") from error
        call = PendingCall(names, deque())
        self._inboxes |= dict.fromkeys(names, call.inbox)
        return call


def _piece(index: int, output: RequestOutput, text: AnswerText, mode: Mode) -> Piece:
    shown = "".join(map(text.push, output.new_token_ids))
    if output.finish_reason is None:
        return Piece(index, shown, output.new_token_ids)
    shown += text.finish()
    return Piece(index, shown, output.new_token_ids, _answer(output.request, text.text, output.finish_reason, mode))


def _answer(request: Request, text: str, reason: FinishReason, mode: Mode) -> Answer:
    return Answer(
        prompt_ids=request.prompt_ids,
        text=text,
        token_ids=tuple(request.new_tokens),
        finish_reason=reason,
        prefill_seconds=request.prefill_seconds,
        decode_seconds=request.decode_seconds,
        rounds=len(request.rounds),
        tokens_per_second=tokens_per_second([request]),
        tokens_per_round=tokens_per_round(request.rounds),
        hit_rate=hit_rate(request.rounds) if mode is Mode.SSD else None,
        logprobs=tuple(request.logprobs),
    )


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _is_chat(messages: Any) -> bool:
    """Whether this is one chat, not a list of chats."""
    return len(messages) > 0 and isinstance(messages[0], Mapping)
