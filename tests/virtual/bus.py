"""A bus in virtual time, with the order that one NATS server keeps and the losses that it shows.

What one sender sends arrives at the server in order, and what one receiver gets leaves it in order; nothing
else is promised. A call to somebody who is not there is answered at once; one to somebody who dies is not.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.errors import BusError, BusTimeout, NoResponder, RequestError
from services.simulator.clock import Clock

Reply = msgspec.Struct | RequestError | BusError
HOP_S = 0.004
"""The longest that a message takes to the server, or from there; now and then ten times that."""


class Node(Protocol):
    """One life of one process."""

    def hear(self, message: msgspec.Struct) -> None: ...

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None: ...


@dataclass(slots=True)
class Bus:
    chance: random.Random
    clock: Clock = field(default_factory=Clock)
    nodes: dict[str, Node] = field(default_factory=dict)
    """Who is there, by name."""
    hearing: dict[str, list[str]] = field(default_factory=dict)
    serving: dict[str, list[str]] = field(default_factory=dict)
    """Subjects of several: what is published there reaches all that hear it, a call any that serves it."""
    cut_off: set[str] = field(default_factory=set)
    """Whom the server does not reach, nor they it. They do not know."""
    _into_server_s: dict[str, float] = field(default_factory=dict)
    _out_of_server_s: dict[str, float] = field(default_factory=dict)

    def publish(self, sender: str, receiver: str, message: msgspec.Struct) -> None:
        for member in self.hearing.get(receiver, [receiver]):
            self._send(sender, member, lambda node: node.hear(message), lambda: None)

    def publish_to_all(self, sender: str, message: msgspec.Struct) -> None:
        for receiver in list(self.nodes):
            self.publish(sender, receiver, message)

    def call(
        self,
        sender: str,
        receiver: str,
        message: msgspec.Struct,
        answer: Callable[[Reply], None],
        timeout_s: float,
    ) -> None:
        """``answer`` is called once: with the reply, an error, or BusTimeout."""
        caller = self.nodes[sender]
        is_answered = False

        def finish(reply: Reply) -> None:
            nonlocal is_answered
            if not is_answered and self.nodes.get(sender) is caller:
                is_answered = True
                answer(reply)

        def send_back(reply: Reply) -> None:
            self._send(receiver, sender, lambda _: finish(reply), lambda: None)

        def nobody() -> None:
            self._send("server", sender, lambda _: finish(NoResponder(receiver)), lambda: None)

        receiver = self.chance.choice(self.serving.get(receiver) or [receiver])
        self._send(sender, receiver, lambda node: node.serve(message, send_back), nobody)
        self.clock.after(timeout_s, lambda: finish(BusTimeout(receiver)))

    def _send(
        self, sender: str, receiver: str, deliver: Callable[[Node], None], nobody: Callable[[], None]
    ) -> None:
        def route() -> None:
            node = self.nodes.get(receiver)
            if sender in self.cut_off or receiver in self.cut_off:
                return
            if node is None:
                nobody()
                return

            def arrive() -> None:
                if self.nodes.get(receiver) is node:
                    deliver(node)

            self._after_hop(self._out_of_server_s, receiver, arrive)

        self._after_hop(self._into_server_s, sender, route)

    def _after_hop(self, last_s: dict[str, float], name: str, action: Callable[[], None]) -> None:
        chance = self.chance
        hop_s = chance.random() * HOP_S * (10 if chance.random() < 0.05 else 1)
        last_s[name] = max(self.clock.now + hop_s, last_s.get(name, 0.0))
        self.clock.at(last_s[name], action)
