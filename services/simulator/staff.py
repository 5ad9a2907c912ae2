"""Which instances a simulated mesh is to have, and how it comes to others: as the launcher scales
(``services.launcher.supervisor``), and who has been paid for from when to when."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.ids import InstanceId
from common.messages import Role
from services.simulator.clock import Clock
from services.simulator.config import Pool
from services.simulator.history import History


@dataclass(slots=True)
class Term:
    """From when an instance's devices are its until when; None: still."""

    pool: Pool
    began_s: float
    ended_s: float | None = None


@dataclass(slots=True)
class Staff:
    """``join`` makes an instance that is ready part of the mesh; ``drain`` lets one finish and end, of which
    ``note_ended`` is told. ``wanted``: who is there, starts, or died and comes back, in the order in which
    they were started."""

    clock: Clock
    pools: Sequence[Pool]
    join: Callable[[Pool, InstanceId], None]
    drain: Callable[[InstanceId], None]
    is_there: Callable[[InstanceId], bool]
    history: History
    wanted: dict[InstanceId, Pool] = field(default_factory=dict)
    terms: dict[InstanceId, Term] = field(default_factory=dict)
    _leaving: dict[InstanceId, Callable[[], None]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """With those that are ready from the start."""
        for pool in self.pools:
            for _ in range(pool.config.count):
                self.join(pool, self._hire(pool))

    def scale_pool(self, name: str, count: int) -> None:
        [pool] = [each for each in self.pools if each.config.name == name]
        present = [each for each, its in self.wanted.items() if its is pool]
        self._change([pool] * (count - len(present)), present[count:])

    def scale_roles(self, counts: Iterable[tuple[Role, int]], done: Callable[[], None]) -> None:
        """Of pools with one role the first has the new ones. ``done``: everybody is ready, or has ended."""
        started: list[Pool] = []
        ended: list[InstanceId] = []
        for role, count in counts:
            pools = [each for each in self.pools if each.config.role == role]
            present = [each for each, its in self.wanted.items() if its.config.role == role]
            started += pools[:1] * (count - len(present))
            ended += present[count:]
        self._change(started, ended, done)

    def dismiss(self, instance_id: InstanceId) -> None:
        """It is not there, and does not come back."""
        if self.wanted.pop(instance_id, None) is not None:
            self.terms[instance_id].ended_s = self.clock.now

    def note_ended(self, instance_id: InstanceId) -> None:
        """A life of it has."""
        over = self._leaving.pop(instance_id, None)
        if over is not None:
            self.terms[instance_id].ended_s = self.clock.now
            self.history.note("end", instance_id)
            over()

    def terms_of(self, pool: Pool) -> list[Term]:
        return [term for term in self.terms.values() if term.pool is pool]

    def _hire(self, pool: Pool) -> InstanceId:
        name = pool.config.name
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        instance_id = InstanceId(f"{name}-{number}")
        self.wanted[instance_id], self.terms[instance_id] = pool, Term(pool, self.clock.now)
        return instance_id

    def _change(
        self, started: Sequence[Pool], ended: Sequence[InstanceId], done: Callable[[], None] = lambda: None
    ) -> None:
        """Who is started becomes ready, and then who is to end drains."""
        if not started and not ended:
            done()
            return
        starting = {self._hire(pool): pool for pool in started}
        for instance_id in starting:
            self.history.note("start", instance_id)
        for instance_id in ended:
            del self.wanted[instance_id]
            self.history.note("leave", instance_id)
        unready, staying = set(starting), set(ended)

        def be_ready(instance_id: InstanceId, pool: Pool) -> None:
            if instance_id in self.wanted:
                self.join(pool, instance_id)
                self.history.note("ready", instance_id)
            unready.remove(instance_id)
            if not unready:
                end_all()

        def end_all() -> None:
            for instance_id in ended:
                self._leaving[instance_id] = partial(be_over, instance_id)
                if self.is_there(instance_id):
                    self.drain(instance_id)
                else:
                    self.note_ended(instance_id)
            if not ended:
                done()

        def be_over(instance_id: InstanceId) -> None:
            staying.remove(instance_id)
            if not staying:
                done()

        for instance_id, pool in starting.items():
            self.clock.after(pool.config.start_s, partial(be_ready, instance_id, pool))
        if not starting:
            end_all()
