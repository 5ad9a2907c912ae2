"""Bytes of the answers: one template per choice, encoded once, so that a chunk costs one string encoding.

A stream's events and a whole response of both endpoints, in OpenAI's shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from common.messages import SampledToken
from common.model.tokens import Tokenizer
from gateway.generation import Generation, TextPiece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
EMPTY_PIECE = TextPiece("", [])


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one call begins and ends with.

    ``has_usage``: the last chunk tells the usage and the others say that they do not. ``running_usage`` is
    for clients that asked for it in every chunk. ``service_tier`` is for those that named one.
    """

    call_id: str
    created: int
    model: str
    has_usage: bool = False
    running_usage: Callable[[], Usage] | None = None
    service_tier: str | None = None

    def fields(self, kind: str) -> dict[str, object]:
        tier = {} if self.service_tier is None else {"service_tier": self.service_tier}
        return {"id": self.call_id, "object": kind, "created": self.created, "model": self.model, **tier}

    def event_start(self, kind: str) -> bytes:
        return b"data: " + orjson.dumps(self.fields(kind))[:-1] + b',"choices":[{"index":'

    def event_end(self) -> bytes:
        if self.running_usage is not None:
            return b'],"usage":%b}\n\n' % orjson.dumps(self.running_usage().as_json())
        return b'],"usage":null}\n\n' if self.has_usage else b"]}\n\n"

    def usage_event(self, kind: str, usage: Usage) -> bytes:
        return sse(orjson.dumps({**self.fields(kind), "choices": [], "usage": usage.as_json()}))


def sse(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


class ChatEncoder:
    """Chunks and bodies of /v1/chat/completions."""

    KIND = "chat.completion.chunk"

    def __init__(self, head: Head, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._start = head.event_start(self.KIND)

    def opening(self, index: int) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        return self._event(b'%d,%b,"logprobs":null,"finish_reason":null}' % (index, delta))

    def piece(self, index: int, piece: TextPiece) -> bytes:
        logprobs = self._logprobs_of(piece.tokens) if self._has_logprobs else b"null"
        return b'%b%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}%b' % (
            self._start,
            index,
            orjson.dumps(piece.text),
            logprobs,
            self._head.event_end(),
        )

    def finish(self, index: int, reason: str) -> bytes:
        return self._event(b'%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, reason.encode()))

    def usage(self, usage: Usage) -> bytes:
        return self._head.usage_event(self.KIND, usage)

    def whole(self, choices: Sequence[tuple[Generation, TextPiece]], usage: Usage) -> bytes:
        encoded = [
            {
                "index": generation.index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": orjson.Fragment(
                    self._logprobs_of(piece.tokens) if self._has_logprobs else b"null"
                ),
                "finish_reason": generation.finish_reason,
            }
            for generation, piece in choices
        ]
        fields = self._head.fields("chat.completion")
        return orjson.dumps({**fields, "choices": encoded, "usage": usage.as_json()})

    def _event(self, choice: bytes) -> bytes:
        return self._start + choice + self._head.event_end()

    def _logprobs_of(self, tokens: Sequence[SampledToken]) -> bytes:
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
        return orjson.dumps({"content": content, "refusal": None})

    def _token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        """A token may be a part of a character: then its text is U+FFFD, and its bytes say what it is."""
        token_bytes = self._tokenizer.token_bytes(token_id)
        text = token_bytes.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


class CompletionEncoder:
    """Chunks and bodies of /v1/completions. ``echoes``: what stands before each choice's text."""

    KIND = "text_completion"

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, has_logprobs: bool, echoes: Sequence[str]
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]
        self._start = head.event_start(self.KIND)

    def opening(self, index: int) -> bytes:
        """The echoed prompt, where one was asked for."""
        echo = self._echoes[index]
        return self.piece(index, TextPiece(echo, [])) if echo else b""

    def piece(self, index: int, piece: TextPiece) -> bytes:
        logprobs = self._logprobs_of(index, piece.tokens) if self._has_logprobs else b"null"
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":null}%b' % (
            self._start,
            index,
            orjson.dumps(piece.text),
            logprobs,
            self._head.event_end(),
        )

    def finish(self, index: int, reason: str) -> bytes:
        choice = b'%d,"text":"","logprobs":null,"finish_reason":"%b"}' % (index, reason.encode())
        return self._start + choice + self._head.event_end()

    def usage(self, usage: Usage) -> bytes:
        return self._head.usage_event(self.KIND, usage)

    def whole(self, choices: Sequence[tuple[Generation, TextPiece]], usage: Usage) -> bytes:
        encoded = [
            {
                "index": generation.index,
                "text": self._echoes[generation.index] + piece.text,
                "logprobs": orjson.Fragment(
                    self._logprobs_of(generation.index, piece.tokens) if self._has_logprobs else b"null"
                ),
                "finish_reason": generation.finish_reason,
            }
            for generation, piece in choices
        ]
        fields = self._head.fields(self.KIND)
        return orjson.dumps({**fields, "choices": encoded, "usage": usage.as_json()})

    def _logprobs_of(self, index: int, tokens: Sequence[SampledToken]) -> bytes:
        texts = [self._text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return orjson.dumps(
            {
                "tokens": texts,
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [
                    {self._text(token_id): logprob for token_id, logprob in token.top} for token in tokens
                ],
                "text_offset": offsets,
            }
        )

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


Encoder = ChatEncoder | CompletionEncoder
