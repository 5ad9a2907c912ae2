"""KV that does not get through: both rooms of an instance tell schedulers of it, over a real bus."""

import asyncio

import pytest

from common.bus import Bus
from common.errors import KVLinkBroken
from common.ids import InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.messages import (
    Acknowledged,
    DecodeTask,
    InstanceCall,
    KVDelivered,
    KVDestination,
    KVLinkFailed,
    KVLinkWorks,
    PrefillTask,
    PullKV,
    SchedulerEvent,
)
from common.subjects import Subjects
from common.transfer.interface import PeerInfo, encode_peer_info
from decode.events import DecodeEvent, PullFailed, PullSequence
from decode.sequence import ROOM
from tests.common.buses import run, until
from tests.requests import make_request
from tests.services.hosts.test_instance import LIFE, decode_instance

PEER = InstanceId("peer-9")
OWN = InstanceId("decode-0")
NOWHERE = encode_peer_info(
    PeerInfo(address=None, incarnation="nobody", host="another host", pid=1, regions=())
)


async def listen(bus: Bus, namespace: str) -> list[KVLinkFailed | KVLinkWorks]:
    told: list[KVLinkFailed | KVLinkWorks] = []

    def take(message: SchedulerEvent) -> None:
        if isinstance(message, KVLinkFailed | KVLinkWorks):
            told.append(message)

    await bus.subscribe(Subjects(namespace).scheduler_events(), SchedulerEvent, take)
    return told


def test_who_pulls_says_so_before_its_gateway_hears_of_it_and_when_kv_comes_again(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with decode_instance(nats_url, namespace) as instance:
            told, answers = await listen(instance.bus, namespace), [KVLinkBroken("nothing gets through")]
            failures: list[tuple[DecodeEvent, int]] = []
            links, taken = instance.decode.puller.links, list[KVDelivered]()
            said: list[object] = []
            really_tell = links.tell

            def tell(word: KVLinkFailed | KVLinkWorks) -> None:
                said.append(word)
                really_tell(word)

            links.tell = tell

            async def answer(_: InstanceCall) -> KVDelivered:
                if answers:
                    raise answers.pop()
                return KVDelivered(100, 0.1)

            def take(_: PullSequence, delivered: KVDelivered) -> None:
                taken.append(delivered)

            await instance.bus.serve(instance.subjects.instance_calls(PEER), InstanceCall, answer)
            command = PullSequence(BlockOwner(ROOM, RequestId("r1"), 0), PEER, LIFE, (3,), 0, 1000, None)
            for _ in range(3):
                await instance.decode.puller.carry_out(
                    command, lambda event: failures.append((event, len(said))), take
                )
            first, before = failures[0]
            assert isinstance(first, PullFailed)
            assert (first.error.code, before) == (KVLinkBroken.code, 1)
            await until(lambda: len(told) == 2, instance.bus)
            assert told == [KVLinkFailed(PEER, OWN), KVLinkWorks(PEER, OWN)]
            assert len(taken) == 2

    run(work())


def test_who_cannot_reach_its_peer_answers_that_the_link_is_broken(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with decode_instance(nats_url, namespace) as instance:
            await instance.flip("prefill")
            offered = asyncio.Event()

            async def take(_: DecodeTask) -> Acknowledged:
                offered.set()
                return Acknowledged()

            await instance.bus.serve(instance.subjects.instance_calls(PEER), DecodeTask, take)
            await instance.prefill.prefill(PrefillTask(make_request("r1", 5, 9), PEER, LIFE))
            await offered.wait()
            layout = instance.prefill.kv.layout
            pull = PullKV(
                request_id=RequestId("r1"),
                attempt=0,
                prefill_incarnation=LIFE,
                decode_instance=PEER,
                blocks=(0,),
                layout=layout,
                destinations=(KVDestination(NOWHERE, 0, layout.kv_heads, 8),),
                portion=0,
                max_bytes=1 << 20,
            )
            with pytest.raises(KVLinkBroken):
                await instance.prefill.pull(pull)

    run(work())
