"""Requests that go on arriving while a test does something to the mesh."""

import asyncio
import random
from typing import Any

import openai

from tests.e2e.meshes import Mesh


class Traffic:
    """Poisson arrivals at a rate that can be changed, each a stream that is read to its end."""

    def __init__(self, mesh: Mesh, rate_per_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.rate_per_s = rate_per_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.served = 0
        self.failures: list[str] = []
        self._chance = random.Random(1)
        self._requests = asyncio.TaskGroup()
        self._client = mesh.client().with_options(timeout=60)

    async def __aenter__(self) -> "Traffic":
        await self._requests.__aenter__()
        self._arriving = self._requests.create_task(self._arrive())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._arriving.cancel()
        await self._requests.__aexit__(*error)
        await self._client.close()

    async def _arrive(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(self.rate_per_s))
            self._requests.create_task(self._request())

    async def _request(self) -> None:
        reasons = []
        try:
            stream = await self._client.completions.create(
                model="default",
                prompt=[self._chance.randrange(3, 40_000) for _ in range(self.prompt_tokens)],
                max_tokens=self.output_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        except openai.OpenAIError as exc:
            self.failures.append(str(exc))
        else:
            self.served += reasons == ["length"]
            self.failures += [] if reasons == ["length"] else [f"ended with {reasons}"]
