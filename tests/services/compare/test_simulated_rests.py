"""How long simulated models rest between passes, and what of messages' work is done meanwhile: held to
runs that were simulated with rests that are known."""

import msgspec
import pytest

from services.compare import simulated as simulated_module
from services.compare.comparison import Candidate
from services.compare.engine_times import EngineTimes, PassCounts
from services.compare.error_table import describe_overheads
from services.compare.pass_rests import Rests
from services.compare.records import RunRecord
from services.compare.simulated import Simulation
from services.compare.simulated_mesh import Overhead, is_emulated
from services.simulator.host_config import HostConfig
from tests.services.compare.test_simulated import (
    ALONE,
    BUSY,
    COMPARISON,
    EMULATED,
    SIMULATION,
    SPLIT,
    TRUE,
    live,
    measured,
)


def times(role: str, passes: PassCounts) -> EngineTimes:
    return EngineTimes(role, 1.0, passes)


def test_what_instances_counted_between_passes_is_not_sought_in_latencies() -> None:
    """Of all fitted runs but the one in which passes wait for cores, by passes and the tokens they drew."""
    named = msgspec.structs.replace(COMPARISON, costs=("alone", "hpld"), saturated="hpld")

    def counted(number: int, gaps: int) -> RunRecord:
        record = msgspec.structs.replace(live(ALONE, TRUE), round_number=number)
        tokens = sum(each.output_tokens - 1 for each in record.served)
        steps = PassCounts(gaps, 0.002 * gaps + 0.0001 * tokens, 0, tokens)
        chunks = PassCounts(gaps, 0.003 * gaps)
        return msgspec.structs.replace(record, engines=(times("decode", steps), times("prefill", chunks)))

    waited = msgspec.structs.replace(live(BUSY, TRUE), engines=(times("decode", PassCounts(1, 9, 0, 1)),))
    overheads, _ = Simulation(named).pairs([counted(0, 30), counted(1, 150), waited])
    found = overheads["split"]
    assert found.rests_of("decode") == pytest.approx(Rests("decode", 0.002, 0.0001))
    assert found.rests_of("prefill") == pytest.approx(Rests("prefill", 0.003))
    assert found.pass_s == 0.0
    assert found.late_s == pytest.approx(max(0.0, TRUE.pass_s - 0.002 - 0.0001), abs=2e-4)
    assert found.hop_s > 0


def test_a_model_s_passes_take_as_long_as_was_counted_and_not_as_latencies_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_module, "is_emulated", lambda comparison, candidate: False)
    record = msgspec.structs.replace(
        live(ALONE, TRUE), engines=(times("decode", PassCounts(40, 0.0004, 0, 40)),)
    )
    overheads, _ = SIMULATION.pairs([record])
    assert overheads["split"].pass_s == overheads["split"].late_s == 0.0


def test_emulated_passes_that_end_late_do_so_beside_what_was_counted() -> None:
    """What was counted is half of what passes take more."""
    rests = PassCounts(40, 0.5 * TRUE.pass_s * 40, 0, 40)
    record = msgspec.structs.replace(live(ALONE, TRUE), engines=(times("decode", rests),))
    overheads, _ = SIMULATION.pairs([record])
    found = overheads["split"]
    assert found.late_s == pytest.approx(0.5 * TRUE.pass_s, rel=0.05)
    assert found.pass_s == 0.0
    said = describe_overheads(overheads)
    assert said.startswith("split: a pass rests decode 1.50 ms, 0 µs a token, 0.00 ms a prompt and ends ")
    assert f" and ends {1e3 * found.late_s:.2f} ms late, " in said


def test_whose_passes_are_emulated_is_said_by_the_settings() -> None:
    own = msgspec.structs.replace(COMPARISON, settings=EMULATED | {"instance": {"engine": "model"}})
    assert [is_emulated(each, SPLIT) for each in (COMPARISON, own)] == [True, False]


def test_who_does_not_count_rests_is_found_by_tokens_beside_who_does() -> None:
    """As over attention workers, whose prefill instances alone count."""
    chunks = PassCounts(40, 0.12)
    record = msgspec.structs.replace(live(ALONE, TRUE), engines=(times("prefill", chunks),))
    overheads, _ = SIMULATION.pairs([record])
    found = overheads["split"]
    [rests] = found.rests
    assert rests == pytest.approx(Rests("prefill", 0.003))
    assert found.rests_of("decode") == Rests("decode", found.pass_s)
    assert found.pass_s == pytest.approx(TRUE.pass_s, rel=0.02)


def test_what_a_prompt_s_pass_rests_is_not_sought_where_none_followed_another() -> None:
    steps = PassCounts(40, 0.12, 0, 40)
    record = msgspec.structs.replace(live(ALONE, TRUE), engines=(times("decode", steps),))
    overheads, _ = SIMULATION.pairs([record])
    assert overheads["split"].pass_s == 0.0
    assert overheads["split"].rests_of("prefill") == Rests("prefill")


def test_a_mesh_s_passes_take_longer_by_the_rests_of_their_role() -> None:
    def latencies(*rests: Rests) -> tuple[float, float]:
        found = measured(SPLIT, BUSY, Overhead(0.002, rests=rests))
        assert found.tpot is not None
        assert found.ttft is not None
        return found.ttft.p50_s, found.tpot.p50_s

    alike, steps, chunks = (
        latencies(),
        latencies(Rests("decode", 0.002, token_s=0.004)),
        latencies(Rests("prefill", 0.042)),
    )
    assert steps[1] > alike[1] + 0.004
    assert chunks[0] > alike[0] + 0.04
    assert chunks[1] < alike[1] + 0.004


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_what_is_done_while_engines_rest_is_as_much_as_leaves_their_waits_as_long_as_they_were(
    share: float,
) -> None:
    named = msgspec.structs.replace(COMPARISON, costs=("alone", "hpld"))
    host, rests = HostConfig(cores=1, pass_s=0.004), Rests("", 0.003)
    true = TRUE._replace(host=host, rests=tuple(Rests(role, 0.003) for role in SPLIT.instances))
    waited = true._replace(hidden=rests.times(share))
    records = []
    for offer in (ALONE, BUSY):
        record = live(offer, waited)
        cluster = SIMULATION.simulate(SPLIT, offer, record.rate_per_s, 0, waited)
        of_role = tuple(
            times(each.role, PassCounts(100, 0.3, waited_s=each.seat.waited_s))
            for each in cluster.lives
            if each.seat is not None
        )
        records.append(msgspec.structs.replace(record, idle_cores=0.0, cores=1, engines=of_role))
    found = Simulation(named)._hidden(SPLIT, records, true)
    assert found == pytest.approx(rests.times(share), abs=2e-4)
    alone = [
        msgspec.structs.replace(each, engines=tuple(one for one in each.engines if one.role == "decode"))
        for each in records
    ]
    by_steps = Simulation(named)._hidden(SPLIT, alone, true._replace(rests=true.rests[1:]))
    assert by_steps == pytest.approx(rests.times(share), abs=2e-4), "of who counted, on either side"


def test_where_nobody_counted_rests_all_that_passes_take_more_is_spared() -> None:
    apart = Candidate(name="apart", instances={"prefill": 1, "decode": 1, "attention": 1})
    found = Overhead(pass_s=0.003, host=HostConfig(cores=1, pass_s=0.004))
    records = [msgspec.structs.replace(live(ALONE, TRUE), engines=(EngineTimes("decode", 1.0),))]
    assert SIMULATION._hidden(SPLIT, records, found) == Rests("", 0.003)
    assert SIMULATION._hidden(apart, records, found) == Rests()
    assert SIMULATION._hidden(SPLIT, records, found._replace(host=None)) == Rests()


def test_more_is_not_spared_than_messages_take() -> None:
    assert Rests("", 0.003, 0.0002, 0.001).at_most(0.002, 0.001, 0.0) == Rests("", 0.002, 0.0002, 0.0)
