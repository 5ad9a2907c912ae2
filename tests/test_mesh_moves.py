"""The states as one mesh where roles change and instances come: running sequences go on elsewhere."""

import random
from typing import Literal, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import MixedPolicy
from common.ids import InstanceId
from tests.virtual.mesh import VirtualMesh, make_mesh
from tests.virtual.shape import MeshShape
from tests.virtual.trials import (
    MAX_OUTPUT,
    MAX_PROMPT,
    SEEDS,
    endless,
    finish,
    start_at,
)

OUTGROWING = sorted({*get_args(MixedPolicy)} - {"static"})
"""Policies of mixed instances whose sequences may come to need more memory than there is."""


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_when_a_decode_instance_s_role_changes_its_sequences_go_on_elsewhere_as_they_are(seed: int) -> None:
    mesh = make_mesh(MeshShape(decodes=2, decode_blocks=400, prefill_blocks=400, predictor="right"), seed)
    for number in range(4):
        mesh.gateway.start(endless(f"r{number}", 20, 300, seed=number))
    mesh.bus.clock.run_until(4.0)
    flipped = mesh.instances[InstanceId("decode-0")]
    ran = flipped.decode.state.running
    assert ran > 0
    mesh.flip(InstanceId("decode-0"), "prefill")
    finish(mesh, 4)
    assert flipped.decode.state.departures.departed == ran
    assert mesh.gateway.causes == [], "nothing was computed again"


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(OUTGROWING), st.sampled_from(["right", "wrong", "none"]), SEEDS)
def test_sequences_of_a_full_mixed_instance_leave_once_for_one_that_comes_and_nothing_is_computed_again(
    policy: MixedPolicy, predictor: Literal["none", "right", "wrong"], seed: int
) -> None:
    """Prompts go on coming to both meanwhile."""
    shape = MeshShape(
        prefills=0,
        decodes=0,
        mixed=1,
        mixed_policy=policy,
        decode_blocks=420,
        max_requests_per_decode=20,
        max_waiting_requests=20,
        max_pending_prefill_tokens=1000,
        predictor=predictor,
    )
    mesh = make_mesh(shape, seed)
    for number in range(8):
        mesh.gateway.start(endless(f"r{number}", 20, 250, seed=number))
    mesh.bus.clock.run_until(2.0)
    mesh.join(InstanceId("mixed-1"))
    for number in range(8, 12):
        start_at(mesh, 3.0 + number / 10, endless(f"r{number}", 20, 50, seed=number))
    finish(mesh, 12)
    left, taken = (mesh.instances[InstanceId(f"mixed-{number}")].decode.state for number in range(2))
    assert left.departures.departed >= 2
    assert taken.departures.departed == 0, "to and fro"
    assert left.preempted == taken.preempted == 0
    assert mesh.gateway.causes == []


@settings(max_examples=20, deadline=None)
@given(st.integers(48, 52), st.integers(48, 52), st.booleans(), SEEDS)
def test_two_instances_that_change_roles_with_full_pools_do_not_wait_for_each_other_for_ever(
    prefill_blocks: int, decode_blocks: int, is_restored: bool, seed: int
) -> None:
    """Each holds, computed or run before, what waits for room in the other."""
    shape = MeshShape(
        prefill_blocks=prefill_blocks, decode_blocks=decode_blocks, block_size=1, max_waiting_requests=20
    )
    mesh, chance = make_mesh(shape, seed), random.Random(seed)
    for number in range(20):
        request = endless(f"r{number}", chance.randint(1, MAX_PROMPT), MAX_OUTPUT, seed=number)
        start_s = chance.uniform(0.5, 1.5)
        start_at(mesh, start_s, request)
    swapped_s = chance.uniform(0.6, 2.5)
    mesh.bus.clock.at(swapped_s, lambda: swap_roles(mesh))
    if is_restored:
        mesh.bus.clock.at(swapped_s + chance.uniform(0.1, 2.0), mesh.restore_roles)
    finish(mesh, 20)


def swap_roles(mesh: VirtualMesh) -> None:
    mesh.flip(InstanceId("decode-0"), "prefill")
    mesh.flip(InstanceId("prefill-0"), "decode")
