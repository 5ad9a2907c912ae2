"""What an instance tells schedulers of the links that its KV crosses."""

from common.ids import InstanceId
from common.kv.link_watch import LinkWatch
from common.messages import KVLinkFailed, KVLinkWorks

P0, P1, D0, D1 = map(InstanceId, ("p0", "p1", "d0", "d1"))


def watch_of(instance_id: InstanceId) -> tuple[LinkWatch, list[KVLinkFailed | KVLinkWorks]]:
    told: list[KVLinkFailed | KVLinkWorks] = []
    return LinkWatch(instance_id, 2.0, told.append), told


def test_as_long_as_nothing_fails_nothing_is_told() -> None:
    watch, told = watch_of(P0)
    for receiver in (D0, D1, D0):
        watch.note_worked(P0, receiver)
    assert not told


def test_after_a_failure_the_first_that_gets_through_is_told_and_the_same_link() -> None:
    watch, told = watch_of(D0)
    watch.note_failed(P0, D0)
    for _ in range(3):
        watch.note_worked(P1, D0)
    for _ in range(3):
        watch.note_worked(P0, D0)
    assert told == [KVLinkFailed(P0, D0), KVLinkWorks(P1, D0), KVLinkWorks(P0, D0)]


def test_what_works_is_told_again_after_each_failure() -> None:
    watch, told = watch_of(P0)
    watch.note_failed(P0, D0)
    watch.note_worked(P0, D1)
    watch.note_failed(P0, D0)
    watch.note_worked(P0, D1)
    assert told == [KVLinkFailed(P0, D0), KVLinkWorks(P0, D1)] * 2
