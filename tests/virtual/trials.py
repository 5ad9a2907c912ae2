"""What the meshes of the virtual tests are put through: their shapes, their requests, and what they owe."""

import random
from typing import get_args

import msgspec
from hypothesis import strategies as st

from common.config import (
    DecodeAdmission,
    DecodeBinding,
    DecodePolicy,
    MixedPolicy,
    PrefillBatching,
    PrefillPolicy,
    RolePolicyName,
    TransferMode,
)
from common.kv.blocks import blocks_for
from common.messages import GenerationRequest
from scheduler.policy.prefill_batching import PROMPT_ORDERS
from tests.virtual.mesh import VirtualMesh
from tests.virtual.outputs import expected_tokens, sequence_of
from tests.virtual.shape import MeshShape

REQUESTS = 30
MAX_PROMPT = 24
MAX_OUTPUT = 24
LIMIT_S = 300.0
"""Virtual seconds; a request that has not ended by then starves."""
SETTLE_S = 12.0

SEEDS = st.integers(0, 1 << 32)


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
        transfer_mode=draw(st.sampled_from(get_args(TransferMode))),
        host_blocks=draw(st.sampled_from([0, 2, longest + spare_blocks])),
        keeps_kv=draw(st.booleans()),
        decode_admission=draw(st.sampled_from(get_args(DecodeAdmission))),
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
        start_at(mesh, start_s, request)


def start_at(mesh: VirtualMesh, start_s: float, request: GenerationRequest) -> None:
    mesh.bus.clock.at(start_s, lambda: mesh.gateway.start(request))


def endless(name: str, prompt_tokens: int, output_tokens: int, seed: int) -> GenerationRequest:
    """It draws as many as it may."""
    request = sequence_of(name, prompt_tokens, output_tokens, seed)
    return msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, ignore_eos=True)
    )


def finish(mesh: VirtualMesh, requests: int) -> None:
    """Runs to the end, and holds it to every promise."""
    clock, gateway = mesh.bus.clock, mesh.gateway
    clock.run_until(LIMIT_S, lambda: len(gateway.entries) == requests and gateway.is_done)
    waiting = [name for name, entry in gateway.entries.items() if entry.end is None]
    assert gateway.is_done, f"{waiting} starve"
    clock.run_until(clock.now + SETTLE_S)
    for entry in gateway.entries.values():
        tokens, reason = expected_tokens(entry.request)
        assert len(tokens) <= entry.request.sampling.max_tokens
        if entry.end == "left":
            assert entry.output_ids == tokens[: len(entry.output_ids)]
        else:
            assert (entry.output_ids, entry.end) == (tokens, reason)
    mesh.check_empty()
