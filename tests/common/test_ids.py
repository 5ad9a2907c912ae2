"""Names of things that exist at run time."""

from common.ids import counted_order


def test_instances_are_listed_as_people_count() -> None:
    names = ["decode-10", "prefill-1", "decode-2", "decode", "decode-2-9", "decode-2-10", "7"]
    expected = ["7", "decode", "decode-2", "decode-2-9", "decode-2-10", "decode-10", "prefill-1"]
    assert sorted(names, key=counted_order) == expected
