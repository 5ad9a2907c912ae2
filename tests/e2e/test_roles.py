"""Roles by policy under load: a decode instance helps with prompts and goes home, and no token is another."""

import asyncio
import json
from pathlib import Path

from common.messages import ServiceRecord
from common.model.default_model import default_model_directory
from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, get_text, running_mesh, stream_text
from tests.e2e.reference import greedy_tokens

CONFIG = """
[instance]
block_size = 16
chunk_tokens = 128
[roles]
policy = "overflow"
look_s = 0.1
cool_down_s = 0.5
overflow_queue_s = 0.3
overflow_queue_tokens = 600
settle_s = 3.0
"""
DECODED = 2
"""Streams that run, one on each decode instance, when the prompts come."""
PROMPTS = 8
PROMPT_TOKENS = 250
OUTPUT_TOKENS = 16
DECODED_OUTPUT_TOKENS = 100
APART_S = 0.05
WAIT_S = 90.0
HOME = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


def test_a_burst_of_long_prompts_overflows_into_the_decode_pool_and_everybody_is_home_afterwards(
    tmp_path: Path,
) -> None:
    """The default model. Undisturbed, a stream's tokens are those of transformers."""
    directory = default_model_directory(Path("~/.cache/lamella"))
    tokenizer = Tokenizer(directory)
    prompts = prompts_of(tokenizer)
    tokens = greedy_tokens(directory, prompts[:DECODED], DECODED_OUTPUT_TOKENS)
    tokens += greedy_tokens(directory, prompts[DECODED:], OUTPUT_TOKENS)
    truth = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    with running_mesh(tmp_path / "mesh", "--dtype", "fp32", "--decode", "2", config=CONFIG) as mesh:
        assert asyncio.run(run_burst(mesh, prompts)) == truth
        changes = asyncio.run(changes_until_home(mesh))
        for returned, helped in zip(changes[::2], changes[1::2], strict=True):
            assert (helped["role"], helped["refusal"]) == ("mixed", None)
            assert "roles.overflow_queue" in str(helped["reason"])
            assert (returned["role"], returned["refusal"]) == ("decode", None)
            assert "roles.return_share" in str(returned["reason"])
            # Of the two that decode, one always does nothing else.
            assert returned["instance_id"] == helped["instance_id"] != "prefill-0"
        assert asyncio.run(mesh.left_over()) == {}
        assert roles(mesh) == homes(mesh) == HOME
        # It computed prompts meanwhile.
        assert asyncio.run(mesh.metric("decode", "lamella_prefill_tokens_total")) > 0


async def run_burst(mesh: Mesh, prompts: list[list[int]]) -> list[str]:
    """Texts: of those that run when the others come, and of these."""
    streams: list[asyncio.Task[str]] = []
    async with mesh.client() as client:
        for prompt in prompts[:DECODED]:
            has_begun = asyncio.Event()
            stream = stream_text(client, prompt, DECODED_OUTPUT_TOKENS, has_begun)
            streams.append(asyncio.create_task(stream))
            await has_begun.wait()
        assert await role_changes(mesh) == []
        for prompt in prompts[DECODED:]:
            stream = stream_text(client, prompt, OUTPUT_TOKENS, asyncio.Event())
            streams.append(asyncio.create_task(stream))
            await asyncio.sleep(APART_S)
        return await asyncio.gather(*streams)


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Ordinary text: those that are decoded begin short, the others are long."""
    text = Path(__file__).resolve().parents[2].joinpath("README.md").read_text()
    words = tokenizer.encode(text)
    lengths = [20] * DECODED + [PROMPT_TOKENS] * PROMPTS
    return [words[100 * index : 100 * index + length] for index, length in enumerate(lengths)]


async def changes_until_home(mesh: Mesh) -> list[dict[str, object]]:
    """The newest first, once somebody has helped and gone home."""
    async with asyncio.timeout(WAIT_S):
        while True:
            changes = await role_changes(mesh)
            if changes and changes[0]["role"] != "mixed":
                return changes
            await asyncio.sleep(0.1)


def roles(mesh: Mesh) -> dict[str, object]:
    return {str(each["id"]): each["role"] for each in mesh.status()["instances"]}


def homes(mesh: Mesh) -> dict[str, object]:
    return {str(each["id"]): each["home"] for each in mesh.status()["instances"]}


async def role_changes(mesh: Mesh) -> list[dict[str, object]]:
    services = [each for each in await mesh.members() if isinstance(each, ServiceRecord)]
    [url] = [each.http_url for each in services if each.kind == "scheduler"]
    changes: list[dict[str, object]] = json.loads(get_text(f"{url}/roles"))
    return changes
