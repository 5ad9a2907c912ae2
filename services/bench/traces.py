"""Traces of real traffic, read into one form: when a request came, its lengths, and which prefix it shares.

Six formats, told apart by the first line, plain or gzip (told apart by the first bytes), never by the name:

- Azure CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``): wall-clock times, up to seven fractional digits,
  with or without a zone;
- Mooncake JSON lines (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``: equal ids are
  equal prefix blocks of 512 tokens);
- Vidur CSV (``arrived_at`` in seconds, ``num_prefill_tokens``, ``num_decode_tokens``);
- splitwise-sim CSV (``arrival_timestamp`` in seconds, ``prompt_size``, ``token_size``);
- simdistserve's workloads as CSV (``prompt_tokens``, ``output_tokens``, ``unit_interarrival_s``: seconds
  since the request before it, at a rate of one a second);
- Vidur's without ``arrived_at``: lengths alone, for a rate or a concurrency to give them times.

A row that breaks a rule is an error naming file, line and rule: a benchmark that skips rows measures another
workload than it says.
"""

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from common.errors import ServiceError, reason_of
from services.bench.lengths import MOST_TOKENS

PREFIX_BLOCK_TOKENS = 512
"""What one hash id of a Mooncake trace stands for (Mooncake, FAST'25, its released traces)."""

GZIP_MAGIC = b"\x1f\x8b"
_STAMP = re.compile(r"(.*?)(\.\d+)?([+-]\d\d:\d\d|Z)?", re.DOTALL)
"""Whole seconds, their fraction, a zone."""


class TraceError(ServiceError):
    """A trace file breaks a rule. ``line`` 0: all of it."""

    def __init__(self, path: Path, line: int, rule: str) -> None:
        super().__init__(f"{path}, line {line}: {rule}" if line else f"{path}: {rule}")
        self.path = path
        self.line = line
        self.rule = rule


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``arrival_s`` counts from the trace's first request; None where the trace carries lengths alone."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    requests: tuple[TraceRequest, ...]

    @property
    def has_arrivals(self) -> bool:
        return self.requests[0].arrival_s is not None


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_Row = Callable[[dict[str, str]], TraceRequest]


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read the first ``limit`` requests, or all. TraceError names the line that breaks a rule."""
    requests: list[TraceRequest] = []
    first_s: float | None = None
    previous_s = float("-inf")
    for line, row in _read_rows(path):
        for what, tokens in (("prompt", row.prompt_tokens), ("output", row.output_tokens)):
            if not 1 <= tokens <= MOST_TOKENS:
                raise TraceError(path, line, f"{what} of {tokens} tokens: must have 1 to {MOST_TOKENS:,}")
        arrival_s = row.arrival_s
        if arrival_s is not None:
            if not previous_s <= arrival_s < float("inf"):
                raise TraceError(path, line, "a request must not arrive before the one above it")
            previous_s = arrival_s
            first_s = arrival_s if first_s is None else first_s
            arrival_s -= first_s
        requests.append(TraceRequest(arrival_s, row.prompt_tokens, row.output_tokens, row.block_hashes))
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise TraceError(path, 1, "holds no request")
    return Trace(tuple(requests))


def _read_rows(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Numbered requests (lines count from one), with arrivals as the file states them."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
        opener = gzip.open if is_gzip else open
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            yield from _parse_lines(path, lines)
    except UnicodeDecodeError as exc:
        raise TraceError(path, 0, "cannot be read: it is not UTF-8 text") from exc
    except (OSError, EOFError, zlib.error) as exc:
        raise TraceError(path, 0, f"cannot be read: {reason_of(exc)}") from exc


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRequest]]:
    iterator = iter(lines)
    first = next(iterator, "")
    if first.lstrip("\ufeff").startswith("{"):
        yield from _parse_mooncake(path, first, iterator)
        return
    columns = tuple(next(csv.reader([first.lstrip("\ufeff")]), []))
    parse = _row_parser(columns)
    if parse is None:
        raise TraceError(
            path,
            1,
            f"must be a JSON object or a header naming TIMESTAMP,ContextTokens,GeneratedTokens, "
            f"arrival_timestamp,prompt_size,token_size, prompt_tokens,output_tokens,unit_interarrival_s or "
            f"[arrived_at,]num_prefill_tokens,num_decode_tokens, not {first.strip()[:80]!r}",
        )
    for line, row in enumerate(csv.reader(iterator), start=2):
        if not row:
            continue
        if len(row) != len(columns):
            raise TraceError(path, line, f"must have {len(columns)} columns, has {len(row)}")
        try:
            yield line, parse(dict(zip(columns, row, strict=True)))
        except ValueError as exc:
            raise TraceError(path, line, str(exc)) from exc


def _row_parser(columns: tuple[str, ...]) -> _Row | None:
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return _parse_azure_row
    if {"arrived_at", "num_prefill_tokens", "num_decode_tokens"} <= set(columns):
        return _parse_vidur_row
    if {"arrival_timestamp", "prompt_size", "token_size"} <= set(columns):
        return _parse_splitwise_row
    if {"prompt_tokens", "output_tokens", "unit_interarrival_s"} <= set(columns):
        return _interarrival_parser()
    if {"num_prefill_tokens", "num_decode_tokens"} <= set(columns):
        return _parse_lengths_row
    return None


def _parse_azure_row(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(
        _moment_s(row, "TIMESTAMP"), _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens")
    )


def _parse_vidur_row(row: dict[str, str]) -> TraceRequest:
    lengths = _tokens(row, "num_prefill_tokens"), _tokens(row, "num_decode_tokens")
    return TraceRequest(_seconds(row, "arrived_at"), *lengths)


def _parse_splitwise_row(row: dict[str, str]) -> TraceRequest:
    lengths = _tokens(row, "prompt_size"), _tokens(row, "token_size")
    return TraceRequest(_seconds(row, "arrival_timestamp"), *lengths)


def _interarrival_parser() -> _Row:
    """Of one file: it adds up what its rows say."""
    arrival_s = 0.0

    def parse(row: dict[str, str]) -> TraceRequest:
        nonlocal arrival_s
        arrival_s += _seconds(row, "unit_interarrival_s")
        return TraceRequest(arrival_s, _tokens(row, "prompt_tokens"), _tokens(row, "output_tokens"))

    return parse


def _parse_lengths_row(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(None, _tokens(row, "num_prefill_tokens"), _tokens(row, "num_decode_tokens"))


def _tokens(row: dict[str, str], column: str) -> int:
    try:
        return int(row[column])
    except ValueError:
        raise ValueError(f"{column} = {row[column]!r}: must be a whole number of tokens") from None


def _seconds(row: dict[str, str], column: str) -> float:
    try:
        seconds = float(row[column])
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{column} = {row[column]!r}: must be a number of seconds")
    return seconds


def _moment_s(row: dict[str, str], column: str) -> float:
    """2023's stamps have seven fractional digits, of which Python reads six, and 2024's a zone."""
    stamp = _STAMP.fullmatch(row[column])
    assert stamp is not None, "its parts may be empty"
    seconds, fraction, zone = stamp.groups("")
    try:
        moment = datetime.fromisoformat(seconds + zone)
    except ValueError:
        rule = "must be a time such as 2023-11-16 18:15:46.68"
        raise ValueError(f"{column} = {row[column]!r}: {rule}") from None
    arrival_s = moment.timestamp() if moment.tzinfo else (moment - datetime(1970, 1, 1)).total_seconds()
    return arrival_s + float(fraction or 0)


def _parse_mooncake(path: Path, first: str, rest: Iterable[str]) -> Iterator[tuple[int, TraceRequest]]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line, text in _numbered(first, rest):
        if not text.strip():
            continue
        try:
            row = decoder.decode(text)
        except msgspec.MsgspecError as exc:
            raise TraceError(path, line, f"must be a Mooncake trace's object: {exc}") from exc
        # A length that no request has is told of as other traces' are.
        prefix = len(row.hash_ids) * PREFIX_BLOCK_TOKENS
        if 0 < row.input_length <= prefix - PREFIX_BLOCK_TOKENS:
            raise TraceError(
                path,
                line,
                f"{len(row.hash_ids)} hash_ids of {PREFIX_BLOCK_TOKENS} tokens are more than "
                f"input_length = {row.input_length} holds",
            )
        yield line, TraceRequest(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _numbered(first: str, rest: Iterable[str]) -> Iterator[tuple[int, str]]:
    yield 1, first.lstrip("\ufeff")
    yield from enumerate(rest, start=2)
