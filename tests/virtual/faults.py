"""What befalls a virtual mesh: its instances die, drain, fall silent and change roles, its clients leave."""

import random
from functools import partial

from common.ids import InstanceId
from common.messages import Role
from decode.events import LeaveAsked
from tests.virtual.mesh import VirtualMesh

FAULTS_END_S = 12.0
ROLES_SETTLE_S = 20.0
"""From then on every instance that is there has its first role: before, one role may be nobody's."""
SEEN_WITHIN_S = 0.3
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


def befall(mesh: VirtualMesh, chance: random.Random) -> None:
    """One fault at some time. The last instance of a role may die for good if it is not the only one."""
    name = chance.choice(sorted(mesh.instances))
    at_s, away_s = chance.uniform(0.5, FAULTS_END_S), chance.uniform(0.1, 6.0)
    fault = chance.choice(
        [
            *("kill", "drain", "silence", "cut", "leave", "leave", "end", "flip", "flip", "ask", "ask"),
            *("forget", "see", "see", "mistake"),
        ]
    )
    clock = mesh.bus.clock
    if fault == "kill":
        clock.at(at_s, lambda: mesh.kill(name, away_s))
    elif fault == "see":
        clock.at(at_s, lambda: see_end(mesh, name, chance))
        clock.at(at_s, lambda: mesh.kill(name, away_s))
    elif fault == "mistake":
        clock.at(at_s, lambda: see_end(mesh, name, chance))
    elif fault == "drain":
        clock.at(at_s, lambda: mesh.drain(name, away_s))
    elif fault == "silence":
        clock.at(at_s, lambda: mesh.silence(name, away_s))
    elif fault == "cut":
        clock.at(at_s, lambda: mesh.cut_link(name, away_s))
    elif fault == "flip":
        clock.at(at_s, lambda: flip_one(mesh, chance))
    elif fault == "ask":
        clock.at(at_s, lambda: ask_one(mesh, chance))
    elif fault == "forget":
        clock.at(at_s, lambda: mesh.lose_gateway_record(2 * away_s))
    elif fault == "leave":
        clock.at(at_s, lambda: leave_one(mesh, chance))
    elif mesh.shape.decodes > 1 - bool(mesh.shape.mixed):
        last = InstanceId(f"decode-{mesh.shape.decodes - 1}")
        clock.at(at_s, lambda: mesh.kill(last, None))


def see_end(mesh: VirtualMesh, name: InstanceId, chance: random.Random) -> None:
    """Each scheduler, after a moment: that the life's process that is there now has ended."""
    record = mesh.store.records.get(name)
    if record is not None:
        for scheduler in mesh.schedulers:
            told = partial(scheduler.see_end, record.life)
            mesh.bus.clock.after(chance.uniform(0.0, SEEN_WITHIN_S), told)


def leave_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """A client that still waits goes away."""
    waiting = sorted(name for name, entry in mesh.gateway.entries.items() if entry.end is None)
    if waiting:
        mesh.gateway.leave(chance.choice(waiting))


def kill_one(mesh: VirtualMesh, chance: random.Random) -> None:
    if mesh.instances:
        mesh.kill(chance.choice(sorted(mesh.instances)), chance.uniform(0.1, 6.0))


def ask_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """A sequence is asked to leave for some instance, whatever that is like."""
    names = sorted(name for name in mesh.instances if mesh.instances[name].decode.state.sequences)
    if names:
        instance = mesh.instances[chance.choice(names)]
        owner = chance.choice(list(instance.decode.state.sequences))
        wanted = InstanceId(chance.choice(sorted(mesh.store.records)))
        instance.decode.handle(LeaveAsked(owner, wanted))


def flip_one(mesh: VirtualMesh, chance: random.Random) -> None:
    """Mostly one that has something running, which must leave."""
    names = sorted(mesh.instances)
    running = [name for name in names if mesh.instances[name].decode.state.running]
    if names:
        name = chance.choice(running or names)
        mesh.flip(name, chance.choice([role for role in ROLES if role != mesh.instances[name].role]))
