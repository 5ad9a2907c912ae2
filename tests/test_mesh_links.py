"""The states as one mesh in which an instance computes and answers, but its KV does not get through."""

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import InstanceId
from common.messages import Placement
from scheduler.kv_links import FIRST_BACKOFF_S
from tests.virtual.gateway import Entry
from tests.virtual.mesh import VirtualMesh, make_mesh
from tests.virtual.shape import MeshShape
from tests.virtual.trials import REQUESTS, SEEDS, endless, finish, start_at, submit

CUT_S = 4.0
ENDLESS_S = 1e6
CUT = st.sampled_from([InstanceId("prefill-0"), InstanceId("decode-0")])


def mesh_of(seed: int, prefills: int, decodes: int, schedulers: int, layerwise: bool) -> VirtualMesh:
    return make_mesh(
        MeshShape(
            prefills=prefills,
            decodes=decodes,
            prefill_blocks=400,
            decode_blocks=400,
            max_waiting_requests=100,
            max_pending_prefill_tokens=10_000,
            max_requests_per_decode=100,
            schedulers=schedulers,
            layerwise_min_tokens=1 if layerwise else 1000,
        ),
        seed,
    )


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(2, 3), st.integers(2, 3), st.integers(1, 2), st.booleans(), CUT)
def test_who_is_cut_off_costs_each_request_one_attempt_and_is_given_no_more(
    seed: int, prefills: int, decodes: int, schedulers: int, layerwise: bool, cut: InstanceId
) -> None:
    """But for who tries it, now and then."""
    mesh = mesh_of(seed, prefills, decodes, schedulers, layerwise)
    placed = record_placements(mesh)
    for number in range(60):
        start_at(mesh, 0.5 + 0.25 * number, endless(f"r{number}", 8, 6, seed=number))
    mesh.bus.clock.at(CUT_S, lambda: mesh.cut_link(cut, ENDLESS_S))
    finish(mesh, 60)
    unlucky = [each for each in placed.values() if len(each) > 1]
    assert unlucky
    for placements in unlucky:
        assert cut in ends_of(placements[0])
        assert cut not in ends_of(placements[1])
    tries = 1 + round(16.0 / FIRST_BACKOFF_S)
    begun = [name for name, placements in placed.items() if cut in ends_of(placements[0])]
    late = [name for name in begun if int(name[1:]) * 0.25 + 0.5 > CUT_S + 2.0]
    assert len(late) <= schedulers * tries


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), CUT)
def test_whoever_is_cut_off_for_a_while_serves_again(
    seed: int, prefills: int, decodes: int, schedulers: int, cut: InstanceId
) -> None:
    mesh = mesh_of(seed, prefills, decodes, schedulers, layerwise=False)
    placed = record_placements(mesh)
    submit(mesh, random.Random(seed), REQUESTS, within_s=8.0)
    mesh.bus.clock.at(CUT_S, lambda: mesh.cut_link(cut, 3.0))
    for number in range(120):
        start_at(mesh, 30.0 + 0.25 * number, endless(f"s{number}", 8, 6, seed=number))
    finish(mesh, REQUESTS + 120)
    again = [name for name, each in placed.items() if name[0] == "s" and cut in ends_of(each[-1])]
    assert len(again) > 10
    assert all(len(placed[f"s{number}"]) == 1 for number in range(120))


def ends_of(placement: Placement) -> set[InstanceId]:
    return {placement.prefill_instance, placement.decode_instance}


def record_placements(mesh: VirtualMesh) -> dict[str, list[Placement]]:
    """Of each request, one for each attempt."""
    found: defaultdict[str, list[Placement]] = defaultdict(list)
    attempts: dict[str, int] = {}

    def look() -> None:
        for name, entry in mesh.gateway.entries.items():
            note(name, entry)
        mesh.bus.clock.after(0.01, look)

    def note(name: str, entry: Entry) -> None:
        attempt = entry.request.attempt
        if entry.placement is not None and attempts.get(name) != attempt:
            attempts[name] = attempt
            found[name].append(entry.placement)

    look()
    return found
