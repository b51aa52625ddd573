"""Request bodies of OpenAI's API: supported fields with their ranges, refused fields, and fields without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from drafters.base.errors import UserError, unknown_name
from infer.engine.request import MOST_LOGPROBS
from infer.server.errors import ApiError
from infer.text.grammar import ANY_OBJECT, choice_grammar, json_grammar, lark_grammar, regex_grammar

# Fields of the API that are not supported -> the values that ask for nothing, and are therefore let through (null
# always is).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
}
# Fields that concern OpenAI's own service and change no text.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


class Body(BaseModel):
    """The fields of both endpoints. Temperature is 1 unless given, as in OpenAI's API.

    Extensions, named as vLLM names them: top_k (0 and -1 are none), min_p, repetition_penalty, stop_token_ids,
    ignore_eos, and structured_outputs or its older form guided_json (a schema), guided_regex, guided_choice (strings),
    guided_grammar (Lark).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops_have_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > 16 or "" in strings:
            raise ValueError("give at most 16 strings, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases_name_tokens(cls, logit_bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (logit_bias or {}).items():
            if not token.isdecimal() or not -100 <= bias <= 100:
                raise ValueError("give an object of token ids and numbers in -100..100")
        return logit_bias

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: nothing."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit biases by token id."""
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class JsonSchema(BaseModel):
    """A schema with the name it has for the client."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # always: what is generated follows the schema


class ResponseFormat(BaseModel):
    """What the answer has to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema has to stand beside type json_schema, and nowhere else")
        return self


class StructuredOutputs(BaseModel):
    """The same without OpenAI's names: one of a schema, a regular expression, a choice of strings, a Lark grammar."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionBody(Body):
    """`/v1/completions`: a text, or its token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | Literal[False] | None = None

    @field_validator("logprobs")
    @classmethod
    def _few_logprobs(cls, logprobs: int | None) -> int | None:
        if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
            raise ValueError(f"give 0..{MOST_LOGPROBS}")
        return logprobs

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: nothing."""
        return None if self.logprobs is False else self.logprobs


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As the chat template reads it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    """`/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _top_of_something(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true beside it")
        return top_logprobs

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: nothing."""
        return self.top_logprobs or 0 if self.logprobs else None


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], content: bytes) -> B:
    """Read a body. Raises `ApiError` 400 that names the field."""
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body has to be a JSON object, not a {type(fields).__name__}")
    refuse_unsupported(fields)
    known = {name: value for name, value in fields.items() if name not in UNSUPPORTED and name not in IGNORED}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _explain(kind, error) from error


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raise `ApiError` for a field that asks for what this server cannot do: it must not be ignored silently."""
    for name, neutral in UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
        ):
            raise ApiError(
                400, f"{name} = {json.dumps(value)[:80]} is not supported: leave it out", name, "unsupported_parameter"
            )


def _explain(kind: type[Body], error: ValidationError) -> ApiError:
    first = error.errors()[0]
    path = [
        part for part in first["loc"] if isinstance(part, int) or part.isidentifier()
    ]  # without the names of union branches
    field = str(path[0])
    name = ".".join(str(part) for part in path if part not in ("str", "int"))
    if first["type"] == "extra_forbidden" and len(path) > 1:
        return ApiError(400, f"{name} is not known: leave it out", name, "unknown_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(400, str(unknown_name("parameter", field, kind.model_fields)), field, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"you must give the parameter {name!r}", name, "missing_required_parameter")
    return ApiError(
        400, f"{name} = {json.dumps(first['input'], default=str)[:80]}: {first['msg']}", name, "invalid_value"
    )


def grammar_of(body: Body) -> str | None:
    """The grammar that a body asks for, None where it asks for none. Raises `ApiError` that names the field."""
    response, structured = body.response_format, body.structured_outputs or StructuredOutputs()
    schema = response.json_schema.schema_ if response and response.json_schema else ANY_OBJECT
    asked: dict[str, tuple[Callable[[Any], str], Any]] = {
        "response_format": (json_grammar, schema if response and response.type != "text" else None),
        "structured_outputs.json": (json_grammar, structured.json_),
        "structured_outputs.regex": (regex_grammar, structured.regex),
        "structured_outputs.choice": (choice_grammar, structured.choice),
        "structured_outputs.grammar": (lark_grammar, structured.grammar),
        "guided_json": (json_grammar, body.guided_json),
        "guided_regex": (regex_grammar, body.guided_regex),
        "guided_choice": (choice_grammar, body.guided_choice),
        "guided_grammar": (lark_grammar, body.guided_grammar),
    }
    given = {name: (make, value) for name, (make, value) in asked.items() if value is not None}
    if len(given) > 1:
        raise ApiError(
            400, f"{' and '.join(given)} ask for different answers: give one of them", list(given)[1], "invalid_value"
        )
    for name, (make, value) in given.items():
        try:
            return make(value)
        except UserError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_value") from error
    return None
