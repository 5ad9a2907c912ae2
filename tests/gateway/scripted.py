"""A peer that the test speaks for, over the real bus: scheduler and both instances in one.

It takes submissions, answers with one placement, and publishes exactly the tokens and failures that a test
says; what the gateway tells scheduler and instances is kept for the test to look at.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.bus import Bus
from common.errors import RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.messages import (
    CancelRequest,
    FinishReason,
    GatewayGone,
    GenerationRequest,
    InstanceEvent,
    InstanceGone,
    InstanceLife,
    Placement,
    Queued,
    RequestEnded,
    SampledToken,
    SchedulerEvent,
    SchedulerGone,
    SequenceFailed,
    SequenceMoved,
    SubmitAnswer,
    SubmitRequest,
    TokenBatch,
    TokenEvent,
    Work,
    WorkDone,
    WorkKind,
    error_reply,
)
from common.subjects import Subjects
from tests.gateway.processes import GatewayProcess

PREFILL = InstanceId("prefill-a")
DECODE = InstanceId("decode-a")
NEXT_DECODE = InstanceId("decode-next")
LIFE = Incarnation("first")
"""Of both instances."""
TIMEOUT_S = 10.0


@dataclass(slots=True)
class ScriptedPeer:
    """``gate``: submissions are answered only while it is set. ``queued``: so many are told to ask again,
    before ``refusals`` are raised one by one. ``formers``: of all submissions, who decoded the sequence
    before; ``wanted_for_s``: since when they want a place. A sequence that somebody did is resumed by the
    decode instance alone."""

    bus: Bus
    subjects: Subjects
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[RequestError] = field(default_factory=list)
    queued: int = 0
    formers: list[InstanceLife | None] = field(default_factory=list)
    lost: list[tuple[InstanceId, ...]] = field(default_factory=list)
    wanted_for_s: list[float] = field(default_factory=list)
    submissions: asyncio.Queue[GenerationRequest] = field(default_factory=asyncio.Queue)
    cancels: asyncio.Queue[tuple[InstanceId, CancelRequest]] = field(default_factory=asyncio.Queue)
    ended: asyncio.Queue[RequestEnded] = field(default_factory=asyncio.Queue)

    async def start(self) -> None:
        self.gate.set()
        await self.bus.serve(self.subjects.submit(), SubmitRequest, self._submit)
        await self.bus.subscribe(self.subjects.scheduler_events(), SchedulerEvent, self._take_event)
        for instance_id in (PREFILL, DECODE, NEXT_DECODE):
            await self._listen_as(instance_id)

    async def next_request(self) -> GenerationRequest:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.submissions.get()

    async def wait_cancelled(self, request: GenerationRequest) -> None:
        """Until both instances were told to forget this attempt. Fails on word of another request."""
        waiting = {PREFILL, DECODE}
        async with asyncio.timeout(TIMEOUT_S):
            while waiting:
                instance_id, cancel = await self.cancels.get()
                assert cancel == CancelRequest(request.request_id, request.attempt)
                waiting.discard(instance_id)

    async def next_ended(self) -> RequestId:
        async with asyncio.timeout(TIMEOUT_S):
            return (await self.ended.get()).request_id

    async def next_end(self) -> RequestEnded:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.ended.get()

    def tokens(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        *,
        start: int | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        """Publishes tokens, each in its own batch; ``finish`` comes with the last one."""
        self.sampled(request, [SampledToken(each) for each in token_ids], start=start, finish=finish)

    def sampled(
        self,
        request: GenerationRequest,
        tokens: Sequence[SampledToken],
        *,
        start: int | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        first = len(request.output_ids) if start is None else start
        for offset, token in enumerate(tokens):
            reason = finish if offset == len(tokens) - 1 else None
            event = TokenEvent(request.request_id, request.attempt, first + offset, token, reason)
            self.bus.publish(self.subjects.gateway_events(request.gateway_id), TokenBatch(DECODE, (event,)))

    def work(self, request: GenerationRequest, kind: WorkKind) -> None:
        """The prefill instance has computed the prompt, or the decode instance pulled its KV."""
        done = Work(request.request_id, request.attempt, kind, 0.01)
        instance = PREFILL if kind == "prefill" else DECODE
        self.bus.publish(self.subjects.gateway_events(request.gateway_id), WorkDone(instance, (done,)))

    def fail(
        self,
        request: GenerationRequest,
        error: RequestError,
        *,
        can_continue: bool,
        lost_instance: InstanceId | None = None,
    ) -> None:
        failed = SequenceFailed(
            request.request_id, request.attempt, error_reply(error), can_continue, lost_instance
        )
        self.bus.publish(self.subjects.gateway_events(request.gateway_id), failed)

    def move(self, request: GenerationRequest, output_tokens: int) -> None:
        """The decode instance hands the sequence on to another, with so many tokens drawn. Both are in lives
        of which no other request has heard."""
        life = Incarnation(request.request_id)
        placement = Placement(DECODE, life, NEXT_DECODE, life)
        self.bus.publish(
            self.subjects.gateway_events(request.gateway_id),
            SequenceMoved(request.request_id, request.attempt, placement, output_tokens),
        )

    async def wait_heard(self, gateway_id: GatewayId, former: RequestId | None = None) -> None:
        """Until the gateway has taken all that was published to it alone, which what is told to everyone may
        overtake. It has a token of nobody's cancelled. ``former``: whose cancellations may come before."""
        token = TokenEvent(RequestId("nobodys"), 0, 0, SampledToken(1))
        self.bus.publish(self.subjects.gateway_events(gateway_id), TokenBatch(DECODE, (token,)))
        async with asyncio.timeout(TIMEOUT_S):
            instance_id, cancel = await self.cancels.get()
            while cancel.request_id == former:
                instance_id, cancel = await self.cancels.get()
        assert (instance_id, cancel.request_id) == (DECODE, token.request_id)

    def announce_gone(self, instance_id: InstanceId, incarnation: Incarnation = LIFE) -> None:
        self.bus.publish(self.subjects.everyone(), InstanceGone(instance_id, incarnation))

    def announce_scheduler_gone(self, incarnation: Incarnation) -> None:
        self.bus.publish(self.subjects.everyone(), SchedulerGone("scheduler-0", incarnation))

    def announce_gateway_gone(self, gateway_id: GatewayId) -> None:
        self.bus.publish(self.subjects.everyone(), GatewayGone(gateway_id))

    async def _submit(self, message: SubmitRequest) -> SubmitAnswer:
        self.formers.append(message.former)
        self.lost.append(message.lost_instances)
        self.wanted_for_s.append(message.wanted_for_s)
        if self.gate.is_set():
            # Seen by the test once the answer is on its way, so that what the test publishes follows it.
            asyncio.get_running_loop().call_soon(self.submissions.put_nowait, message.request)
        else:
            self.submissions.put_nowait(message.request)
            await self.gate.wait()
        if self.queued:
            self.queued -= 1
            return Queued()
        if self.refusals:
            raise self.refusals.pop(0)
        return Placement(PREFILL if message.former is None else DECODE, LIFE, DECODE, LIFE)

    def _take_event(self, message: SchedulerEvent) -> None:
        if isinstance(message, RequestEnded):
            self.ended.put_nowait(message)

    async def _listen_as(self, instance_id: InstanceId) -> None:
        def take(message: InstanceEvent) -> None:
            if isinstance(message, CancelRequest):
                self.cancels.put_nowait((instance_id, message))

        await self.bus.subscribe(self.subjects.instance_events(instance_id), InstanceEvent, take)


@asynccontextmanager
async def scripted_peer(gateway: GatewayProcess) -> AsyncIterator[ScriptedPeer]:
    """The only scheduler and the only instances of this gateway's mesh."""
    mesh = gateway.config.mesh
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name="scripted-peer", subjects=subjects)
    await bus.connect()
    try:
        peer = ScriptedPeer(bus, subjects)
        await peer.start()
        yield peer
    finally:
        await bus.close()
