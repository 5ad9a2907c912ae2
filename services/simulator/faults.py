"""What befalls a simulated mesh: its instances and attention workers die and begin anew, are slow, are heard
by nobody, and links carry less. How the mesh goes on is the live decisions' own (``scheduler.membership``,
``gateway.losses``, the rooms' states).

Times come from a seed and from the instance alone: that one fails says nothing of when another does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.ids import InstanceId
from services.simulator.cluster import Cluster
from services.simulator.fault_config import AnyFault, Death, Silence, SlowLink, Straggler
from services.simulator.history import Kind

OVERS: dict[type[AnyFault], Kind] = {
    Straggler: "straggler_over",
    SlowLink: "slow_link_over",
    Silence: "silence_over",
}


@dataclass(slots=True)
class Faults:
    cluster: Cluster
    faults: Sequence[AnyFault]
    seed: int
    _followed: set[InstanceId] = field(default_factory=set)

    def start(self) -> None:
        self.cluster.history.befell = dict.fromkeys(range(len(self.faults)), 0)
        for number, fault in enumerate(self.faults):
            if fault.at_s is not None:
                self._befall_at(number, fault, fault.at_s)
        self.cluster.on_join.append(lambda instance: self._follow(instance.instance_id))
        for name in self._names():
            self._follow(name)

    def _names(self) -> list[InstanceId]:
        """Of instances that are there, and of all attention workers."""
        workers = self.cluster.workers
        return [*self.cluster.instances, *map(InstanceId, () if workers is None else workers.names)]

    def _befall_at(self, number: int, fault: AnyFault, at_s: float) -> None:
        def befall() -> None:
            for name in self._names():
                if self._concerns(fault, name):
                    self._befall(number, fault, name)

        self.cluster.clock.at(at_s, befall)

    def _concerns(self, fault: AnyFault, instance_id: InstanceId) -> bool:
        return instance_id == fault.instance or self.cluster.pool_of[instance_id] == fault.pool

    def _follow(self, instance_id: InstanceId) -> None:
        """From its first life on."""
        if instance_id in self._followed:
            return
        self._followed.add(instance_id)
        for number, fault in enumerate(self.faults):
            if fault.mean_between_s is not None and self._concerns(fault, instance_id):
                place = self.cluster.network.number_of(instance_id)
                generator = np.random.default_rng((self.seed, number, place))
                self._repeat(number, fault, instance_id, generator)

    def _repeat(
        self, number: int, fault: AnyFault, instance_id: InstanceId, generator: np.random.Generator
    ) -> None:
        assert fault.mean_between_s is not None
        clock = self.cluster.clock
        gap_s = float(generator.exponential(fault.mean_between_s))

        def befall() -> None:
            self._befall(number, fault, instance_id)
            if fault.lasts_s is not None:
                clock.after(fault.lasts_s, lambda: self._repeat(number, fault, instance_id, generator))

        clock.after(gap_s, befall)

    def _befall(self, number: int, fault: AnyFault, instance_id: InstanceId) -> None:
        """One that is away is spared."""
        cluster = self.cluster
        if not cluster.is_there(instance_id):
            return
        conditions, history = cluster.conditions_of(instance_id), cluster.history
        history.befell[number] += 1
        match fault:
            case Death(of_host=of_host):
                cluster.die(instance_id, is_for_good=fault.lasts_s is None, is_seen=not of_host)
                self._after(fault, lambda: cluster.begin_anew(instance_id))
                return
            case Straggler(times=times):
                history.note("straggler", instance_id, f"passes take {times:g} times as long")
                conditions.times_slower.append(times)
                self._after(fault, lambda: conditions.times_slower.remove(times), instance_id)
            case SlowLink(share=share):
                history.note("slow_link", instance_id, f"carries {share:.3g} of what it did")
                conditions.link_shares.append(share)
                self._after(fault, lambda: conditions.link_shares.remove(share), instance_id)
            case Silence():
                history.note("silence", instance_id)
                conditions.silences += 1
                self._after(fault, conditions.end_silence, instance_id)
        cluster.apply_conditions(instance_id)

    def _after(self, fault: AnyFault, end: Callable[[], None], instance_id: InstanceId | None = None) -> None:
        """``instance_id``: whose conditions are others then."""
        if fault.lasts_s is None:
            return

        def over() -> None:
            end()
            if instance_id is not None:
                self.cluster.apply_conditions(instance_id)
                if self.cluster.is_there(instance_id):
                    self.cluster.history.note(OVERS[type(fault)], instance_id)

        self.cluster.clock.after(fault.lasts_s, over)
