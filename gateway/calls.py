"""From a validated request to the choices to generate: prompts rendered and tokenized, limits checked."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from common.config import GatewayConfig
from common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from common.ids import GatewayId, new_call_id, request_id_of
from common.messages import GenerationRequest, SamplingParams
from common.model.tokens import Detokenizer, Tokenizer
from common.service_classes import ServiceClasses, asked_class, tier_of
from gateway.generation import Generation
from gateway.openai import ChatRequest, CompletionRequest
from gateway.responses import ChatEncoder, CompletionEncoder, Encoder, Head, Usage
from gateway.stop_strings import StopStrings

Result = TypeVar("Result")

BYTES_PER_TOKEN = 16
"""Text has four to five bytes a token. More than this per token of context is refused before it costs a
tokenizer's time, though tokens of more bytes exist."""
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Call:
    """One client call: its choices, and how their text becomes bytes. ``head``: its answer's id and model."""

    head: Head
    generations: list[Generation]
    encoder: Encoder
    is_streamed: bool
    wants_usage: bool
    ignored_fields: list[str]
    prompt_tokens: int
    service_class: str


@dataclass(frozen=True, slots=True)
class CallFactory:
    """What is known of the served model, and the threads that tokenize."""

    gateway_id: GatewayId
    model_name: str
    context_length: int
    vocab_size: int
    tokenizer: Tokenizer
    config: GatewayConfig
    service_classes: ServiceClasses
    threads: ThreadPoolExecutor

    async def chat(self, request: ChatRequest, arrived_s: float, class_header: str | None) -> Call:
        """``class_header``: the header ``x-lamella-class``. Raises ModelNotFound, InvalidRequest,
        ContextLengthExceeded."""
        self._check(request)
        service_class = asked_class(self.service_classes, class_header, request.service_tier)
        messages = [message.as_template_input() for message in request.messages]
        self._check_bytes(sum(len(str(message["content"]).encode()) for message in messages), "messages")

        def encode() -> list[int]:
            prompt = self.tokenizer.render_chat(messages, request.chat_template_kwargs or {})
            # The template writes the special tokens itself.
            return self.tokenizer.encode(prompt, add_special_tokens=False)

        prompt_ids = await self._in_thread(encode)
        generations = self._generations(request, [prompt_ids], "messages", arrived_s, service_class)
        head = self._head("chatcmpl", request, generations, service_class)
        encoder = ChatEncoder(head, self.tokenizer, has_logprobs=request.logprobs)
        return _call(request, head, generations, encoder, service_class)

    async def completion(
        self, request: CompletionRequest, arrived_s: float, class_header: str | None
    ) -> Call:
        """As ``chat``."""
        self._check(request)
        service_class = asked_class(self.service_classes, class_header, request.service_tier)
        prompts = request.prompts
        if not prompts or len(prompts) * request.n > self.config.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts x n = {request.n}: 1..{self.config.max_choices} choices are allowed",
                param="prompt",
            )
        token_prompts = [await self._encode(prompt) for prompt in prompts]
        echoes = [self._echo(prompt) if request.echo else "" for prompt in prompts for _ in range(request.n)]
        generations = self._generations(request, token_prompts, "prompt", arrived_s, service_class)
        head = self._head("cmpl", request, generations, service_class)
        has_logprobs = request.logprobs is not None
        encoder = CompletionEncoder(head, self.tokenizer, has_logprobs=has_logprobs, echoes=echoes)
        return _call(request, head, generations, encoder, service_class)

    def check_model(self, model: str) -> None:
        """The model's own name and ``default`` are known. Raises ModelNotFound."""
        if model not in (self.model_name, "default"):
            raise ModelNotFound(
                f"the model {model!r} does not exist; this mesh serves {self.model_name!r}, as 'default' too",
                param="model",
            )

    def check_token_ids(self, token_ids: Iterable[int], param: str) -> None:
        """Raises InvalidRequest naming the first id that is not in the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id}: the vocabulary has 0..{self.vocab_size - 1}", param=param
                )

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_bytes(len(text.encode()), "prompt")
        return await self._in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def decode_ids(self, token_ids: list[int], param: str) -> str:
        """Their text, special tokens included. Raises InvalidRequest for an id that is no token."""
        self.check_token_ids(token_ids, param)
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        self.check_model(request.model)
        limits = self.config
        if request.n > limits.max_choices:
            raise InvalidRequest(f"n = {request.n}: at most {limits.max_choices} choices", param="n")
        if len(request.stop_strings) > limits.max_stop_strings:
            raise InvalidRequest(f"at most {limits.max_stop_strings} stop strings", param="stop")
        if any(not 1 <= len(stop) <= limits.max_stop_characters for stop in request.stop_strings):
            raise InvalidRequest(
                f"a stop string has 1..{limits.max_stop_characters} characters", param="stop"
            )
        for name, ids in (
            ("logit_bias", request.logit_bias or {}),
            ("stop_token_ids", request.stop_token_ids or []),
        ):
            self.check_token_ids(ids, name)

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self.encode_text(prompt, add_special_tokens=True)
        self.check_token_ids(prompt, "prompt")
        return prompt

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _check_bytes(self, count: int, param: str) -> None:
        limit = BYTES_PER_TOKEN * self.context_length
        if count > limit:
            raise ContextLengthExceeded(
                f"the prompt has {count} bytes; for a context of {self.context_length} tokens at most {limit}"
                " are read",
                param=param,
            )

    def _generations(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        param: str,
        arrived_s: float,
        service_class: str,
    ) -> list[Generation]:
        """``n`` choices for each prompt, in order; each choice draws from a seed of its own."""
        seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
        call_id = new_call_id()
        generations: list[Generation] = []
        for prompt_ids in prompts:
            max_tokens = self._token_limit(request, len(prompt_ids), param)
            for _ in range(request.n):
                index = len(generations)
                generation = Generation(
                    index=index,
                    arrived_s=arrived_s,
                    request=GenerationRequest(
                        request_id=request_id_of(call_id, index),
                        gateway_id=self.gateway_id,
                        prompt_ids=tuple(prompt_ids),
                        sampling=_sampling(request, max_tokens, seed + index),
                        service_class=service_class,
                        head_start_s=self.service_classes[service_class].head_start_s,
                    ),
                    detokenizer=Detokenizer(self.tokenizer, skip_special_tokens=request.skip_special_tokens),
                    stops=StopStrings(
                        request.stop_strings, include_in_output=request.include_stop_str_in_output
                    ),
                )
                generations.append(generation)
        return generations

    def _head(
        self,
        kind: str,
        request: ChatRequest | CompletionRequest,
        generations: list[Generation],
        service_class: str,
    ) -> Head:
        prompt_tokens = _prompt_tokens(request, generations)

        def running_usage() -> Usage:
            return Usage(prompt_tokens, sum(len(generation.output_ids) for generation in generations))

        return Head(
            call_id=f"{kind}-{generations[0].request.request_id}",
            created=int(time.time()),
            model=self.model_name,
            has_usage=request.wants_usage,
            running_usage=running_usage if request.wants_running_usage else None,
            service_tier=None if request.service_tier is None else tier_of(service_class),
        )

    def _token_limit(self, request: ChatRequest | CompletionRequest, prompt_tokens: int, param: str) -> int:
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        room = self.context_length - prompt_tokens
        wanted = request.token_limit
        if room < 1 or (wanted is not None and wanted > room):
            output = "" if wanted is None else f" and max_tokens = {wanted}"
            raise ContextLengthExceeded(
                f"the prompt's {prompt_tokens} tokens{output} exceed the context of {self.context_length}",
                param=param,
            )
        limit = room if wanted is None else wanted
        if request.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens = {request.min_tokens} is over max_tokens = {limit}", param="min_tokens"
            )
        return limit

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


def _call(
    request: ChatRequest | CompletionRequest,
    head: Head,
    generations: list[Generation],
    encoder: Encoder,
    service_class: str,
) -> Call:
    return Call(
        head=head,
        generations=generations,
        encoder=encoder,
        is_streamed=request.stream,
        wants_usage=request.wants_usage,
        ignored_fields=request.ignored,
        prompt_tokens=_prompt_tokens(request, generations),
        service_class=service_class,
    )


def _prompt_tokens(request: ChatRequest | CompletionRequest, generations: list[Generation]) -> int:
    """Of the call: a prompt counts once, however many choices continue it."""
    return sum(len(generation.request.prompt_ids) for generation in generations[:: request.n])


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int, seed: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        logit_bias=request.logit_bias or {},
        seed=seed % (1 << 64),
        logprobs=request.reported_logprobs,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )
