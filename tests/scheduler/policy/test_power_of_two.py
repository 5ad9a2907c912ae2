"""TetriInfer's dispatcher, step by step (3.3.4): who can hold the request, two of those, the calmer one.

The paper's "lowest average ratio of heavy decode : light decode" is read as: a heavy request goes where, with
it, fewest heavy ones stand beside each light one; a light one, which raises no ratio, where fewest are.
"""

import pytest

from common.ids import InstanceId
from common.lengths import LengthDistribution, certain
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives
from scheduler.policy.dispatch import DECODE_POLICIES, choose
from scheduler.policy.power_of_two import heavy_ratio

PROMPT_TOKENS = 100
RANGE = LengthDistribution(((100.0, 0.5), (200.0, 0.4), (400.0, 0.1)))
"""A predicted range whose upper end, which 0.9 of such requests do not exceed, is 200 tokens."""


def load(name: str, heavy: int, light: int, free_tokens: int = 10_000) -> DecodeCandidate:
    return DecodeCandidate(
        InstanceId(name), heavy + light, 20_000 - free_tokens, 20_000, coming_tokens=0.0, heavy=heavy
    )


def refusals(
    loads: list[DecodeCandidate], lengths: LengthDistribution, salt: int = 0
) -> dict[str, str | None]:
    arrival = Arrival(0, salt, PROMPT_TOKENS, 0, lengths)
    scored = DECODE_POLICIES["power_of_two"](loads, arrival, Objectives(2.0, 0.1))
    return {each.instance_id: each.refusal for each in scored}


def chosen(loads: list[DecodeCandidate], lengths: LengthDistribution, salt: int = 0) -> str:
    arrival = Arrival(0, salt, PROMPT_TOKENS, 0, lengths)
    taken = choose(DECODE_POLICIES["power_of_two"](loads, arrival, Objectives(2.0, 0.1)))
    assert taken is not None
    return taken.instance_id


@pytest.mark.parametrize(
    ("free_tokens", "is_able"),
    [(299, False), (300, True), (10_000, True)],
)
def test_those_with_room_for_the_prompt_and_the_likely_output_are_alpha(
    free_tokens: int, is_able: bool
) -> None:
    """The others are β, and are never drawn."""
    found = refusals([load("a", 0, 0), load("b", 0, 0), load("c", 0, 0, free_tokens)], RANGE)
    drawn_ever = {
        name
        for salt in range(40)
        for name, refusal in refusals(
            [load("a", 0, 0), load("b", 0, 0), load("c", 0, 0, free_tokens)], RANGE, salt
        ).items()
        if refusal is None
    }
    assert (found["c"] != "no room") == is_able
    assert drawn_ever == ({"a", "b", "c"} if is_able else {"a", "b"})


def test_what_present_sequences_will_grow_to_is_no_room() -> None:
    growing = DecodeCandidate(InstanceId("a"), 4, 10_000, 20_000, coming_tokens=9_800.0)
    assert refusals([growing, load("b", 0, 0)], RANGE)["a"] == "no room"


def test_two_of_alpha_are_drawn_and_everyone_as_often() -> None:
    loads = [load(name, 1, 1) for name in "abcde"]
    times = dict.fromkeys("abcde", 0)
    for salt in range(1000):
        drawn = [name for name, refusal in refusals(loads, RANGE, salt).items() if refusal is None]
        assert len(drawn) == 2
        for name in drawn:
            times[name] += 1
    assert all(340 < count < 460 for count in times.values())


@pytest.mark.parametrize(
    ("one", "other", "lengths", "expected"),
    [
        # (heavy, light) of a and of b; with a heavy newcomer a has 3/(6+1), b 2/(1+1)
        ((2, 6), (1, 1), certain(500), "a"),
        # 4/(4+1) against 3/(4+1)
        ((3, 4), (2, 4), certain(500), "b"),
        # 1/(0+1) against 5/(9+1): an empty instance is not the calmest where light ones dilute
        ((0, 0), (4, 9), certain(500), "b"),
        # a light one goes where fewest are, whatever they are
        ((3, 0), (0, 4), certain(20), "a"),
        ((0, 2), (2, 1), certain(20), "a"),
    ],
)
def test_of_the_two_the_one_with_the_lower_ratio_of_heavy_to_light_takes_it(
    one: tuple[int, int], other: tuple[int, int], lengths: LengthDistribution, expected: str
) -> None:
    assert chosen([load("a", *one), load("b", *other)], lengths) == expected


def test_a_request_is_heavy_from_128_tokens_on_by_its_likelier_half() -> None:
    assert not certain(128).is_heavy
    assert certain(129).is_heavy


@pytest.mark.parametrize(("heavy", "light", "ratio"), [(0, 0, 0.0), (1, 0, 1.0), (1, 1, 0.5), (6, 2, 2.0)])
def test_the_ratio_takes_one_light_decode_for_granted(heavy: int, light: int, ratio: float) -> None:
    assert heavy_ratio(heavy, light) == ratio
