"""The states as one mesh: whatever is lost, refused or given up, each request gets its tokens once."""

import random
from dataclasses import replace
from typing import get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.config import MixedPolicy
from common.ids import InstanceId
from tests.virtual.faults import FAULTS_END_S, ROLES_SETTLE_S, befall
from tests.virtual.mesh import make_mesh
from tests.virtual.outputs import sequence_of
from tests.virtual.scheduler import HEARTBEAT_S
from tests.virtual.shape import LEASE_S, MeshShape
from tests.virtual.trials import (
    MAX_OUTPUT,
    MAX_PROMPT,
    REQUESTS,
    SEEDS,
    endless,
    finish,
    shapes,
    start_at,
    submit,
)

FORGOTTEN_AMID_PLACING = MeshShape(
    prefills=0,
    decodes=0,
    mixed=1,
    mixed_policy="prefill_first",
    block_size=16,
    prefill_blocks=3,
    decode_blocks=3,
    chunk_tokens=1,
    policy="round_robin",
    decode_policy="round_robin",
    max_batch=1,
    max_waiting_requests=3,
    layerwise_min_tokens=1,
    least_portion_bytes=1,
)
"""With seed 0 the store forgets the gateway while one of its requests is on its way to an instance."""
TOLD_LATE = MeshShape(
    prefills=0,
    decodes=3,
    mixed=1,
    mixed_policy="prefill_first",
    block_size=16,
    prefill_blocks=3,
    decode_blocks=5,
    chunk_tokens=1,
    order="fcfs",
    policy="round_robin",
    decode_policy="least_outstanding",
    is_learned=False,
    schedulers=2,
    roles="fixed",
    batching="saturation",
    max_batch=2,
    max_waiting_requests=3,
    max_pending_prefill_tokens=60,
    max_requests_per_decode=6,
    send_failures=0.2,
    layerwise_min_tokens=1,
    least_portion_bytes=1,
    host_blocks=0,
    keeps_kv=False,
    decode_binding="late",
    predictor="right",
)
"""With seed 202702281 an instance hears that the gateway is gone when it has its next request already."""


@settings(max_examples=60, deadline=None)
@given(shapes(spare_blocks=20), SEEDS)
def test_in_peace_every_request_gets_its_tokens_and_nothing_is_left(shape: MeshShape, seed: int) -> None:
    mesh = make_mesh(shape, seed)
    submit(mesh, random.Random(seed), REQUESTS, within_s=3.0)
    finish(mesh, REQUESTS)


@settings(max_examples=60, deadline=None)
@given(shapes(spare_blocks=2), SEEDS)
def test_in_pools_for_one_sequence_nobody_starves(shape: MeshShape, seed: int) -> None:
    mesh = make_mesh(shape, seed)
    submit(mesh, random.Random(seed), REQUESTS, within_s=1.0)
    finish(mesh, REQUESTS)


@settings(max_examples=150, deadline=None)
@given(shapes(spare_blocks=10), SEEDS)
@example(FORGOTTEN_AMID_PLACING, 0)
def test_whatever_is_lost_every_request_gets_its_tokens_once(shape: MeshShape, seed: int) -> None:
    """Instances die, come back, drain, fall silent and change their roles; clients leave; transfers fail;
    the store forgets a gateway."""
    chance = random.Random(seed)
    mesh = make_mesh(shape, seed)
    submit(mesh, chance, REQUESTS, within_s=FAULTS_END_S)
    for _ in range(chance.randint(1, 12)):
        befall(mesh, chance)
    mesh.bus.clock.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_what_a_dead_decode_instance_had_drawn_is_not_computed_again(seed: int) -> None:
    mesh = make_mesh(MeshShape(decodes=2, decode_blocks=400, prefill_blocks=400, keeps_kv=True), seed)
    for number in range(4):
        mesh.gateway.start(endless(f"r{number}", 20, 300, seed=number))
    mesh.bus.clock.run_until(4.0)
    lost = mesh.instances[InstanceId("decode-0")].decode.state.running
    assert lost > 0
    mesh.kill(InstanceId("decode-0"), away_s=5.0)
    finish(mesh, 4)
    assert mesh.kept.copies == lost


@settings(max_examples=6, deadline=None)
@given(st.booleans(), SEEDS)
def test_when_a_gateway_dies_nobody_goes_on_with_its_sequences(is_coupled: bool, seed: int) -> None:
    shape = MeshShape(prefill_blocks=400, decode_blocks=400, predictor="right")
    mesh = make_mesh(replace(shape, prefills=0, decodes=0, mixed=2) if is_coupled else shape, seed)
    for number in range(4):
        mesh.gateway.start(endless(f"r{number}", 20, 1000, seed=number))
    clock = mesh.bus.clock
    clock.run_until(3.0)
    assert any(node.decode.state.running for node in mesh.instances.values())
    mesh.kill_gateway()
    # One lease each until its record is gone, and until that is believed.
    clock.run_until(clock.now + 2 * LEASE_S + 3 * HEARTBEAT_S)
    mesh.check_empty()


@settings(max_examples=20, deadline=None)
@given(shapes(spare_blocks=10), SEEDS)
@example(TOLD_LATE, 202702281)
def test_a_gateway_that_is_declared_gone_though_it_lives_has_everything_computed_on(
    shape: MeshShape, seed: int
) -> None:
    """Whatever its requests are doing at that moment."""
    chance = random.Random(seed)
    mesh = make_mesh(shape, seed)
    submit(mesh, chance, REQUESTS, within_s=8.0)
    mesh.bus.clock.at(chance.uniform(0.0, 4.0), lambda: mesh.lose_gateway_record(2 * LEASE_S))
    for _ in range(chance.randint(0, 2)):
        befall(mesh, chance)
    mesh.bus.clock.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(get_args(MixedPolicy)), st.sampled_from([0, 40]), SEEDS)
def test_prompts_that_never_stop_coming_starve_nobody_on_a_mixed_instance(
    policy: MixedPolicy, host_blocks: int, seed: int
) -> None:
    """They lack memory all the time, and decodes give way to them."""
    shape = MeshShape(
        prefills=0, decodes=0, mixed=1, mixed_policy=policy, decode_blocks=24, host_blocks=host_blocks
    )
    mesh = make_mesh(shape, seed)
    chance = random.Random(seed)
    requests = 50
    for number in range(requests):
        request = sequence_of(f"r{number}", chance.randint(1, MAX_PROMPT), MAX_OUTPUT, seed=number)
        start_at(mesh, 1.0 + number / 10, request)
    mesh.bus.clock.run_until(6.0)
    waiting = [name for name, entry in mesh.gateway.entries.items() if entry.end is None]
    assert len(waiting) < requests
    assert "r0" not in waiting, "the first one waits for all that came later"
    finish(mesh, requests)
