"""Where requests go: each rule on the case it was made for, and what must hold of all of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.config import DecodePolicy, PrefillPolicy
from common.ids import InstanceId
from common.lengths import LengthDistribution, certain
from common.performance import FittedTime
from scheduler.policy.best_fit import THETA
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES, choose
from scheduler.policy.power_of_two import draw_two

OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.1)
STEP = FittedTime((2e-3, 1e-3, 0.02), 0.0, 100)
"""2 µs a token of context, 1 ms a sequence, 20 ms a step: 0.1 s allow 32,000 tokens to a batch of 16."""
CHUNK = FittedTime((1.0, 0.0, 0.0), 0.0, 100)
"""A second for a thousand tokens."""
PER_CHUNK = FittedTime((1.0, 0.0, 0.1), 0.0, 100)
"""And a tenth for each chunk."""
LIGHT, HEAVY = certain(20), certain(500)


def arrival_of(
    number: int = 0, salt: int = 0, prompt_tokens: int = 100, lengths: LengthDistribution = LIGHT
) -> Arrival:
    return Arrival(number, salt, prompt_tokens, 0, lengths)


def prefill(name: str, pending_tokens: int = 0, requests: int = 0) -> PrefillCandidate:
    return PrefillCandidate(InstanceId(name), pending_tokens, requests)


def mixed(
    name: str, pending_tokens: int = 0, spare_s: float | None = None, **beside: float
) -> PrefillCandidate:
    """``beside``: what it decodes."""
    load = replace(decode(name), **beside)
    return replace(
        prefill(name, pending_tokens, load.requests), chunk_time=CHUNK, beside=load, spare_s=spare_s
    )


def decode(
    name: str,
    requests: int = 0,
    context_tokens: int = 0,
    capacity_tokens: int = 100_000,
    coming_tokens: float = 0.0,
    heavy: int = 0,
) -> DecodeCandidate:
    return DecodeCandidate(
        InstanceId(name), requests, context_tokens, capacity_tokens, coming_tokens, heavy, STEP
    )


def chosen(policy: DecodePolicy, candidates: list[DecodeCandidate], arrival: Arrival | None = None) -> str:
    taken = choose(DECODE_POLICIES[policy](candidates, arrival or arrival_of(), OBJECTIVES))
    assert taken is not None
    return taken.instance_id


def chosen_prefill(policy: PrefillPolicy, candidates: list[PrefillCandidate], number: int = 0) -> str:
    taken = choose(PREFILL_POLICIES[policy](candidates, arrival_of(number), OBJECTIVES))
    assert taken is not None
    return taken.instance_id


def test_in_turn_everybody_gets_as_many() -> None:
    decodes = [decode(name) for name in "cab"]
    assert [chosen("round_robin", decodes, arrival_of(number)) for number in range(4)] == [*"abca"]
    prefills = [prefill(name) for name in "ba"]
    assert [chosen_prefill("round_robin", prefills, number) for number in range(3)] == [*"aba"]


def test_least_outstanding_counts_requests_and_the_shortest_queue_tokens() -> None:
    candidates = [prefill("a", 900, requests=1), prefill("b", 300, requests=3)]
    assert chosen_prefill("least_outstanding", candidates) == "a"
    assert chosen_prefill("shortest_queue", candidates) == "b"
    assert chosen("least_outstanding", [decode("a", 2, 10), decode("b", 1, 9000)]) == "b"


def test_a_queue_for_passes_counts_one_token_for_each_sequence_that_is_decoded_there() -> None:
    """Whatever it is still to draw; the shortest queue counts that."""
    beside = replace(mixed("a", pending_tokens=300, requests=9), coming_tokens=5_000.0)
    longer = mixed("b", pending_tokens=310)
    assert chosen_prefill("token_jsq", [beside, longer]) == "a"
    assert chosen_prefill("shortest_queue", [beside, longer]) == "b"
    assert chosen_prefill("token_jsq", [mixed("a", pending_tokens=300, requests=11), longer]) == "b"
    assert chosen_prefill("token_jsq", [prefill("a", 311), longer]) == "b"


def test_least_loaded_goes_by_the_share_of_kv_that_is_spoken_for() -> None:
    small, large = decode("a", 1, 10, 100), decode("z", 5, 15, 200)
    assert chosen("least_loaded", [small, large]) == "z"


def test_ties_go_to_the_same_instance_whoever_decides() -> None:
    assert chosen_prefill("shortest_queue", [prefill(name, 10) for name in "bac"]) == "a"
    assert chosen("least_loaded", [decode(name, 1, 10) for name in "ba"]) == "a"


@given(st.integers(1, 50), st.integers(0, (1 << 64) - 1))
def test_two_are_drawn_and_they_differ(count: int, salt: int) -> None:
    drawn = draw_two(count, salt)
    assert len({*drawn}) == len(drawn) == min(2, count)
    assert all(0 <= each < count for each in drawn)


def test_lots_are_even() -> None:
    drawn = Counter(place for salt in range(10_000) for place in draw_two(10, salt))
    assert min(drawn.values()) > 0.9 * max(drawn.values())


def test_of_two_the_one_with_fewer_heavy_ones_takes_a_heavy_request() -> None:
    """TetriInfer 3.3.4: the lowest average ratio of heavy to light."""
    candidates = [decode("a", requests=6, heavy=4), decode("b", requests=8, heavy=1)]
    assert chosen("power_of_two", candidates, arrival_of(lengths=HEAVY)) == "b"


def test_only_who_has_room_for_the_likely_length_is_drawn() -> None:
    full = [decode(f"f{each}", 1, 900, 1000) for each in range(8)]
    roomy = decode("z", requests=20, context_tokens=0, capacity_tokens=1000, heavy=20)
    for salt in range(50):
        assert chosen("power_of_two", [*full, roomy], arrival_of(salt=salt, lengths=HEAVY)) == "z"
    assert chosen("power_of_two", full, arrival_of(lengths=HEAVY)).startswith("f")


def test_heavy_decodes_are_spread_evenly() -> None:
    heavy = Counter({f"d{each}": 0 for each in range(6)})
    total = Counter(heavy)
    for salt in range(600):
        lengths = HEAVY if salt % 3 == 0 else LIGHT
        candidates = [decode(name, total[name], heavy=heavy[name]) for name in heavy]
        name = chosen("power_of_two", candidates, arrival_of(salt=salt, lengths=lengths))
        total[name] += 1
        heavy[name] += lengths.is_heavy
    assert max(heavy.values()) - min(heavy.values()) <= 8


def test_best_fit_takes_the_fullest_that_keeps_the_time_between_tokens() -> None:
    """Aladdin, Alg. 1."""
    fullest, fuller, empty = decode("a", 15, 31_900), decode("b", 10, 9000), decode("c")
    assert chosen("best_fit", [empty, fuller, fullest]) == "b"
    scored = DECODE_POLICIES["best_fit"]([empty, fuller, fullest], arrival_of(), OBJECTIVES)
    assert [each.refusal is None for each in scored] == [True, True, False]
    assert str(scored[2].refusal).startswith("(b) 32010 tokens of context for 16, of which 28800 keep 0.1 s")
    assert THETA * 32_000 == 28_800


def test_best_fit_counts_the_kv_that_is_still_to_come() -> None:
    grown = decode("a", 3, 500, capacity_tokens=1000, coming_tokens=450)
    scored = DECODE_POLICIES["best_fit"]([grown, decode("b")], arrival_of(), OBJECTIVES)
    assert scored[0].refusal == "(e) 1070 tokens of KV, of 1000"
    assert choose(scored) == scored[1]


def test_where_nobody_keeps_what_is_promised_the_emptiest_takes_the_request() -> None:
    candidates = [decode("a", 90, 60_000), decode("b", 95, 50_000), decode("c", 85, 70_000)]
    scored = DECODE_POLICIES["best_fit"](candidates, arrival_of(), OBJECTIVES)
    taken = choose(scored)
    assert taken is not None
    assert taken.instance_id == "b"
    assert "(b)" in str(taken.note)


def test_an_instance_that_has_measured_nothing_is_trusted_with_what_fits() -> None:
    unknown = DecodeCandidate(InstanceId("a"), 60, 90_000, 100_000)
    assert chosen("best_fit", [unknown, decode("b")]) == "a"


candidates = st.lists(
    st.builds(
        DecodeCandidate,
        instance_id=st.text("abcdef", min_size=1, max_size=3).map(InstanceId),
        requests=st.integers(0, 64),
        context_tokens=st.integers(0, 5000),
        capacity_tokens=st.integers(1, 8000),
        coming_tokens=st.floats(0, 2000),
        heavy=st.just(0),
        step_time=st.sampled_from([None, STEP]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.instance_id,
)


@given(st.sampled_from(sorted(DECODE_POLICIES)), candidates, st.integers(0, 99), st.integers(0, 1 << 64))
def test_somebody_is_always_chosen_whatever_the_order_they_come_in(
    policy: DecodePolicy, found: list[DecodeCandidate], number: int, salt: int
) -> None:
    arrival = arrival_of(number, salt, lengths=HEAVY)
    taken = chosen(policy, found, arrival)
    assert taken in {each.instance_id for each in found}
    if policy != "power_of_two":
        assert chosen(policy, found[::-1], arrival) == taken


@given(candidates, st.integers(1, 2000), st.integers(1, 1000))
def test_best_fit_never_breaks_a_constraint_that_somebody_keeps(
    found: list[DecodeCandidate], prompt_tokens: int, output_tokens: int
) -> None:
    arrival = arrival_of(prompt_tokens=prompt_tokens, lengths=certain(output_tokens))
    scored = {each.instance_id: each for each in DECODE_POLICIES["best_fit"](found, arrival, OBJECTIVES)}
    taken = next(each for each in found if each.instance_id == chosen("best_fit", found, arrival))
    grown = taken.context_tokens + taken.coming_tokens + prompt_tokens + output_tokens
    kept = grown <= taken.capacity_tokens
    if taken.step_time is not None:
        context = taken.context_tokens + prompt_tokens + 0.5 * (taken.coming_tokens + output_tokens)
        step_s = STEP.seconds((context / 1e3, float(taken.requests + 1), 1.0))
        kept = kept and step_s <= OBJECTIVES.tpot_s + 1e-9
    assert kept or scored[taken.instance_id].note is not None


@pytest.mark.parametrize("policy", sorted(PREFILL_POLICIES))
def test_one_candidate_is_the_choice(policy: PrefillPolicy) -> None:
    assert chosen_prefill(policy, [prefill("only", 10_000, 50)], number=7) == "only"


@pytest.mark.parametrize(
    ("fuller", "constraint"),
    [
        (mixed("a", pending_tokens=1_950), "(c)"),
        (replace(mixed("a", pending_tokens=1_000), chunk_time=PER_CHUNK, chunk_tokens=50), "(c)"),
        (mixed("a", requests=2, context_tokens=400, spare_s=0.1), "(d)"),
        (mixed("a", requests=30, context_tokens=34_000, spare_s=5.0), "(b)"),
        (mixed("a", requests=2, context_tokens=990, capacity_tokens=1_000, spare_s=5.0), "(e)"),
    ],
)
def test_best_fit_takes_the_fullest_for_a_prompt_unless_it_breaks_a_constraint(
    fuller: PrefillCandidate, constraint: str
) -> None:
    """Of 100 tokens, a tenth of a second: Aladdin's b to e for an instance that does both."""
    emptier = mixed("b", requests=1, context_tokens=100, spare_s=5.0)
    [refused, taken] = PREFILL_POLICIES["best_fit"]([fuller, emptier], arrival_of(), OBJECTIVES)
    assert (refused.refusal or "").startswith(constraint)
    assert taken.refusal is None
    assert chosen_prefill("best_fit", [fuller, emptier]) == "b"
    roomy = mixed("a", pending_tokens=300, requests=2, context_tokens=400, spare_s=5.0)
    assert chosen_prefill("best_fit", [roomy, emptier]) == "a"


def test_where_every_prompt_queue_breaks_a_promise_best_fit_takes_the_emptiest_and_says_so() -> None:
    candidates = [mixed("a", 5_000), mixed("b", 3_000)]
    taken = choose(PREFILL_POLICIES["best_fit"](candidates, arrival_of(), OBJECTIVES))
    assert taken is not None
    assert (taken.instance_id, (taken.note or "")[:3]) == ("b", "(c)")
