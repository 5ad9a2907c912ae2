"""What clients of an OpenAI-compatible server send: the fields that are understood, and their limits.

Fields beyond these are ignored and named in a response header. Validation happens once per request; nothing
here is used per token.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LogitBias = dict[int, Annotated[float, Field(ge=-100, le=100)]]
TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(BaseModel):
    """What both endpoints share: OpenAI's fields, and those that vLLM's and SGLang's users send."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    user: str | None = None

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
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None

    def as_template_input(self) -> dict[str, object]:
        """What chat templates expect: content as one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        extra: dict[str, Any] = self.model_extra or {}
        return {**extra, "role": self.role, "content": content or ""}


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, as a list of either kind."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            return []
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "CompletionRequest":
        if self.suffix is not None:
            raise ValueError("suffix is not supported")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported")
        return self
