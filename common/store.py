"""Who is a member of the mesh: records under leases in a Redis-compatible store.

The only importer of redis. The store holds soft state: every member rewrites its whole record with each
heartbeat, so a flushed or restarted store is complete again within one. Losing the store stops nothing that
runs. All times are the server's, so clocks of machines are never compared.

Keys of one mesh, all under ``lamella:<namespace>:``::

    member:<id>     incarnation, newline, the record as JSON; expires with the lease
    members         sorted set of ids by the server's second of their last renewal
    lives           likewise of kind, id and incarnation, a line each; those that left are not in it
    leader          epoch, incarnation and id of the scheduler that leads, a line each; expires with its lease
    leader-epoch    the last leader's epoch
    plan            epoch, newline, the scheduler's latest DesiredCounts as JSON; stays
    booked          set of incarnations of schedulers that wrote bookings
    booked:<inc.>   hash of such a one: by request, the Booking as MessagePack; expires with its silence

A member is its id and its incarnation. The newest incarnation of an id wins: an older one, paused and woken
again, cannot write over it (MemberSuperseded).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from common.cancellation import keep_cancellation
from common.errors import StoreError, StoreUnavailable
from common.ids import Incarnation, InstanceId, RequestId
from common.messages import InstanceLife, InstanceRecord, MemberRecord, ServiceKind
from common.messages.bookings import Booking
from common.scaling import DesiredCounts

log = logging.getLogger("lamella.store")

Result = TypeVar("Result")

OPERATION_TIMEOUT_S = 0.9
"""Of one operation with its retries: redis-py's own defaults take five seconds to notice a dead port."""
CONNECT_TIMEOUT_S = 0.3
RETRIES = 3
FORGET_LEASES = 10
"""An id leaves the index after this many silent leases; its record has expired long before."""
LIVES_KEPT_S = 600
"""For so long a scheduler that begins can tell whose sequences are lost (``departed``)."""
BOOKINGS_KEPT_S = 60
"""After its last word, of a scheduler's bookings: as long as schedulers remember what has ended."""
MAX_CONNECTIONS = 8
INSTANCE = "instance"
"""The kind of a life that is no service's."""

JOIN = """
redis.call('SET', KEYS[1], ARGV[1] .. '\\n' .. ARGV[2], 'PX', ARGV[3])
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[2], now, ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[5]))
redis.call('ZADD', KEYS[3], now, ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - tonumber(ARGV[7]))
return 1
"""
RENEW = (
    """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
"""
    + JOIN
)
LEAVE = """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[2])
end
redis.call('ZREM', KEYS[3], ARGV[3])
return 1
"""

WRITE_PLAN = """
local held = redis.call('GET', KEYS[1])
local epoch = held and tonumber(string.match(held, '^%d+'))
if epoch and epoch > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. '\\n' .. ARGV[2])
return 1
"""
CLAIM_LEAD = """
local held = redis.call('GET', KEYS[1])
if held then
  local epoch, holder = string.match(held, '^(%d+)\\n([^\\n]*)')
  if holder ~= ARGV[1] then return {held, redis.call('PTTL', KEYS[1])} end
  if tonumber(epoch) >= tonumber(ARGV[4]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return {held, tonumber(ARGV[3])}
  end
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
local epoch = string.format('%.0f', math.max(now_ms, last + 1, ARGV[4] + 1))
held = epoch .. '\\n' .. ARGV[1] .. '\\n' .. ARGV[2]
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[1], held, 'PX', ARGV[3])
return {held, tonumber(ARGV[3])}
"""
RESIGN_LEAD = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+\\n([^\\n]*)') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
WRITE_BOOKED = """
if ARGV[3] == '1' then redis.call('DEL', KEYS[1]) end
local was_there = redis.call('EXISTS', KEYS[1])
local after = 4 + 2 * tonumber(ARGV[4])
for at = 5, after, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
for at = after + 1, #ARGV do redis.call('HDEL', KEYS[1], ARGV[at]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
return was_there
"""


class Leader(msgspec.Struct, frozen=True):
    """The scheduler that leads, for ``remaining_s`` if it does not renew its lease.

    ``epoch`` grows with every leader, also of an emptied store: it is at least the server's milliseconds.
    """

    service_id: str
    incarnation: Incarnation
    epoch: int
    remaining_s: float


class MemberSuperseded(StoreError):
    """A newer incarnation of this member has joined: this process must stop."""


class Store:
    """One member's view of the store. Every operation ends within about a second, or StoreUnavailable.

    Counted since the start: operations ``answered`` and the seconds that took, ``failures`` of others, and
    ``malformed`` records.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.answered, self.answered_s, self.failures, self.malformed = 0, 0.0, 0, 0
        self._address = _address(url)
        self._prefix = f"lamella:{namespace}:"
        self._record: MemberRecord | None = None
        self._lease_s = 0.0
        self._has_joined = False
        self._client = redis.asyncio.Redis.from_url(
            url,
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), RETRIES),
            socket_timeout=OPERATION_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            health_check_interval=5,
            max_connections=MAX_CONNECTIONS,
        )
        self._join = self._client.register_script(JOIN)
        self._renew = self._client.register_script(RENEW)
        self._leave = self._client.register_script(LEAVE)
        self._claim_lead = self._client.register_script(CLAIM_LEAD)
        self._resign_lead = self._client.register_script(RESIGN_LEAD)
        self._write_plan = self._client.register_script(WRITE_PLAN)
        self._decoder: msgspec.json.Decoder[MemberRecord] = msgspec.json.Decoder(MemberRecord)
        self._write_booked = self._client.register_script(WRITE_BOOKED)
        self._booking_decoder: msgspec.msgpack.Decoder[Booking] = msgspec.msgpack.Decoder(Booking)

    async def connect(self) -> None:
        """Proves that the store answers. Raises StoreUnavailable."""
        await self._run(self._client.ping)

    async def server_time_s(self) -> float:
        """The server's clock, in seconds since 1970. Raises StoreUnavailable."""
        seconds, microseconds = cast(tuple[int, int], await self._run(self._client.time))
        return seconds + microseconds / 1e6

    async def close(self) -> None:
        await self._client.aclose()

    async def join(self, record: MemberRecord, lease_s: float) -> None:
        """Writes the record, whoever held its id before. Raises StoreUnavailable; ``renew`` then retries."""
        self._record = record
        self._lease_s = lease_s
        self._has_joined = False
        await self.renew()

    async def update(self, record: MemberRecord) -> None:
        """Replaces this member's record. Raises StoreUnavailable, MemberSuperseded."""
        self._record = record
        await self.renew()

    async def renew(self) -> None:
        """Writes the whole record again and extends the lease. Raises StoreUnavailable, MemberSuperseded."""
        script = self._renew if self._has_joined else self._join
        is_written = await self._run(lambda: self._write(script))
        if not is_written:
            raise MemberSuperseded(f"a newer incarnation of {self._member_id} has joined")
        self._has_joined = True

    async def leave(self) -> None:
        """Removes this incarnation's record at once. Raises StoreUnavailable."""
        if self._record is None:
            return
        member_id = self._member_id
        keys = self._keys_of(member_id)
        arguments = [_incarnation(self._record), member_id, _life(self._record)]
        await self._run(lambda: self._leave(keys=keys, args=arguments))
        self._record = None

    async def members(self) -> list[MemberRecord]:
        """Every member whose lease runs. Values that are no record are skipped and counted."""
        return await self._run(self._read_members)

    async def departed(self) -> list[InstanceLife]:
        """Instances' lives of the last ``LIVES_KEPT_S`` that ended without leaving: no record is theirs."""
        lives = await self._lives()
        present = {_life(record) for record in await self.members()}
        parts = [each.split("\n") for each in lives if each not in present]
        return [
            InstanceLife(InstanceId(name), Incarnation(of)) for kind, name, of in parts if kind == INSTANCE
        ]

    async def former_lives(
        self, kind: ServiceKind, service_id: str, incarnation: Incarnation
    ) -> list[Incarnation]:
        """Of that service, before the one that asks, of the last ``LIVES_KEPT_S``: that ended without
        leaving."""
        parts = [each.split("\n") for each in await self._lives()]
        own = [Incarnation(of) for of_kind, name, of in parts if (of_kind, name) == (kind, service_id)]
        return [each for each in own if each != incarnation]

    async def _lives(self) -> list[str]:
        key = f"{self._prefix}lives"
        lives = cast(list[bytes], await self._run(lambda: self._client.zrange(key, 0, -1)))
        return [life.decode() for life in lives]

    async def claim_lead(
        self, service_id: str, incarnation: Incarnation, lease_s: float, seen_epoch: int
    ) -> Leader:
        """Who leads now: this scheduler where nobody did, or it did before and its epoch is not below
        ``seen_epoch``, the highest of another that it has heard of. Raises StoreUnavailable."""
        keys = [f"{self._prefix}leader", f"{self._prefix}leader-epoch"]
        arguments: list[str | int] = [incarnation, service_id, round(lease_s * 1000), seen_epoch]
        held, remaining_ms = await self._run(lambda: self._claim_lead(keys=keys, args=arguments))
        return _leader(held, remaining_ms)

    async def resign_lead(self, incarnation: Incarnation) -> None:
        """Another may lead at once. Raises StoreUnavailable."""
        keys = [f"{self._prefix}leader"]
        await self._run(lambda: self._resign_lead(keys=keys, args=[incarnation]))

    async def leader(self) -> Leader | None:
        """None: nobody leads. Raises StoreUnavailable."""
        key = f"{self._prefix}leader"
        held = cast(bytes | None, await self._run(lambda: self._client.get(key)))
        remaining_ms = cast(int, await self._run(lambda: self._client.pttl(key)))
        return None if held is None else _leader(held, remaining_ms)

    async def write_plan(self, plan: DesiredCounts) -> bool:
        """Replaces the latest plan; False where one of a higher epoch is there. Raises StoreUnavailable."""
        keys = [f"{self._prefix}plan"]
        arguments: list[int | bytes] = [plan.epoch, msgspec.json.encode(plan)]
        return bool(await self._run(lambda: self._write_plan(keys=keys, args=arguments)))

    async def read_plan(self) -> DesiredCounts | None:
        """The latest one of any scheduler; None where there is none, or it cannot be read."""
        key = f"{self._prefix}plan"
        value = cast(bytes | None, await self._run(lambda: self._client.get(key)))
        if value is None:
            return None
        try:
            return msgspec.json.decode(value.partition(b"\n")[2], type=DesiredCounts)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._note_malformed(exc)
            return None

    async def write_bookings(
        self,
        writer: Incarnation,
        booked: Collection[Booking],
        ended: Collection[RequestId] = (),
        *,
        is_whole: bool,
    ) -> bool:
        """Adds to what that scheduler has written and takes out of it, or replaces it as a whole. False where
        there was nothing of it to add to. Raises StoreUnavailable."""
        keys = [f"{self._prefix}booked:{writer}", f"{self._prefix}booked"]
        arguments: list[int | str | bytes] = [writer, BOOKINGS_KEPT_S, int(is_whole), len(booked)]
        for each in booked:
            arguments += [each.request_id, msgspec.msgpack.encode(each)]
        return bool(await self._run(lambda: self._write_booked(keys=keys, args=[*arguments, *ended])))

    async def bookings(self) -> list[Booking]:
        """Those of every scheduler that wrote within ``BOOKINGS_KEPT_S``. Values that are none are skipped
        and counted. Raises StoreUnavailable."""
        values = await self._run(self._read_bookings)
        return [each for value in values if (each := self._decode_booking(value)) is not None]

    async def _read_bookings(self) -> list[bytes]:
        index = f"{self._prefix}booked"
        writers = sorted(cast(set[bytes], await self._client.smembers(index)))
        found: list[bytes] = []
        for writer in writers:
            values = await self._client.hvals(f"{self._prefix}booked:{writer.decode(errors='replace')}")
            found += cast(list[bytes], values)
            if not values:
                await self._client.srem(index, writer)
        return found

    def _decode_booking(self, value: bytes) -> Booking | None:
        try:
            return self._booking_decoder.decode(value)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._note_malformed(exc)
            return None

    @property
    def _member_id(self) -> str:
        if self._record is None:
            raise StoreError("this process has not joined")
        return _member_id(self._record)

    async def _write(self, script: Callable[..., Awaitable[Any]]) -> bool:
        member_id = self._member_id
        assert self._record is not None
        arguments = [
            _incarnation(self._record),
            msgspec.json.encode(self._record),
            round(self._lease_s * 1000),
            member_id,
            round(self._lease_s * FORGET_LEASES),
            _life(self._record),
            LIVES_KEPT_S,
        ]
        return bool(await script(keys=self._keys_of(member_id), args=arguments))

    def _keys_of(self, member_id: str) -> list[str]:
        return [f"{self._prefix}member:{member_id}", f"{self._prefix}members", f"{self._prefix}lives"]

    async def _read_members(self) -> list[MemberRecord]:
        ids = cast(list[bytes], await self._client.zrange(f"{self._prefix}members", 0, -1))
        if not ids:
            return []
        keys = [f"{self._prefix}member:{each.decode(errors='replace')}" for each in ids]
        values = cast(list[bytes | None], await self._client.mget(keys))
        records = []
        for value in values:
            record = None if value is None else self._read_record(value)
            if record is not None:
                records.append(record)
        return records

    def _read_record(self, value: bytes) -> MemberRecord | None:
        _, _, encoded = value.partition(b"\n")
        try:
            return self._decoder.decode(encoded)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._note_malformed(exc)
            return None

    def _note_malformed(self, error: Exception) -> None:
        self.malformed += 1
        log.warning("store_malformed_record", extra={"error": str(error)})

    async def _run(self, operation: Callable[[], Awaitable[Result]]) -> Result:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                answer = await keep_cancellation(operation())
        except (TimeoutError, redis.exceptions.TimeoutError) as exc:
            self.failures += 1
            raise StoreUnavailable(f"store at {self._address}: no answer in {OPERATION_TIMEOUT_S} s") from exc
        except (redis.exceptions.RedisError, OSError) as exc:
            self.failures += 1
            raise StoreUnavailable(f"store at {self._address}: {exc}") from exc
        self.answered += 1
        self.answered_s += time.monotonic() - began_s
        return answer


def _member_id(record: MemberRecord) -> str:
    return record.instance_id if isinstance(record, InstanceRecord) else record.service_id


def _incarnation(record: MemberRecord) -> Incarnation:
    return record.incarnation


def _life(record: MemberRecord) -> str:
    kind = INSTANCE if isinstance(record, InstanceRecord) else record.kind
    return f"{kind}\n{_member_id(record)}\n{record.incarnation}"


def _leader(held: bytes, remaining_ms: int) -> Leader:
    epoch, incarnation, service_id = held.decode().split("\n")
    return Leader(service_id, Incarnation(incarnation), int(epoch), max(0, remaining_ms) / 1000)


def _address(url: str) -> str:
    """The URL without its credentials, for logs and errors."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}"
