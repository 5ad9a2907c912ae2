"""What an instance reaches of a simulated mesh."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from common.errors import RequestError
from common.ids import InstanceId
from common.messages import DecodeTask, InstanceLife, KVDelivered, Placement, PlaceMoved, PullKV
from services.simulator.gateway import SimulatedGateway
from services.simulator.network import Network

PullAnswer = Callable[[KVDelivered | RequestError], None]


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

    def life_of(self, instance_id: InstanceId) -> InstanceLife:
        """Of one that lives."""
        ...

    def tell(self, instance_id: InstanceId, word: msgspec.Struct) -> None:
        """An instance, if it lives then."""
        ...

    def place_moved(self, call: PlaceMoved, answer: Callable[[Placement | RequestError], None]) -> None: ...
