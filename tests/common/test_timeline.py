"""A bounded recorder: what fits is kept in order, what does not is counted, and off means nothing."""

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.timeline import MAX_RINGS, MAX_TEXT_BYTES, Recording, Timeline, define, records_of

LONG_NS = 10**12
WORK = define("test work", "compute", "number")
QUEUE = define("test queue", "counter", "waiting", "running")
BORN = define("test born", "mark")


def taken(timeline: Timeline) -> Recording:
    recording = timeline.take()
    assert recording is not None
    return recording


def numbers(recording: Recording) -> list[int]:
    return [record.values[0] for thread in recording.threads for record in records_of(thread)]


def test_nothing_is_recorded_unless_asked_for() -> None:
    timeline = Timeline()
    began_ns = timeline.begin()
    assert began_ns == 0
    timeline.end(began_ns, WORK, 1)
    timeline.mark(BORN, "r1")
    timeline.count(QUEUE, 1)
    assert not timeline.is_on
    assert timeline.take() is None


def test_work_marks_and_counters_come_back_as_they_went_in() -> None:
    timeline = Timeline()
    timeline.start(LONG_NS)
    began_ns = timeline.begin()
    timeline.mark(BORN, "r1", peer="p1")
    timeline.count(QUEUE, 3, 4)
    timeline.end(began_ns, WORK, 7, requests="r1 r2")
    recording = taken(timeline)
    (thread,) = recording.threads
    born, queue, work = records_of(thread)
    assert (born.requests, born.peer) == ("r1", "p1")
    assert queue.values == (3, 4, 0, 0)
    assert (work.begin_ns, work.requests, work.values) == (began_ns, "r1 r2", (7, 0, 0, 0))
    assert recording.began_ns <= work.begin_ns <= born.begin_ns <= queue.end_ns <= work.end_ns
    assert work.end_ns <= recording.ended_ns
    names = [recording.events[record.event].name for record in (born, queue, work)]
    assert names == ["test born", "test queue", "test work"]
    assert thread.thread == threading.current_thread().name


@given(capacity=st.integers(1, 12), written=st.integers(0, 40))
def test_the_newest_records_stay_in_order_and_the_others_are_counted(capacity: int, written: int) -> None:
    timeline = Timeline(capacity)
    timeline.start(LONG_NS)
    for number in range(written):
        timeline.end(timeline.begin(), WORK, number)
    recording = taken(timeline)
    assert numbers(recording) == list(range(max(0, written - capacity), written))
    assert sum(thread.lost for thread in recording.threads) == max(0, written - capacity)
    ends = [record.end_ns for thread in recording.threads for record in records_of(thread)]
    assert all(first <= second for first, second in pairwise(ends))


def test_every_thread_has_its_own_records() -> None:
    timeline = Timeline()
    timeline.start(LONG_NS)

    def work(number: int) -> None:
        for _ in range(100):
            timeline.end(timeline.begin(), WORK, number)

    threads = [threading.Thread(target=work, args=(number,), name=f"thread {number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = taken(timeline)
    found = {each.thread: {record.values[0] for record in records_of(each)} for each in recording.threads}
    assert found == {f"thread {number}": {number} for number in range(4)}
    assert len(numbers(recording)) == 400


def test_threads_beyond_the_bound_keep_their_last_record_and_count_the_others() -> None:
    timeline = Timeline(capacity=50)
    timeline.start(LONG_NS)

    def work() -> None:
        for number in range(5):
            timeline.end(timeline.begin(), WORK, number, requests="r1")

    for _ in range(MAX_RINGS + 1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    last = taken(timeline).threads[-1]
    assert [record.values[0] for record in records_of(last)] == [4]
    assert (last.lost, last.texts_lost) == (4, 5)


def test_texts_beyond_their_memory_are_counted_and_left_out() -> None:
    timeline = Timeline()
    timeline.start(LONG_NS)
    long_text = "r" * (MAX_TEXT_BYTES - 1)
    for requests in (long_text, "ab", "a", long_text):
        timeline.end(timeline.begin(), WORK, requests=requests)
    (thread,) = taken(timeline).threads
    assert [record.requests for record in records_of(thread)] == [long_text, "", "a", long_text]
    assert thread.texts_lost == 1


def test_what_spans_the_beginning_or_the_end_is_left_out() -> None:
    timeline = Timeline()
    timeline.start(LONG_NS)
    before_ns = timeline.begin()
    timeline.start(LONG_NS)
    timeline.end(before_ns, WORK, 1)
    inside_ns = timeline.begin()
    timeline.end(inside_ns, WORK, 2)
    late_ns = timeline.begin()
    timeline.stop()
    timeline.end(late_ns, WORK, 3)
    assert numbers(taken(timeline)) == [2]


def test_a_recording_ends_by_itself() -> None:
    timeline = Timeline()
    until_ns = timeline.start(0)
    began_ns = timeline.begin()
    while timeline.begin() <= until_ns:
        pass
    timeline.end(began_ns, WORK, 1)
    assert timeline.is_on
    recording = taken(timeline)
    assert recording.ended_ns == until_ns
    assert numbers(recording) == []


def test_a_recording_is_given_out_once() -> None:
    timeline = Timeline()
    timeline.start(LONG_NS)
    timeline.end(timeline.begin(), WORK, 1)
    timeline.stop()
    assert numbers(taken(timeline)) == [1]
    assert timeline.take() is None
    timeline.start(LONG_NS)
    timeline.end(timeline.begin(), WORK, 2)
    assert numbers(taken(timeline)) == [2]


def test_the_same_definition_is_the_same_event() -> None:
    assert define("test work", "compute", "number") == WORK
    assert define("test work", "waiting", "number") != WORK
