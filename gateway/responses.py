"""Bytes of the answers: one template per choice, encoded once, so that a chunk costs one string encoding.

A stream's events and a whole response of both endpoints, in OpenAI's shapes.
"""

from collections.abc import Sequence
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


def sse(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


class ChatEncoder:
    """Chunks and bodies of /v1/chat/completions."""

    def __init__(self, call_id: str, created: int, model: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._head = {"id": call_id, "created": created, "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        head = orjson.dumps(
            {"id": call_id, "object": "chat.completion.chunk", "created": created, "model": model}
        )
        self._prefix = b"data: " + head[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        return b"%s%d,%s\n\n" % (
            self._prefix,
            index,
            b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        )

    def piece(self, index: int, piece: TextPiece) -> bytes:
        return b'%s%d,"delta":{"content":%s},"logprobs":%s,"finish_reason":null}]}\n\n' % (
            self._prefix,
            index,
            orjson.dumps(piece.text),
            self._logprobs_of(piece.tokens),
        )

    def finish(self, index: int, reason: str) -> bytes:
        return b'%s%d,"delta":{},"logprobs":null,"finish_reason":%s}]}\n\n' % (
            self._prefix,
            index,
            orjson.dumps(reason),
        )

    def usage(self, usage: Usage) -> bytes:
        body = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.as_json()}
        return sse(orjson.dumps(body))

    def whole(self, choices: Sequence[tuple[Generation, TextPiece]], usage: Usage) -> bytes:
        return orjson.dumps(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": generation.index,
                        "message": {"role": "assistant", "content": piece.text, "refusal": None},
                        "logprobs": orjson.Fragment(self._logprobs_of(piece.tokens)),
                        "finish_reason": generation.finish_reason,
                    }
                    for generation, piece in choices
                ],
                "usage": usage.as_json(),
            }
        )

    def _logprobs_of(self, tokens: Sequence[SampledToken]) -> bytes:
        if not self._logprobs:
            return b"null"
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
        return orjson.dumps({"content": content, "refusal": None})

    def _token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionEncoder:
    """Chunks and bodies of /v1/completions. ``echoes``: what stands before each choice's text."""

    def __init__(
        self,
        call_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        echoes: Sequence[str],
    ) -> None:
        self._head = {"id": call_id, "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'

    def opening(self, index: int) -> bytes:
        """The echoed prompt, where one was asked for."""
        echo = self._echoes[index]
        return self.piece(index, TextPiece(echo, [])) if echo else b""

    def piece(self, index: int, piece: TextPiece) -> bytes:
        return b'%s%d,"text":%s,"logprobs":%s,"finish_reason":null}]}\n\n' % (
            self._prefix,
            index,
            orjson.dumps(piece.text),
            self._logprobs_of(index, piece.tokens),
        )

    def finish(self, index: int, reason: str) -> bytes:
        return b'%s%d,"text":"","logprobs":null,"finish_reason":%s}]}\n\n' % (
            self._prefix,
            index,
            orjson.dumps(reason),
        )

    def usage(self, usage: Usage) -> bytes:
        return sse(orjson.dumps({**self._head, "choices": [], "usage": usage.as_json()}))

    def whole(self, choices: Sequence[tuple[Generation, TextPiece]], usage: Usage) -> bytes:
        return orjson.dumps(
            {
                **self._head,
                "choices": [
                    {
                        "index": generation.index,
                        "text": self._echoes[generation.index] + piece.text,
                        "logprobs": orjson.Fragment(self._logprobs_of(generation.index, piece.tokens)),
                        "finish_reason": generation.finish_reason,
                    }
                    for generation, piece in choices
                ],
                "usage": usage.as_json(),
            }
        )

    def _logprobs_of(self, index: int, tokens: Sequence[SampledToken]) -> bytes:
        if not self._logprobs:
            return b"null"
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
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


Encoder = ChatEncoder | CompletionEncoder
