"""A word of shared memory that one process rings and others sleep on until it does.

Who polls memory and yields its core between two looks is quickest where nobody else wants that core. Where
somebody does, Linux's scheduler (EEVDF) takes each yield for the rest of a slice: who has yielded a hundred
times comes back after all others had theirs, milliseconds after what it waits for. Who sleeps on a futex
instead is woken, and has a claim to the core. A ring costs a system call of under a microsecond, whether or
not anybody sleeps.

The word counts rings: who reads it (``listen``), then looks at what it waits for, and then sleeps only if the
word is still the same, misses none.
"""

import ctypes
import errno
import platform
import time
from collections.abc import Sequence

MAX_BELLS = 128
"""That one can sleep on at a time (``FUTEX_WAITV_MAX``)."""

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAITV = 449
FUTEX_WAKE = 1
FUTEX_SIZE_U32 = 2
EVERYBODY = (1 << 31) - 1
CLOCK_MONOTONIC = 1
NS = 1_000_000_000


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


# To ring is shorter than to give up the interpreter's lock and take it again; who sleeps gives it up.
_ring = ctypes.PyDLL(None).syscall
_ring.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
_sleep = ctypes.CDLL(None, use_errno=True).syscall
_sleep.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_int,
)
_FUTEX = FUTEX_NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None


class Bell:
    """At ``offset`` of memory that both sides have mapped; one thread rings it."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self.address = ctypes.addressof(self._word)

    @property
    def rings(self) -> int:
        """So far, modulo 2³²."""
        return self._word.value

    def ring(self) -> None:
        """What was stored before is seen by whoever hears it (x86-64; elsewhere at its next look)."""
        self._word.value += 1
        if _FUTEX is not None:
            _ring(_FUTEX, self.address, FUTEX_WAKE, EVERYBODY)


class Bells:
    """Those that one thread sleeps on; ``listen``, look at what they tell of, ``wait``, and again."""

    def __init__(self, bells: Sequence[Bell]) -> None:
        self._bells = tuple(bells)
        self._waiters = (_Waiter * len(bells))(
            *(_Waiter(each.rings, each.address, FUTEX_SIZE_U32, 0) for each in bells)
        )

    def listen(self) -> None:
        """``wait`` returns for whatever rings from now on."""
        for waiter, bell in zip(self._waiters, self._bells, strict=True):
            waiter.value = bell.rings

    def wait(self, timeout_s: float) -> None:
        """Until one of them has rung since ``listen``; or for that long; or a moment, for no reason."""
        seconds, nanoseconds = divmod(time.monotonic_ns() + int(timeout_s * NS), NS)
        until = _Time(seconds, nanoseconds)
        _sleep(FUTEX_WAITV, self._waiters, len(self._bells), 0, ctypes.byref(until), CLOCK_MONOTONIC)


def bells_of(bells: Sequence[Bell | None]) -> Bells | None:
    """None where one of them is not there, there are none or too many, or this system cannot sleep on
    several (Linux before 5.16, a sandbox that forbids it)."""
    there = [each for each in bells if each is not None]
    if not there or len(there) < len(bells) or len(there) > MAX_BELLS or not _CAN_SLEEP:
        return None
    return Bells(there)


def _can_sleep() -> bool:
    """Asked to sleep on a word that has changed already: told so, not refused."""
    if _FUTEX is None:
        return False
    word = ctypes.c_uint32(1)
    waiter = (_Waiter * 1)(_Waiter(0, ctypes.addressof(word), FUTEX_SIZE_U32, 0))
    ctypes.set_errno(0)
    _sleep(FUTEX_WAITV, waiter, 1, 0, None, CLOCK_MONOTONIC)
    return ctypes.get_errno() == errno.EAGAIN


_CAN_SLEEP = _can_sleep()
