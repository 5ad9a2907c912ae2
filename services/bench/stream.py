"""What a streamed completion says, read from its bytes as they arrive. No IO, no clock: times are handed in.

Server-sent events are split by line and decoded into the few fields that matter: about 1 µs an event, so
a token is told from a chat's opening role, an empty closing event or the usage without guessing by
substring. Every ``data:`` line is one event: OpenAI's servers and their likes never spread JSON over several.
"""

from array import array
from enum import Enum

import msgspec

END_OF_STREAM = b"[DONE]"
LONGEST_LINE_BYTES = 4 * 2**20
"""An event without an end is a broken server: the buffer is bounded."""


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises for bytes that are no JSON of the shape, or no UTF-8."""


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct, frozen=True, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


NO_ERROR = msgspec.Raw(b"null")


class _Event(msgspec.Struct, frozen=True, gc=False):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: msgspec.Raw = NO_ERROR


class StreamFault(Enum):
    """How a stream that began well can end badly."""

    ERROR_EVENT = "error_event"
    MALFORMED_EVENT = "malformed_event"
    TRUNCATED = "truncated"


_DECODER = msgspec.json.Decoder(_Event)


def carries_token(choice: _Choice) -> bool:
    """Whether an event stands for a generated token.

    Text does. So does an empty event in mid-stream: the token's bytes wait for the rest of a character. A
    chat's first event (a role, nothing said) and a closing event without text do not.
    """
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or choice.finish_reason is None
    if delta.content or delta.reasoning_content or delta.reasoning:
        return True
    return choice.finish_reason is None and delta.role is None


class CompletionStream:
    """One response's tokens. Feed bytes with the time they came; after the last, ask ``fault``.

    Invariant: ``token_times_s`` never falls, and holds nothing that came after ``[DONE]`` or an error event.
    """

    __slots__ = ("_tail", "error_message", "fault", "has_finish", "is_done", "token_times_s", "usage")

    def __init__(self) -> None:
        self.token_times_s = array("d")
        self.usage: Usage | None = None
        self.has_finish = False
        self.is_done = False
        self.fault: StreamFault | None = None
        self.error_message = ""
        self._tail = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes of the body that arrived at ``now_s``. Anything after the end is ignored."""
        if self._tail:
            data = self._tail + data
        lines = data.split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > LONGEST_LINE_BYTES:
            self._fail(StreamFault.MALFORMED_EVENT, f"an event is longer than {LONGEST_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:") and not self.is_done and self.fault is None:
                self._read_event(line[5:].strip(), now_s)

    def finish(self) -> None:
        """The body is over. A stream that neither finished nor said so was cut short."""
        if self.fault is None and not self.is_done and not self.has_finish:
            self._fail(StreamFault.TRUNCATED, "the stream ended before its finish_reason and [DONE]")

    def _read_event(self, payload: bytes, now_s: float) -> None:
        if payload == END_OF_STREAM:
            self.is_done = True
            return
        try:
            event = _DECODER.decode(payload)
        except UNREADABLE as exc:
            self._fail(StreamFault.MALFORMED_EVENT, f"{exc}: {payload[:120]!r}")
            return
        if event.error != NO_ERROR:
            self._fail(StreamFault.ERROR_EVENT, read_error(payload))
            return
        if event.usage is not None:
            self.usage = event.usage
        if event.choices:
            choice = event.choices[0]
            if carries_token(choice):
                self.token_times_s.append(now_s)
            if choice.finish_reason is not None:
                self.has_finish = True

    def _fail(self, fault: StreamFault, message: str) -> None:
        if self.fault is None:
            self.fault = fault
            self.error_message = message


class _ErrorFields(msgspec.Struct, frozen=True):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _NestedError(msgspec.Struct, frozen=True):
    error: _ErrorFields


def read_error(body: bytes) -> str:
    """The text of an OpenAI error object, nested or flat; the body's beginning where it is none."""
    fields = _read_fields(body)
    if fields is not None and fields.message:
        label = fields.code or fields.type
        return f"{label}: {fields.message}" if label else fields.message
    return body[:200].decode("utf-8", "replace")


def _read_fields(body: bytes) -> _ErrorFields | None:
    try:
        return msgspec.json.decode(body, type=_NestedError).error
    except UNREADABLE:
        pass
    try:
        return msgspec.json.decode(body, type=_ErrorFields)
    except UNREADABLE:
        return None
