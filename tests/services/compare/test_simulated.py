"""A comparison's runs in virtual time: held to runs that were simulated, with an overhead that is known."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest

from common.config_file import config_from_tree
from common.errors import ConfigError
from common.latency import describe
from common.model.waiting import WANTED_S
from common.profile import profile_path, write_profile
from services.compare.between import Between
from services.compare.comparison import Candidate, Comparison, Offer, Settings
from services.compare.error_table import describe_overheads, errors_table, rounds_of
from services.compare.pass_rests import Rests
from services.compare.records import RunRecord, ServedRequest
from services.compare.simulated import (
    MOST_TURNS_SHARE,
    Pair,
    Simulation,
    _root,
    _trimmed_mean,
)
from services.compare.simulated_mesh import Overhead, pace_of, simulated_of
from services.profiling.probe import looking_s
from services.simulator.cluster import Cluster
from services.simulator.host_config import HostConfig
from services.simulator.metrics import Metrics, latency_of, measure
from services.simulator.records import Records
from tests.common.model.conftest import MakeTiny
from tests.services.compare.test_figures import run
from tests.services.simulator.performance.test_profiled import made

EMULATED: Settings = {
    "instance": {"engine": "emulated"},
    "emulation": {"decode_base_s": 0.02, "prefill_base_s": 0.004, "prefill_per_token_s": 0.0002},
}
SPLIT = Candidate(name="split", instances={"prefill": 1, "decode": 1})
ALONE = Offer(name="alone", lengths="lpld", requests=20, rate_per_s=0.5, ttft_s=1.0, tpot_s=1.0)
BUSY = Offer(name="hpld", requests=40, rate_per_s=3.0, ttft_s=4.0, tpot_s=0.03)
COMPARISON = Comparison(
    name="by-hand", workload=(ALONE, BUSY), configuration=(SPLIT,), settings=EMULATED, calibration=("alone",)
)
SIMULATION = Simulation(COMPARISON)
TRUE = Overhead(pass_s=0.003, hop_s=0.002)


def served_of(records: Records) -> Iterator[ServedRequest]:
    for index in range(len(records)):
        times = latency_of(records, index)
        tokens = records.prompt_tokens[index], records.drawn_tokens[index]
        yield ServedRequest(
            index, records.arrival_s[index], *tokens, times.ttft_s, times.tpot_s, times.end_to_end_s
        )


def simulated(candidate: Candidate, offer: Offer, overhead: Overhead) -> Cluster:
    rate_per_s = candidate.given_rate(offer)
    assert rate_per_s is not None
    return SIMULATION.simulate(candidate, offer, rate_per_s, 0, overhead)


def measured(candidate: Candidate, offer: Offer, overhead: Overhead) -> Metrics:
    return measure(simulated(candidate, offer, overhead), offer.objectives)


def live(offer: Offer, overhead: Overhead, candidate: Candidate = SPLIT) -> RunRecord:
    """A mesh that is just what is simulated, with that overhead."""
    metrics = measured(candidate, offer, overhead)
    records = simulated(candidate, offer, overhead).records
    record = run(candidate.name, 0, 1.0, 1.0)
    load = replace(
        record.load,
        ttft=metrics.ttft,
        tpot=metrics.tpot,
        end_to_end=metrics.end_to_end,
        attainment=metrics.attainment,
        requests_per_s=metrics.requests_per_s,
    )
    rate_per_s = candidate.given_rate(offer)
    assert rate_per_s is not None
    served = tuple(served_of(records))
    return msgspec.structs.replace(
        record, workload=offer.name, rate_per_s=rate_per_s, load=load, served=served
    )


def error(pair: Pair, name: str, percentile: str = "p50_s") -> float:
    """Relative, of a run that was measured."""
    [alone] = rounds_of([pair])
    found = alone.error(name, percentile)
    assert found is not None
    return found


def test_what_a_mesh_takes_beside_its_model_is_found_from_the_runs_whose_requests_are_alone() -> None:
    overheads, pairs = SIMULATION.pairs([live(ALONE, TRUE), live(BUSY, TRUE)])
    found = overheads["split"]
    assert found.pass_s == pytest.approx(TRUE.pass_s, rel=0.02)
    assert found.hop_s == pytest.approx(TRUE.hop_s, rel=0.1)
    for pair in pairs:
        for name, percentile in product(("ttft", "tpot", "end_to_end"), ("p50_s", "p95_s")):
            assert abs(error(pair, name, percentile)) < 0.02
        assert pair.attainment_points == pytest.approx(0.0, abs=3.0)


def test_what_all_take_of_one_host_is_found_from_the_runs_that_are_named_for_it() -> None:
    host = HostConfig(cores=1, idle_cores=0.1)
    true = TRUE._replace(host=host)
    other = Offer(name="hphd", requests=20, rate_per_s=0.3, ttft_s=4.0, tpot_s=0.03)
    named = msgspec.structs.replace(COMPARISON, workload=(ALONE, BUSY, other), costs=("alone", "hpld"))
    records = [
        msgspec.structs.replace(live(offer, true), idle_cores=0.1, beside_cpu_s=0.3, duration_s=3.0, cores=1)
        for offer in (ALONE, BUSY, other)
    ]
    overheads, [alone, busy, judged] = Simulation(named).pairs(records)
    found = overheads["split"]
    assert found.host is not None
    assert found.host.cores == 1
    assert found.host.idle_cores == pytest.approx(0.1)
    assert (found.host.pass_s, found.host.token_s, found.host.prompt_s) == pytest.approx((0.0,) * 3, abs=1e-6)
    assert named.fitted == {"alone", "hpld"}
    for pair, limit in ((alone, 0.03), (busy, 0.03), (judged, 0.05)):
        assert abs(error(pair, "ttft")) < limit
        assert abs(error(pair, "tpot")) < limit
    # Cores of one's own are another mesh.
    alike = measured(SPLIT, BUSY, found._replace(host=None))
    assert alike.tpot is not None
    assert busy.record.load.tpot is not None
    assert alike.tpot.p50_s < 0.9 * busy.record.load.tpot.p50_s


def test_looks_at_a_run_take_of_a_core_in_that_run_alone() -> None:
    true = TRUE._replace(host=HostConfig(cores=2, idle_cores=0.6))
    named = msgspec.structs.replace(COMPARISON, costs=("alone",))
    took = {"idle_cores": 0.1, "beside_cpu_s": 0.3, "duration_s": 3.0, "cores": 2}
    look_s = 0.5 * 3.0 / looking_s([1.0])

    def off(*looks_s: float) -> float:
        alone, busy = (msgspec.structs.replace(live(offer, true), **took) for offer in (ALONE, BUSY))
        busy = msgspec.structs.replace(busy, looks_s=looks_s)
        overheads, [_, pair] = Simulation(named).pairs([alone, busy])
        host = overheads["split"].host
        assert host is not None
        assert host.idle_cores == pytest.approx(0.1)
        return error(pair, "tpot")

    assert off() < -0.05
    assert abs(off(look_s)) < 0.02


def test_runs_of_other_meshes_with_the_same_settings_say_what_messages_cost_too() -> None:
    mixed = Candidate(name="mixed", instances={"mixed": 1})
    elsewhere = Candidate(name="elsewhere", instances={"mixed": 1}, settings={"mesh": {}})
    named = msgspec.structs.replace(COMPARISON, configuration=(SPLIT, mixed, elsewhere), costs=("alone",))

    def seen(candidate: Candidate, beside_s: float) -> RunRecord:
        record = live(ALONE, TRUE, candidate)
        return msgspec.structs.replace(record, idle_cores=0.0, beside_cpu_s=beside_s, duration_s=3.0, cores=2)

    def taken_s(*others: RunRecord) -> float:
        overheads, pairs = Simulation(named).pairs([seen(SPLIT, 0.3)], others)
        assert [each.record.configuration for each in pairs] == ["split"]
        host = overheads["split"].host
        assert host is not None
        return host.pass_s + host.token_s + host.prompt_s

    alone_s = taken_s()
    assert taken_s(seen(mixed, 3.0)) > 1.3 * alone_s
    assert taken_s(seen(elsewhere, 3.0)) == pytest.approx(alone_s)


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_what_turns_cost_is_found_from_the_run_that_saturates_the_cores(share: float) -> None:
    apart = Candidate(name="apart", instances={"prefill": 1, "decode": 1, "attention": 1})
    named = msgspec.structs.replace(
        COMPARISON, configuration=(apart,), costs=("alone", "hpld"), saturated="hpld"
    )
    true = TRUE._replace(host=HostConfig(cores=1, turns_share=share))
    records = [
        msgspec.structs.replace(
            live(offer, true, apart), idle_cores=0.0, beside_cpu_s=0.0, duration_s=3.0, cores=1
        )
        for offer in (ALONE, BUSY)
    ]
    overheads, [_, busy] = Simulation(named).pairs(records)
    found = overheads["apart"].host
    assert found is not None
    assert found.turns_share == pytest.approx(share, abs=0.02)
    assert abs(error(busy, "tpot")) < 0.02


def seen_apart(offer: Offer, overhead: Overhead) -> RunRecord:
    record = live(offer, overhead, APART)
    return msgspec.structs.replace(record, idle_cores=0.0, beside_cpu_s=0.0, duration_s=3.0, cores=2)


APART = Candidate(name="apart", instances={"prefill": 1, "decode": 1, "attention": 1})
MANY = Offer(name="hpld", lengths="lphd", requests=40, rate_per_s=6.0, ttft_s=4.0, tpot_s=0.1)


def with_apart(offer: Offer) -> Simulation:
    named = msgspec.structs.replace(
        COMPARISON, workload=(ALONE, offer), configuration=(APART,), costs=("alone", "hpld")
    )
    return Simulation(named)


@pytest.mark.parametrize("token_s", [0.0, 0.0004])
def test_what_a_token_s_exchange_takes_is_found_from_the_runs_of_many_sequences(token_s: float) -> None:
    true = TRUE._replace(host=HostConfig(cores=2), token_s=token_s)
    overheads, [_, many] = with_apart(MANY).pairs([seen_apart(each, true) for each in (ALONE, MANY)])
    found = overheads["apart"]
    assert found.token_s == pytest.approx(token_s, abs=1e-5)
    assert found.pass_s == pytest.approx(TRUE.pass_s, abs=1e-4)
    assert abs(error(many, "tpot")) < 0.02
    said = re.search(
        r"a pass rests \d\.\d\d ms(, 4\d\d µs a token|, 39\d µs a token)?, ", describe_overheads(overheads)
    )
    assert said is not None
    assert (said[1] is not None) == (token_s > 0)


def test_runs_of_few_sequences_do_not_say_what_a_token_s_exchange_takes() -> None:
    """Nor is it charged to meshes that have none."""
    true = TRUE._replace(host=HostConfig(cores=2), token_s=0.0004)
    thin = msgspec.structs.replace(BUSY, rate_per_s=0.5)
    overheads, _ = with_apart(thin).pairs([seen_apart(each, true) for each in (ALONE, thin)])
    assert overheads["apart"].token_s == 0.0
    assert [true.rests_of(role).token_s for role in ("prefill", "decode", "mixed")] == [0.0, 0.0004, 0.0]


def test_a_run_that_served_nobody_says_nothing_of_a_token_s_exchange() -> None:
    true = TRUE._replace(host=HostConfig(cores=2))
    silent = msgspec.structs.replace(seen_apart(MANY, true), served=())
    overheads, _ = with_apart(MANY).pairs([seen_apart(ALONE, true), silent])
    assert overheads["apart"].token_s == 0.0


def test_requests_are_held_to_themselves() -> None:
    """Where most are short and live the median is a long one's, by chance, no message takes longer."""
    record = live(ALONE, TRUE)
    long = replace(record.load, ttft=describe([1.0, 2.0, 3.0]), tpot=None)
    overheads, _ = SIMULATION.pairs([msgspec.structs.replace(record, load=long)])
    assert overheads["split"].hop_s == pytest.approx(TRUE.hop_s, rel=0.1)


def test_a_calibration_that_served_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"calibration = 'alone': has no request that was served"):
        SIMULATION.pairs([msgspec.structs.replace(live(ALONE, TRUE), served=())])


def test_passes_take_the_pace_that_the_machine_had_in_a_run(tiny: MakeTiny, tmp_path: Path) -> None:
    directory, cache = tiny("llama").directory, tmp_path / "cache"
    settings = {"model": {"directory": str(directory), "cache_directory": str(cache), "dtype": "fp32"}}
    modelled = msgspec.structs.replace(COMPARISON, settings=settings)
    record = msgspec.structs.replace(run("split", 0, 1.0, 1.0), looks_s=(0.06, 0.08))
    assert pace_of(modelled, SPLIT, record) == 1.0, "nothing was profiled"
    model = config_from_tree(settings).model
    path = profile_path(model, directory, "float32")
    write_profile(path, made())
    assert pace_of(modelled, SPLIT, record) == 1.0, "the profile knows no pace"
    write_profile(path, msgspec.structs.replace(made(), look_s=0.05))
    assert pace_of(modelled, SPLIT, record) == pytest.approx(1.4)
    assert pace_of(modelled, SPLIT, msgspec.structs.replace(record, looks_s=())) == 1.0
    assert pace_of(COMPARISON, SPLIT, record) == 1.0, "emulated passes take what they are told"


def test_what_a_pass_waits_for_is_not_taken_of_the_cores_twice() -> None:
    """The engine's thread waits for its event loop, and has its core meanwhile."""
    host = HostConfig(cores=2, pass_s=0.005, token_s=0.001, prompt_s=0.004)
    alike, less, none = (
        simulated_of(COMPARISON, SPLIT, Overhead(host=host, hidden=hidden)).host
        for hidden in (Rests(), Rests("", 0.002, 0.0002, 0.003), Rests("", 1, 1, 1))
    )
    assert alike == host
    assert less == msgspec.structs.replace(host, pass_s=0.003, token_s=0.0008, prompt_s=0.001)
    assert none == msgspec.structs.replace(host, pass_s=0.0, token_s=0.0, prompt_s=0.0)
    apart = Candidate(name="apart", instances={"prefill": 1, "decode": 1, "attention": 1})
    held = msgspec.structs.replace(less, turns_hold_s=WANTED_S / 2)
    hidden = Overhead(host=host, hidden=Rests("", 0.002, 0.0002, 0.003))
    assert simulated_of(COMPARISON, apart, hidden).host == held


def test_a_slower_machine_is_slower_in_simulation() -> None:
    alike, slower = (measured(SPLIT, BUSY, TRUE._replace(pace=pace)) for pace in (1.0, 1.5))
    assert alike.tpot is not None
    assert slower.tpot is not None
    assert 1.3 < slower.tpot.p50_s / alike.tpot.p50_s < 1.7


def test_a_configuration_has_rates_of_its_own() -> None:
    slow = msgspec.structs.replace(SPLIT, rates_per_s={"hpld": 0.3})
    assert slow.given_rate(BUSY) == 0.3
    assert slow.given_rate(ALONE) == ALONE.rate_per_s
    given, thin = (measured(each, BUSY, TRUE).elapsed_s for each in (SPLIT, slow))
    assert thin == pytest.approx(10 * given, rel=0.2)


@pytest.mark.parametrize(
    ("model", "attention", "share"), [("cpu", 0, 0.2), ("cuda", 0, 1.0), ("cuda", 1, 0.2)]
)
def test_simulated_meshes_pull_as_live_ones_do(model: str, attention: int, share: float) -> None:
    """KV that attention workers keep in a host's memory takes of its processor, wherever the model lies."""
    comparison = msgspec.structs.replace(COMPARISON, settings={**EMULATED, "model": {"device": model}})
    candidate = Candidate(name="any", instances={"prefill": 1, "decode": 1, "attention": attention})
    mesh = simulated_of(comparison, candidate, TRUE)
    [decode] = [each for each in mesh.pools if each.config.role == "decode"]
    assert decode.settings.transfer.pull_share == share


def test_a_simulation_that_is_off_says_how_far() -> None:
    slower = Overhead(0.023, 0.002)
    _, (alone, busy) = SIMULATION.pairs([live(ALONE, TRUE), live(BUSY, slower)])
    assert abs(error(alone, "tpot")) < 0.01
    # Steps of 43 ms live, of 23 simulated, and the objective is between.
    assert error(busy, "tpot") < -0.4
    assert busy.attainment_points is not None
    assert busy.attainment_points > 50.0
    lines = errors_table([alone, busy], COMPARISON.fitted).splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("| alone (fitted) |")
    assert "**" not in lines[2]
    assert f"(**{busy.attainment_points:+.1f}**)" in lines[3]
    assert f"**{100 * error(busy, 'tpot'):+.1f} %**" in lines[3]
    assert lines[5].startswith("Of 1 rows that nothing was fitted to, within 9 %: TTFT in ")
    assert "TPOT in 0 (p50) and 0 (p95)" in lines[5]
    assert lines[5].endswith("within 2 points: 0.")
    between = {name: Between(Path(), {}, change) for name, change in (("split", 0.083), ("few", None))}
    assert errors_table([alone, busy], COMPARISON.fitted, between).splitlines()[7:] == [
        "From part to part of the passes between runs the machine's pace changed by 8.3 % (split)."
    ]


def test_rounds_are_one_row_by_the_medians_of_their_figures() -> None:
    """Of three live runs at one rate one was disturbed: what the mesh is like the other two say."""
    records = [
        msgspec.structs.replace(live(BUSY, true), round_number=number)
        for number, true in enumerate((TRUE, Overhead(0.03, 0.002), TRUE))
    ]
    _, (_, *busy) = SIMULATION.pairs([live(ALONE, TRUE), *records])
    # All are simulated alike but for their arrivals and lengths.
    metrics = [measured(SPLIT, BUSY, TRUE)] * 3
    pairs = [replace(pair, metrics=each) for pair, each in zip(busy, metrics, strict=True)]
    assert error(pairs[1], "tpot") < -0.4
    [found] = rounds_of(pairs)
    assert found.error("tpot", "p50_s") == pytest.approx(error(pairs[0], "tpot"))
    points = [pair.attainment_points or 0.0 for pair in pairs]
    assert found.attainment_points == pytest.approx(sum(points) / 3, abs=1e-6)
    lines = errors_table(pairs).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| hpld | split |")
    assert "fitted to, latencies by the medians of up to 3 rounds, within 9 %: TTFT in 1 (p50)" in lines[4]
    # A round that served nothing says nothing of either side.
    unserved = replace(pairs[1].record.load, ttft=None, tpot=None, end_to_end=None)
    silent = replace(pairs[1], record=msgspec.structs.replace(pairs[1].record, load=unserved))
    [two] = rounds_of([pairs[0], silent, pairs[2]])
    assert two.error("tpot", "p95_s") == pytest.approx(error(pairs[0], "tpot", "p95_s"), abs=0.05)
    [none] = rounds_of([silent])
    assert none.error("tpot", "p50_s") is None
    assert none.live("tpot", "p50_s") is None


def test_turns_that_are_not_enough_even_at_their_most_are_told() -> None:
    none, most = _root(lambda _: 1.0, MOST_TURNS_SHARE), _root(lambda _: -1.0, MOST_TURNS_SHARE)
    said = [
        describe_overheads({"split": Overhead(host=HostConfig(cores=2, turns_share=share))})
        for share in (none, most)
    ]
    assert said[0].endswith("0.0 % of a layer more")
    assert said[1].endswith("99.8 % of a layer more (the most that is looked for)")


def test_waits_are_what_requests_are_off_by_on_average_but_for_a_stall() -> None:
    """Most wait for nothing, some for long: the median is nothing."""
    longer_s = [*[0.0] * 30, *[-0.02] * 9, -5.0]
    assert _trimmed_mean(longer_s) == pytest.approx(-0.02 * 8 / 36)
    assert _trimmed_mean([0.0, 0.0, -0.03]) == pytest.approx(-0.01)


def test_without_a_calibration_nothing_is_simulated() -> None:
    with pytest.raises(ConfigError, match=r"calibration = \['alone'\]: .*; split was not at alone"):
        SIMULATION.pairs([live(BUSY, TRUE)])
    nameless = Simulation(msgspec.structs.replace(COMPARISON, calibration=()))
    with pytest.raises(ConfigError, match=r"^calibration must be named to simulate: workloads whose"):
        nameless.pairs([live(BUSY, TRUE)])


def test_attention_workers_hold_the_kv_of_decode_instances() -> None:
    apart = Candidate(name="apart", instances={"prefill": 1, "decode": 1, "attention": 1})
    mesh = simulated_of(COMPARISON, apart, TRUE)
    assert [each.config.name for each in mesh.pools] == ["prefill", "decode"]
    assert mesh.attention is not None
    assert mesh.attention.config.count == 1
    # Steps take what they do beside their KV, but for the exchange.
    split, other = (measured(each, ALONE, TRUE).tpot for each in (SPLIT, apart))
    assert split is not None
    assert other is not None
    assert other.mean_s == pytest.approx(split.mean_s, rel=0.02)
