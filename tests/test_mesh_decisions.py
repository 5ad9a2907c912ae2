"""The states as one mesh: whatever is lost, refused or given up, each request gets its tokens once."""

import random
from dataclasses import replace
from typing import Literal, get_args

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.config import (
    DecodeBinding,
    DecodePolicy,
    MixedPolicy,
    PrefillBatching,
    PrefillPolicy,
    RolePolicyName,
)
from common.ids import InstanceId
from common.kv.blocks import blocks_for
from common.messages import GenerationRequest, Role
from decode.events import LeaveAsked
from scheduler.policy.prefill_batching import PROMPT_ORDERS
from tests.virtual.mesh import VirtualMesh, make_mesh
from tests.virtual.outputs import expected_tokens, sequence_of
from tests.virtual.scheduler import HEARTBEAT_S
from tests.virtual.shape import LEASE_S, MeshShape

REQUESTS = 30
MAX_PROMPT = 24
MAX_OUTPUT = 24
FAULTS_END_S = 12.0
ROLES_SETTLE_S = 20.0
"""From then on every instance that is there has its first role: before, one role may be nobody's."""
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
LIMIT_S = 300.0
"""Virtual seconds; a request that has not ended by then starves."""
SETTLE_S = 12.0

SEEDS = st.integers(0, 1 << 32)

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


@st.composite
def shapes(draw: st.DrawFn, spare_blocks: int) -> MeshShape:
    """Meshes whose pools hold one longest sequence and at most ``spare_blocks`` more."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    longest = blocks_for(MAX_PROMPT + MAX_OUTPUT, block_size)
    is_coupled = draw(st.booleans())
    return MeshShape(
        prefills=draw(st.integers(0 if is_coupled else 1, 2)),
        decodes=draw(st.integers(0 if is_coupled else 1, 3)),
        mixed=draw(st.integers(1, 2)) if is_coupled else 0,
        mixed_policy=draw(st.sampled_from(get_args(MixedPolicy))),
        block_size=block_size,
        prefill_blocks=longest + draw(st.integers(0, spare_blocks)),
        decode_blocks=longest + draw(st.integers(0, spare_blocks)),
        chunk_tokens=draw(st.sampled_from([1, 7, 64])),
        order=draw(st.sampled_from(sorted(PROMPT_ORDERS))),
        policy=draw(st.sampled_from(get_args(PrefillPolicy))),
        decode_policy=draw(st.sampled_from(get_args(DecodePolicy))),
        is_learned=draw(st.booleans()),
        schedulers=draw(st.sampled_from([1, 1, 2, 3])),
        roles=draw(st.sampled_from(get_args(RolePolicyName))),
        is_grouped=draw(st.booleans()),
        batching=draw(st.sampled_from(get_args(PrefillBatching))),
        max_batch=draw(st.sampled_from([1, 2, 8])),
        max_waiting_requests=draw(st.sampled_from([3, 20])),
        send_failures=draw(st.sampled_from([0.0, 0.2])),
        layerwise_min_tokens=draw(st.sampled_from([1, 8, 1000])),
        least_portion_bytes=draw(st.sampled_from([1, 20, 1000])),
        host_blocks=draw(st.sampled_from([0, 2, longest + spare_blocks])),
        keeps_kv=draw(st.booleans()),
        decode_admission=draw(st.sampled_from(["greedy", "reserve_static", "reserve_dynamic"])),
        decode_binding=draw(st.sampled_from(get_args(DecodeBinding))),
        predictor=draw(st.sampled_from(["none", "right", "wrong"])),
    )


def submit(mesh: VirtualMesh, chance: random.Random, requests: int, within_s: float) -> None:
    """Requests of all sizes: one-token prompts and outputs, and prompts of exactly a block among them."""
    block_size = mesh.shape.block_size
    for number in range(requests):
        prompt_tokens = chance.choice([1, min(block_size, MAX_PROMPT), chance.randint(1, MAX_PROMPT)])
        max_tokens = chance.choice([1, 2, chance.randint(1, MAX_OUTPUT)])
        request = sequence_of(f"r{number}", prompt_tokens, max_tokens, seed=chance.getrandbits(20))
        # Of classes of service: some count as having come earlier.
        request = msgspec.structs.replace(request, head_start_s=chance.choice([0.0, 0.0, 3.0]))
        start_s = chance.uniform(0.5, within_s)
        mesh.bus.timeline.at(start_s, lambda request=request: mesh.gateway.start(request))  # type: ignore[misc]


def finish(mesh: VirtualMesh, requests: int) -> None:
    """Runs to the end, and holds it to every promise."""
    timeline, gateway = mesh.bus.timeline, mesh.gateway
    timeline.run_until(LIMIT_S, lambda: len(gateway.entries) == requests and gateway.is_done)
    waiting = [name for name, entry in gateway.entries.items() if entry.end is None]
    assert gateway.is_done, f"{waiting} starve"
    timeline.run_until(timeline.now + SETTLE_S)
    for entry in gateway.entries.values():
        tokens, reason = expected_tokens(entry.request)
        assert len(tokens) <= entry.request.sampling.max_tokens
        if entry.end == "left":
            assert entry.output_ids == tokens[: len(entry.output_ids)]
        else:
            assert (entry.output_ids, entry.end) == (tokens, reason)
    mesh.check_empty()


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
    mesh.bus.timeline.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_what_a_dead_decode_instance_had_drawn_is_not_computed_again(seed: int) -> None:
    mesh = make_mesh(MeshShape(decodes=2, decode_blocks=400, prefill_blocks=400, keeps_kv=True), seed)
    for number in range(4):
        request = sequence_of(f"r{number}", 20, 300, seed=number)
        sampling = msgspec.structs.replace(request.sampling, ignore_eos=True)
        mesh.gateway.start(msgspec.structs.replace(request, sampling=sampling))
    mesh.bus.timeline.run_until(4.0)
    lost = mesh.instances[InstanceId("decode-0")].decode.state.running
    assert lost > 0
    mesh.kill(InstanceId("decode-0"), away_s=5.0)
    finish(mesh, 4)
    assert mesh.kept.copies == lost


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_when_a_decode_instance_s_role_changes_its_sequences_go_on_elsewhere_as_they_are(seed: int) -> None:
    mesh = make_mesh(MeshShape(decodes=2, decode_blocks=400, prefill_blocks=400, predictor="right"), seed)
    for number in range(4):
        request = sequence_of(f"r{number}", 20, 300, seed=number)
        sampling = msgspec.structs.replace(request.sampling, ignore_eos=True)
        mesh.gateway.start(msgspec.structs.replace(request, sampling=sampling))
    mesh.bus.timeline.run_until(4.0)
    flipped = mesh.instances[InstanceId("decode-0")]
    ran = flipped.decode.state.running
    assert ran > 0
    mesh.flip(InstanceId("decode-0"), "prefill")
    finish(mesh, 4)
    assert flipped.decode.state.departures.departed == ran
    assert mesh.gateway.causes == [], "nothing was computed again"


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(get_args(MixedPolicy)), st.sampled_from(["right", "wrong", "none"]), SEEDS)
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
    mesh.bus.timeline.run_until(2.0)
    mesh.join(InstanceId("mixed-1"))
    for number in range(8, 12):
        start_s, late = 3.0 + number / 10, endless(f"r{number}", 20, 50, seed=number)
        mesh.bus.timeline.at(start_s, lambda late=late: mesh.gateway.start(late))  # type: ignore[misc]
    finish(mesh, 12)
    left, taken = (mesh.instances[InstanceId(f"mixed-{number}")].decode.state for number in range(2))
    assert left.departures.departed >= 2
    assert taken.departures.departed == 0, "to and fro"
    assert left.preempted == taken.preempted == 0
    assert mesh.gateway.causes == []


def endless(name: str, prompt_tokens: int, output_tokens: int, seed: int) -> GenerationRequest:
    """It draws as many as it may."""
    request = sequence_of(name, prompt_tokens, output_tokens, seed)
    return msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, ignore_eos=True)
    )


@settings(max_examples=6, deadline=None)
@given(st.booleans(), SEEDS)
def test_when_a_gateway_dies_nobody_goes_on_with_its_sequences(is_coupled: bool, seed: int) -> None:
    shape = MeshShape(prefill_blocks=400, decode_blocks=400, predictor="right")
    mesh = make_mesh(replace(shape, prefills=0, decodes=0, mixed=2) if is_coupled else shape, seed)
    for number in range(4):
        mesh.gateway.start(endless(f"r{number}", 20, 1000, seed=number))
    timeline = mesh.bus.timeline
    timeline.run_until(3.0)
    assert any(node.decode.state.running for node in mesh.instances.values())
    mesh.kill_gateway()
    # One lease each until its record is gone, and until that is believed.
    timeline.run_until(timeline.now + 2 * LEASE_S + 3 * HEARTBEAT_S)
    mesh.check_empty()


@settings(max_examples=20, deadline=None)
@given(shapes(spare_blocks=10), SEEDS)
def test_a_gateway_that_is_declared_gone_though_it_lives_has_everything_computed_on(
    shape: MeshShape, seed: int
) -> None:
    """Whatever its requests are doing at that moment."""
    chance = random.Random(seed)
    mesh = make_mesh(shape, seed)
    submit(mesh, chance, REQUESTS, within_s=8.0)
    mesh.bus.timeline.at(chance.uniform(0.0, 4.0), lambda: mesh.lose_gateway_record(2 * LEASE_S))
    for _ in range(chance.randint(0, 2)):
        befall(mesh, chance)
    mesh.bus.timeline.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)


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
        request = sequence_of(f"r{number}", chance.randint(1, MAX_PROMPT), MAX_OUTPUT, seed=number)
        sampling = msgspec.structs.replace(request.sampling, ignore_eos=True)
        request = msgspec.structs.replace(request, sampling=sampling)
        start_s = chance.uniform(0.5, 1.5)
        mesh.bus.timeline.at(start_s, lambda request=request: mesh.gateway.start(request))  # type: ignore[misc]
    swapped_s = chance.uniform(0.6, 2.5)
    mesh.bus.timeline.at(swapped_s, lambda: swap_roles(mesh))
    if is_restored:
        mesh.bus.timeline.at(swapped_s + chance.uniform(0.1, 2.0), mesh.restore_roles)
    finish(mesh, 20)


def swap_roles(mesh: VirtualMesh) -> None:
    mesh.flip(InstanceId("decode-0"), "prefill")
    mesh.flip(InstanceId("prefill-0"), "decode")


def befall(mesh: VirtualMesh, chance: random.Random) -> None:
    """One fault at some time. The last instance of a role may die for good if it is not the only one."""
    name = chance.choice(sorted(mesh.instances))
    at_s, away_s = chance.uniform(0.5, FAULTS_END_S), chance.uniform(0.1, 6.0)
    fault = chance.choice(
        ["kill", "drain", "silence", "leave", "leave", "end", "flip", "flip", "ask", "ask", "forget"]
    )
    timeline = mesh.bus.timeline
    if fault == "kill":
        timeline.at(at_s, lambda: mesh.kill(name, away_s))
    elif fault == "drain":
        timeline.at(at_s, lambda: mesh.drain(name, away_s))
    elif fault == "silence":
        timeline.at(at_s, lambda: mesh.silence(name, away_s))
    elif fault == "flip":
        timeline.at(at_s, lambda: flip_one(mesh, chance))
    elif fault == "ask":
        timeline.at(at_s, lambda: ask_one(mesh, chance))
    elif fault == "forget":
        timeline.at(at_s, lambda: mesh.lose_gateway_record(2 * away_s))
    elif fault == "leave":
        timeline.at(at_s, lambda: leave_one(mesh, chance))
    elif mesh.shape.decodes > 1 - bool(mesh.shape.mixed):
        last = InstanceId(f"decode-{mesh.shape.decodes - 1}")
        timeline.at(at_s, lambda: mesh.kill(last, None))


def leave_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """A client that still waits goes away."""
    waiting = sorted(name for name, entry in mesh.gateway.entries.items() if entry.end is None)
    if waiting:
        mesh.gateway.leave(chance.choice(waiting))


def kill_one(mesh: VirtualMesh, chance: random.Random) -> None:
    if mesh.instances:
        mesh.kill(chance.choice(sorted(mesh.instances)), chance.uniform(0.1, 6.0))


def ask_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """A sequence is asked to leave for some instance, whatever that is like."""
    names = sorted(name for name in mesh.instances if mesh.instances[name].decode.state.sequences)
    if names:
        instance = mesh.instances[chance.choice(names)]
        owner = chance.choice(list(instance.decode.state.sequences))
        wanted = InstanceId(chance.choice(sorted(mesh.store.records)))
        instance.decode.handle(LeaveAsked(owner, wanted))


def flip_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """Mostly one that has something running, which must leave."""
    names = sorted(mesh.instances)
    running = [name for name in names if mesh.instances[name].decode.state.running]
    if names:
        name = chance.choice(running or names)
        mesh.flip(name, chance.choice([role for role in ROLES if role != mesh.instances[name].role]))


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
        mesh.bus.timeline.at(1.0 + number / 10, lambda request=request: mesh.gateway.start(request))  # type: ignore[misc]
    mesh.bus.timeline.run_until(6.0)
    waiting = [name for name, entry in mesh.gateway.entries.items() if entry.end is None]
    assert len(waiting) < requests
    assert "r0" not in waiting, "the first one waits for all that came later"
    finish(mesh, requests)


@settings(max_examples=20, deadline=None)
@given(shapes(spare_blocks=10), SEEDS)
def test_who_waits_at_a_scheduler_that_dies_waits_at_the_next(shape: MeshShape, seed: int) -> None:
    """Clients leave, and instances die, also just before: the next scheduler tells whom nobody told."""
    chance = random.Random(seed)
    mesh = make_mesh(replace(shape, policy="deferred"), seed)
    submit(mesh, chance, REQUESTS, within_s=2.0)
    for _ in range(chance.randint(0, 4)):
        mesh.bus.timeline.at(chance.uniform(0.5, 4.0), lambda: leave_one(mesh, chance))
    for _ in range(chance.randint(0, 3)):
        mesh.bus.timeline.at(chance.uniform(0.5, 4.0), lambda: kill_one(mesh, chance))
    mesh.bus.timeline.at(chance.uniform(0.6, 4.0), lambda: mesh.kill_scheduler(chance.uniform(0.1, 3.0)))
    finish(mesh, REQUESTS)
    assert all(len(scheduler.state.waiting) == 0 for scheduler in mesh.schedulers)


@settings(max_examples=30, deadline=None)
@given(shapes(spare_blocks=10), st.integers(2, 3), SEEDS)
def test_schedulers_that_die_or_are_cut_off_lose_no_request_and_keep_no_booking(
    shape: MeshShape, schedulers: int, seed: int
) -> None:
    """One that was cut off does not know what has ended, and places what others have placed meanwhile."""
    chance = random.Random(seed)
    mesh = make_mesh(replace(shape, schedulers=schedulers), seed)
    submit(mesh, chance, REQUESTS, within_s=FAULTS_END_S)
    timeline = mesh.bus.timeline
    for _ in range(chance.randint(0, 6)):
        befall(mesh, chance)
    for _ in range(chance.randint(1, 4)):
        away_s = chance.uniform(0.1, 6.0)
        timeline.at(chance.uniform(0.5, FAULTS_END_S), lambda away_s=away_s: mesh.kill_scheduler(away_s))  # type: ignore[misc]
        cut_off, cut_s = chance.choice(mesh.schedulers).name, chance.uniform(0.1, 8.0)
        timeline.at(
            chance.uniform(0.5, FAULTS_END_S),
            lambda name=cut_off, cut_s=cut_s: mesh.cut_scheduler_off(name, cut_s),  # type: ignore[misc]
        )
    timeline.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)
