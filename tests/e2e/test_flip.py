"""Roles that change under load: streams go on with the tokens they would have had, and nothing is loaded."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from common.messages import FlipProgress, Role, ServiceRecord
from common.model.tokens import Tokenizer
from services.flip import flip_instance
from tests.e2e.meshes import Mesh, get_text, running_mesh
from tests.e2e.reference import greedy_tokens

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.02
prefill_base_s = 0.02
total_blocks = 256
"""
STREAMS = 8
OUTPUT_TOKENS = 150
LONG_OUTPUT_TOKENS = 600
TOKENS_BEFORE_FLIP = 20
TWICE: tuple[tuple[str, Role], ...] = (
    ("decode-1", "prefill"),
    ("decode-1", "decode"),
    ("decode-0", "prefill"),
)
SWITCH_S = 0.01


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("flip") / "mesh"
    with running_mesh(directory, "--prefill", "2", "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def test_running_streams_move_when_their_instance_is_flipped_and_nothing_is_computed_twice(
    mesh: Mesh,
) -> None:
    undisturbed, _ = asyncio.run(run(mesh))
    before = asyncio.run(counts(mesh))
    texts, flip = asyncio.run(run(mesh, "decode-1", "prefill"))
    assert texts == undisturbed
    assert flip is not None
    assert (flip.left, flip.moved) == (0, STREAMS // 2)
    took_s: dict[Role, list[float]] = {"prefill": [flip.switch_s]}
    assert roles(mesh)["decode-1"] == "prefill"
    prompt_tokens = sum(len(prompt_of(seed)) for seed in range(STREAMS))
    assert asyncio.run(counts(mesh)) == (before[0] + prompt_tokens, before[1])
    assert asyncio.run(mesh.left_over()) == {}
    # It serves in its new role, and from there goes back under load.
    texts, flip = asyncio.run(run(mesh, "decode-1", "decode"))
    assert texts == undisturbed
    assert flip is not None
    took_s["decode"] = [flip.switch_s]
    assert roles(mesh)["decode-1"] == "decode"
    assert asyncio.run(counts(mesh)) == (before[0] + 2 * prompt_tokens, before[1])
    assert asyncio.run(mesh.left_over()) == {}
    # A busy machine may hold one of them up.
    for role, taken in took_s.items():
        idle = asyncio.run(flip_instance(mesh.settings, "decode-1", role, force=False))
        assert min(*taken, idle.switch_s) <= SWITCH_S


def test_the_command_says_how_it_went_or_why_not(mesh: Mesh) -> None:
    said = mesh.lamella("flip", "prefill-1", "decode")
    assert "prefill-1 is a decode instance: switched in" in said
    with pytest.raises(AssertionError, match="prefill-0 is the last prefill instance"):
        mesh.lamella("flip", "prefill-0", "decode")
    assert "prefill-1" in mesh.lamella("flip", "prefill-1", "prefill")


def test_what_moves_twice_goes_on_as_transformers_does(tiny_model: Path, tmp_path: Path) -> None:
    """Real KV, written by prefill and by two decode instances in turn."""
    prompts = [prompt_of(seed) for seed in range(STREAMS)]
    tokenizer = Tokenizer(tiny_model)
    truth = [
        tokenizer.decode(each, skip_special_tokens=True)
        for each in greedy_tokens(tiny_model, prompts, LONG_OUTPUT_TOKENS)
    ]
    options = ("--model", str(tiny_model), "--dtype", "fp32", "--decode", "2")
    with running_mesh(tmp_path / "mesh", *options, config="[instance]\nblock_size = 32\n") as mesh:
        texts, flips = asyncio.run(run_moving_twice(mesh))
        assert texts == truth
        assert [flip.moved > 0 for flip in flips] == [True, False, True]
        assert asyncio.run(mesh.left_over()) == {}


async def run_moving_twice(mesh: Mesh) -> tuple[list[str], list[FlipProgress]]:
    """From decode-1 to decode-0, and all from there to decode-1."""
    flips: list[FlipProgress] = []
    turns = asyncio.Barrier(STREAMS + 1)
    async with mesh.client() as client:
        streams = [
            asyncio.create_task(one_stream(client, seed, turns, LONG_OUTPUT_TOKENS, temperature=0))
            for seed in range(STREAMS)
        ]
        await turns.wait()
        for instance, role in TWICE:
            flips.append(await flip_instance(mesh.settings, instance, role, force=False))
        await turns.wait()
        return await asyncio.gather(*streams), flips


async def run(
    mesh: Mesh, instance: str | None = None, role: Role = "decode"
) -> tuple[list[str], FlipProgress | None]:
    """The texts of all streams, amid which that instance's role changes."""
    turns, flip = asyncio.Barrier(STREAMS + 1), None
    async with mesh.client() as client:
        streams = [asyncio.create_task(one_stream(client, seed, turns)) for seed in range(STREAMS)]
        await turns.wait()
        if instance is not None:
            flip = await flip_instance(mesh.settings, instance, role, force=False)
        await turns.wait()
        return await asyncio.gather(*streams), flip


async def counts(mesh: Mesh) -> tuple[float, float]:
    """Prompt tokens that were computed, by instances of any role, and sequences that were continued."""
    name = "lamella_prefill_tokens_total"
    prompt_tokens = await mesh.metric("prefill", name) + await mesh.metric("decode", name)
    gateways = [each for each in await mesh.members() if isinstance(each, ServiceRecord)]
    [url] = [each.http_url for each in gateways if each.kind == "gateway"]
    text = get_text(f"{url}/metrics")
    continued = re.findall(r"^lamella_requests_resumed_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return prompt_tokens, sum(map(float, continued))


def roles(mesh: Mesh) -> dict[str, str]:
    return {str(each["id"]): str(each["role"]) for each in mesh.status()["instances"]}


async def one_stream(
    client: openai.AsyncOpenAI,
    seed: int,
    turns: asyncio.Barrier,
    output_tokens: int = OUTPUT_TOKENS,
    temperature: float = 1,
) -> str:
    """Its text. Amid it, at the first of ``turns``, it waits for the others, and until the second it reads no
    more: whoever reads all that has come leaves this loop no time for anything else, and streams would end
    before a role changes."""
    stream = await client.completions.create(
        model="default",
        prompt=prompt_of(seed),
        max_tokens=output_tokens,
        temperature=temperature,
        seed=seed,
        stream=True,
        timeout=60,
        extra_body={"ignore_eos": True},
    )
    texts: list[str] = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) == TOKENS_BEFORE_FLIP:
            await turns.wait()
            await turns.wait()
    return "".join(texts)


def prompt_of(seed: int) -> list[int]:
    return list(range(100, 140 + seed))
