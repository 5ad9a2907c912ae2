"""What an instance reaches of a simulated mesh."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from common.errors import RequestError
from common.ids import InstanceId
from common.messages import (
    DecodeTask,
    InstanceLife,
    KVDelivered,
    KVLinkFailed,
    KVLinkWorks,
    Placement,
    PlaceMoved,
    PullKV,
)
from prefill.events import RunChunk
from services.simulator.computed_work import ComputedWork
from services.simulator.engine import BusyTime, EngineSettings
from services.simulator.gateway import SimulatedGateway
from services.simulator.network import Network

OWN_POOL = b""
"""The endpoint of an instance's own memory; of others it is their name. Nobody opens a modelled one."""


def receivers_of(pull: PullKV) -> list[InstanceId]:
    """Over whose links its KV comes."""
    endpoints = (each.endpoint for each in pull.destinations)
    return [InstanceId(each.decode()) if each else pull.decode_instance for each in endpoints]


PullAnswer = Callable[[KVDelivered | RequestError], None]


class Engine(Protocol):
    """An instance's, as its rooms use it."""

    busy: BusyTime
    work: ComputedWork
    passes: int

    @property
    def is_idle(self) -> bool: ...

    def die(self) -> None: ...

    def change_settings(self, settings: EngineSettings) -> None:
        """From the next pass on."""
        ...

    def wait_chunk(self, chunk: RunChunk) -> None:
        """The prefill room's next work."""
        ...

    def wait_step(self, lane: int = 0) -> None:
        """The decode room's."""
        ...

    def catch_up(self) -> None:
        """Before an event: tells what has been computed by now of steps that run on."""
        ...

    def look_ahead(self) -> None:
        """After an event: whether steps run on for as long as it seemed."""
        ...

    def untold_steps(self) -> tuple[int, ...]:
        """Before a report: of each lane, those that have ended by now of which the decode room is told later;
        what they took is counted as far as it ever is. Empty where there are none, as all have been told."""
        ...

    def layers_done(self) -> int:
        """That are computed now and to be told of, of the chunk; 0 where it is none, or was told."""
        ...

    def look_at_layers(self) -> None:
        """Waits for the next layers where somebody waits for their KV."""
        ...


class Peer(Protocol):
    """Another instance, or the same."""

    def take_sequence(self, task: DecodeTask) -> None:
        """Raises as its decode room does."""
        ...

    def take_pull(self, pull: PullKV, answer: PullAnswer) -> None: ...


class Mesh(Protocol):
    @property
    def network(self) -> Network: ...

    @property
    def gateway(self) -> SimulatedGateway: ...

    def find(self, instance_id: InstanceId) -> Peer | None:
        """None: it is gone."""
        ...

    def is_alive(self, life: InstanceLife) -> bool: ...

    def life_of(self, instance_id: InstanceId) -> InstanceLife:
        """Of one that lives."""
        ...

    def tell(self, instance_id: InstanceId, word: msgspec.Struct) -> None:
        """An instance, if it lives then."""
        ...

    def place_moved(self, call: PlaceMoved, answer: Callable[[Placement | RequestError], None]) -> None: ...

    def tell_scheduler(self, word: KVLinkFailed | KVLinkWorks) -> None: ...
