"""One request to an OpenAI-compatible server, from its bytes to what became of it.

An attempt takes the response as it arrives and can be asked for its outcome at any moment: a request that the
run's end cuts off still has the gaps between the tokens it got.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.errors import ConfigError
from common.latency import RequestLatency, request_latency
from services.bench.config import BenchError
from services.bench.connection import ConnectionFailed, ConnectionPool, encode_request
from services.bench.stream import UNREADABLE, CompletionStream, Usage, read_error

LONGEST_ERROR_BYTES = 64 * 1024
LONGEST_MODELS_BYTES = 4 * 2**20
HTTP_OK, HTTP_UNAUTHORIZED = 200, 401


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request to send. ``class_name`` is the load it belongs to; lengths are what it asks for."""

    class_name: str
    index: int
    prompt_tokens: int
    output_tokens: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind`` groups failures in the report: ``http_503``, ``timeout``, ``truncated``, …"""

    kind: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; times in seconds on the client's monotonic clock.

    ``arrival_s`` is when it was due (open loop) or made (closed loop), ``sent_s`` when it was written.
    ``is_cut``: the run ended while it was being served; neither a success nor a failure.
    """

    class_name: str
    index: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    due_s: float
    sent_s: float
    finished_s: float
    token_times_s: "array[float]"
    usage: Usage | None
    has_done: bool
    failure: Failure | None
    is_cut: bool

    @property
    def is_served(self) -> bool:
        return self.failure is None and not self.is_cut

    @property
    def counted_output_tokens(self) -> int:
        """The server's count; where it sent none, the events that carried a token."""
        return self.usage.completion_tokens if self.usage is not None else len(self.token_times_s)

    @property
    def latency(self) -> RequestLatency:
        """Of one that was served: ValueError where no token came."""
        tokens = self.counted_output_tokens
        return request_latency(self.arrival_s, self.token_times_s, self.finished_s, tokens)


class Attempt:
    """A request under way: the sink of its response. ``on_first_token`` is called once."""

    def __init__(
        self,
        request: BenchRequest,
        due_s: float,
        checks_tokens: bool,
        on_first_token: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self._due_s = due_s
        self._checks_tokens = checks_tokens
        self._on_first_token = on_first_token
        self._stream = CompletionStream()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._error_body = b""
        self._sent_s = time.monotonic()
        self._finished_s = self._sent_s
        self._is_over = False
        self._failure: Failure | None = None

    def take_head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self._headers = headers

    def take_body(self, data: bytes, now_s: float) -> None:
        self._finished_s = now_s
        if self._status != HTTP_OK or not self._is_event_stream():
            self._error_body = (self._error_body + data)[:LONGEST_ERROR_BYTES]
            return
        self._stream.feed(data, now_s)
        if self._on_first_token is not None and self._stream.token_times_s:
            self._on_first_token()
            self._on_first_token = None

    def fail(self, kind: str, message: str) -> None:
        """End the attempt for a reason that is not in the response."""
        self._is_over = True
        self._finished_s = max(self._finished_s, time.monotonic())
        self._failure = Failure(kind, message, _retry_after_s(self._headers))

    def finish(self) -> None:
        """End the attempt: the response is complete. Decides whether it was served."""
        self._is_over = True
        self._stream.finish()
        stream = self._stream
        if self._status != HTTP_OK:
            kind, message = f"http_{self._status}", read_error(self._error_body)
        elif not self._is_event_stream():
            kind, message = "not_a_stream", f"content-type {self._headers.get('content-type')!r}"
        elif stream.fault is not None:
            kind, message = stream.fault.value, stream.error_message
        elif not stream.token_times_s:
            kind, message = "no_token", "the response ended without a token"
        elif (problem := self._token_count_problem()) is not None:
            kind, message = "wrong_token_count", problem
        else:
            return
        self._failure = Failure(kind, message, _retry_after_s(self._headers))

    def outcome(self) -> Outcome:
        stream = self._stream
        return Outcome(
            class_name=self.request.class_name,
            index=self.request.index,
            prompt_tokens=self.request.prompt_tokens,
            output_tokens=self.request.output_tokens,
            # A timer may fire a fraction of a millisecond early; no request arrives after it was sent.
            arrival_s=min(self._due_s, self._sent_s),
            due_s=self._due_s,
            sent_s=self._sent_s,
            finished_s=self._finished_s,
            token_times_s=stream.token_times_s,
            usage=stream.usage,
            has_done=stream.is_done,
            failure=self._failure,
            is_cut=not self._is_over,
        )

    def _is_event_stream(self) -> bool:
        return self._headers.get("content-type", "").startswith("text/event-stream")

    def _token_count_problem(self) -> str | None:
        usage = self._stream.usage
        if not self._checks_tokens or usage is None:
            return None
        if usage.completion_tokens == self.request.output_tokens:
            return None
        return f"asked for {self.request.output_tokens} output tokens, got {usage.completion_tokens}"


def _retry_after_s(headers: dict[str, str]) -> float | None:
    """The header in seconds; a date, which RFC 9110 allows too, is not read."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Client:
    """How requests are sent: where, for how long, with what key."""

    pool: ConnectionPool
    path: str
    api_key: str | None
    request_timeout_s: float

    async def send(self, attempt: Attempt) -> None:
        """Run an attempt to its end; every failure lands in its outcome, only cancellation passes through."""
        wire = encode_request(self.pool.target, "POST", self.path, attempt.request.body, self.api_key)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                await self.pool.exchange(wire, attempt)
        except TimeoutError:
            attempt.fail("timeout", f"no complete response within {self.request_timeout_s} s")
        except ConnectionFailed as exc:
            attempt.fail("connection", str(exc))
        else:
            attempt.finish()


class _Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None


class _Cards(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...]


class _BodySink:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def take_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def take_body(self, data: bytes, now_s: float) -> None:
        self.body = (self.body + data)[:LONGEST_MODELS_BYTES]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``context_tokens`` where the server tells (vLLM's ``max_model_len``)."""

    name: str
    context_tokens: int | None


async def find_model(
    pool: ConnectionPool, api_key: str | None, wanted: str | None, timeout_s: float
) -> ServedModel:
    """The model to ask for: ``wanted``, or the first that ``/v1/models`` lists.

    A server without that route still serves a model that was named. BenchError where nothing answers.
    """
    sink = _BodySink()
    url = f"{pool.target.authority}{pool.target.path}/v1/models"
    try:
        async with asyncio.timeout(timeout_s):
            await pool.exchange(encode_request(pool.target, "GET", "/v1/models", b"", api_key), sink)
    except TimeoutError as exc:
        raise BenchError(f"{url} did not answer within {timeout_s} s") from exc
    except ConnectionFailed as exc:
        raise BenchError(str(exc)) from exc
    try:
        cards = msgspec.json.decode(sink.body, type=_Cards).data if sink.status == HTTP_OK else ()
    except UNREADABLE:
        cards = ()
    chosen = next((card for card in cards if wanted in (None, card.id)), None)
    if chosen is not None:
        return ServedModel(chosen.id, chosen.max_model_len or chosen.context_length)
    if wanted is not None:
        return ServedModel(wanted, None)
    if sink.status == HTTP_UNAUTHORIZED:
        raise BenchError(f"{url} wants another key than OPENAI_API_KEY has")
    raise ConfigError("--model", None, f"must be named: {url} answered {sink.status} and lists no model")
