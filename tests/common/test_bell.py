"""Bells over real shared memory: nobody who listens misses a ring."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from common import bell as bell_module
from common.bell import MAX_BELLS, Bell, Bells, bells_of
from common.transfer.buffers import SharedBuffer

LONG_S = 30.0
LINE = 64


@pytest.fixture
def memory() -> Iterator[memoryview]:
    buffer = SharedBuffer(256 * LINE, "lamella-bell")
    yield buffer.memory
    buffer.close()


def slept(bells: Bells, timeout_s: float) -> float:
    """How long, in seconds."""
    began_s = time.monotonic()
    bells.wait(timeout_s)
    return time.monotonic() - began_s


def test_a_ring_between_the_look_and_the_sleep_is_not_missed(memory: memoryview) -> None:
    bell = Bell(memory, LINE)
    bells = Bells([bell])
    bells.listen()
    bell.ring()
    assert slept(bells, LONG_S) < LONG_S / 2
    bells.listen()
    assert slept(bells, 0.05) >= 0.04


def test_any_of_several_wakes_who_sleeps_on_all(memory: memoryview) -> None:
    for number in range(3):
        bells = [Bell(memory, place * LINE) for place in range(3)]
        together = Bells(bells)
        together.listen()
        ringing = threading.Timer(0.1, bells[number].ring)
        ringing.start()
        assert slept(together, LONG_S) < LONG_S / 2
        ringing.join()


def test_words_of_other_lines_stay_as_they_are(memory: memoryview) -> None:
    bell = Bell(memory, 2 * LINE)
    bell.ring()
    assert bell.rings == 1
    assert bytes(memory[: 2 * LINE]) == bytes(2 * LINE)
    assert bytes(memory[2 * LINE + 4 :]) == bytes(len(memory) - 2 * LINE - 4)


def test_rings_are_counted_beyond_the_word(memory: memoryview) -> None:
    memory[:4] = b"\xff" * 4
    bell = Bell(memory, 0)
    bell.ring()
    assert bell.rings == 0


def answer(buffer: SharedBuffer, rounds: int, begun: Event) -> None:
    ask, reply = Bell(buffer.memory, 0), Bell(buffer.memory, LINE)
    asked = Bells([ask])
    begun.set()
    for number in range(1, rounds + 1):
        while ask.rings < number:
            asked.wait(LONG_S)
            asked.listen()
        reply.ring()


def test_two_processes_wake_each_other(memory: memoryview) -> None:
    """As often as they take turns: a wake-up that was missed would take its whole timeout."""
    rounds = 2000
    buffer = SharedBuffer(2 * LINE, "lamella-bell")
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    other = context.Process(target=answer, args=(buffer, rounds, begun), daemon=True)
    other.start()
    ask, reply = Bell(buffer.memory, 0), Bell(buffer.memory, LINE)
    replied = Bells([reply])
    assert begun.wait(LONG_S)
    began_s = time.monotonic()
    for number in range(1, rounds + 1):
        ask.ring()
        while reply.rings < number:
            replied.wait(LONG_S)
            replied.listen()
    assert time.monotonic() - began_s < LONG_S
    other.join(LONG_S)
    assert other.exitcode == 0
    buffer.close()


def test_who_cannot_hear_all_hears_none(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    bells = [Bell(memory, LINE * place) for place in range(MAX_BELLS + 1)]
    assert isinstance(bells_of(bells[:MAX_BELLS]), Bells)
    assert bells_of(bells) is None
    assert bells_of([]) is None
    assert bells_of([bells[0], None]) is None
    monkeypatch.setattr(bell_module, "_CAN_SLEEP", False)
    assert bells_of(bells[:1]) is None
