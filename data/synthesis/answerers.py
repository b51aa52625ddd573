"""Answers by the target in this process, decoded in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from data.chat.render import render_prompt
from data.chat.template import RenderError
from data.synthesis.dialogue import Question, Reply
from data.synthesis.generation import BatchGenerator, Continuation
from drafters.targets.target import Target
from drafters.targets.template import TemplateOptions


class TargetAnswerer:
    """An `Answerer` that refuses prompts of more than `max_prompt_tokens`."""

    def __init__(
        self,
        target: Target,
        generator: BatchGenerator,
        max_prompt_tokens: int,
        max_new_tokens: int,
        template: TemplateOptions,
    ):
        self.target, self.generator, self.template = target, generator, template
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.waiting: deque[Continuation] = deque()

    def ask(self, question: Question, first: bool = False) -> str | None:
        """See `Answerer.ask`."""
        try:
            ids = render_prompt(question.messages, self.target.tokenizer, self.template, question.tools)
        except RenderError as error:
            return str(error)
        if len(ids) > self.max_prompt_tokens:
            return f"its prompt has {len(ids)} tokens, --max-prompt-tokens is {self.max_prompt_tokens}"
        if len(ids) >= self.generator.max_tokens:
            return f"its prompt has {len(ids)} tokens, the target takes {self.generator.max_tokens}"
        wanted = Continuation(question.key, tuple(ids), question.temperature, self.max_new_tokens, question.seed)
        (self.waiting.appendleft if first else self.waiting.append)(wanted)
        return None

    def replies(self) -> Iterator[Reply]:
        """See `Answerer.replies`."""
        for answer in self.generator.run(self.waiting):
            # Special tokens stay in the text as the target wrote them, except the end of turn: the template adds it.
            ids = answer.token_ids[:-1] if answer.ended else answer.token_ids
            yield Reply(
                answer.key,
                {"role": "assistant", "content": self.target.tokenizer.decode(ids)},
                answer.ended,
                len(answer.token_ids),
            )
