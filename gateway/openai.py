"""What clients of an OpenAI-compatible server send: the fields that are understood, and their limits.

Fields beyond these are ignored and named in a response header, but for those whose promise a client relies on
(``PROMISES``): these are refused. Validation happens once per request; nothing here is used per token.
docs/api.md says the same to users.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    Strict,
    model_validator,
)
from pydantic_core import ErrorDetails

from common.errors import InvalidRequest

MAX_BIASED_TOKENS = 1024
MAX_MESSAGES = 1024
MAX_DETOKENIZED = 1 << 17
PROMISES: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
}
"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's that make the answer another one: whoever sends them
must not get a plain text back; with the values that ask for nothing but that."""
CHOICE_OF = {"tools": "tool_choice", "functions": "function_call"}
"""Where the second field is "none", the first one asks for nothing."""
MAY_BE_EMPTY = frozenset({"assistant", "function"})
"""Roles whose messages may have no content: they called somebody, or were answered with nothing."""
TYPE_NAMES = frozenset({"bool", "dict", "float", "int", "list", "str"})


class _FirstErrorOnly(FailFast):
    """A list stops at its first bad item: a body of a megabyte could otherwise make a million errors.

    Hashable, as members of unions have to be.
    """

    __hash__ = object.__hash__


FIRST_ERROR_ONLY = _FirstErrorOnly()


def _check_bias_size(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens")
    return value


def _is_integer(value: object) -> bool:
    """As token ids are, which the vocabulary is to have."""
    return type(value) is int


def _read_prompts(value: object) -> list[str] | list[list[int]]:
    """One or several prompts, as a list of either kind.

    By hand, since a union of lists collects an error for every item of each: seconds for a long one.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_integer, value)):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(map(_is_integer, item)) for item in value):
            return value
    raise ValueError("should be a text, a list of token ids, or a list of either that is not empty")


READ_PROMPTS = PlainValidator(
    _read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
)
Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
"""Scalars as JSON has them: true is no integer, "5" and 5.0 are none, and 5 is a number."""

LogitBias = Annotated[dict[int, Annotated[Number, Field(ge=-100, le=100)]], BeforeValidator(_check_bias_size)]
"""JSON's keys are texts, so token ids are read from texts here."""
TokenIds = Annotated[list[Annotated[Integer, Field(ge=0)]], FIRST_ERROR_ONLY]
Strings = Annotated[list[str], FIRST_ERROR_ONLY]


class NullableFields(BaseModel):
    """A field sent as null is a field not sent: OpenAI's schema has many of them nullable."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None}


class StreamOptions(NullableFields):
    model_config = ConfigDict(extra="ignore")

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class GenerationFields(NullableFields):
    """What both endpoints share: OpenAI's fields, and those that vLLM's and SGLang's users send."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: Annotated[str, Field(max_length=256)]
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1)] = 1
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    include_stop_str_in_output: Flag = False
    user: str | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def ignored(self) -> list[str]:
        """Names of fields that were sent and have no effect here."""
        return sorted(self.model_extra or {})

    @model_validator(mode="after")
    def _refuse_what_would_be_broken(self) -> "GenerationFields":
        extra = self.model_extra or {}
        for name, harmless in PROMISES.items():
            is_chosen = extra.get(CHOICE_OF.get(name, "")) != "none"
            if name in extra and extra[name] not in harmless and is_chosen:
                but = " or ".join(json.dumps(value) for value in harmless)
                text = f"is not supported here, only {but} is" if but else "is not supported here"
                raise InvalidRequest(f"{name} {text}", param=name)
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        return self


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: str | Annotated[list[TextPart], FIRST_ERROR_ONLY] | None = None

    def as_template_input(self) -> dict[str, object]:
        """What chat templates expect: content as one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        extra: dict[str, Any] = self.model_extra or {}
        return {**extra, "role": self.role, "content": content or ""}


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @model_validator(mode="after")
    def _refuse_empty_messages(self) -> "ChatRequest":
        for index, message in enumerate(self.messages):
            if message.content is None and message.role not in MAY_BE_EMPTY:
                field = f"messages.{index}.content"
                raise InvalidRequest(f"{field}: a message of role {message.role} needs one", param=field)
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompts: Annotated[list[str] | list[list[int]], READ_PROMPTS, Field(alias="prompt")]
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    echo: Flag = False
    suffix: str | None = None
    best_of: Integer | None = None

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "CompletionRequest":
        if self.suffix is not None:
            raise InvalidRequest("suffix is not supported", param="suffix")
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of is not supported", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not supported", param="echo")
        return self


class TokenizeRequest(BaseModel):
    """POST /tokenize, as vLLM has it."""

    model_config = ConfigDict(extra="ignore")

    model: str = "default"
    prompt: str
    add_special_tokens: Flag = True


class DetokenizeRequest(BaseModel):
    """POST /detokenize, as vLLM has it."""

    model_config = ConfigDict(extra="ignore")

    model: str = "default"
    tokens: Annotated[TokenIds, Field(max_length=MAX_DETOKENIZED)]


def tell_error(errors: list[ErrorDetails]) -> tuple[str | None, str]:
    """The field at fault and what is wrong with it. Of a union's errors, the one that came furthest."""
    error = max(errors, key=lambda each: len(each["loc"]))
    names: list[str] = []
    for part in error["loc"]:
        # What follows names a member of a union, not a field.
        if isinstance(part, str) and (part in TYPE_NAMES or not part.isidentifier()):
            break
        names.append(str(part))
    # What pydantic says of a value that is no object names our class.
    is_no_object = error["type"] in ("model_type", "model_attributes_type")
    text = "should be a JSON object" if is_no_object else error["msg"].removeprefix("Value error, ")
    return ".".join(names) or None, text
