"""The states as one mesh where schedulers die or are cut off."""

import random
from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.faults import FAULTS_END_S, ROLES_SETTLE_S, befall, kill_one, leave_one
from tests.virtual.mesh import make_mesh
from tests.virtual.shape import MeshShape
from tests.virtual.trials import REQUESTS, SEEDS, finish, shapes, submit


@settings(max_examples=20, deadline=None)
@given(shapes(spare_blocks=10), SEEDS)
def test_who_waits_at_a_scheduler_that_dies_waits_at_the_next(shape: MeshShape, seed: int) -> None:
    """Clients leave, and instances die, also just before: the next scheduler tells whom nobody told."""
    chance = random.Random(seed)
    mesh = make_mesh(replace(shape, policy="deferred"), seed)
    submit(mesh, chance, REQUESTS, within_s=2.0)
    for _ in range(chance.randint(0, 4)):
        mesh.bus.clock.at(chance.uniform(0.5, 4.0), lambda: leave_one(mesh, chance))
    for _ in range(chance.randint(0, 3)):
        mesh.bus.clock.at(chance.uniform(0.5, 4.0), lambda: kill_one(mesh, chance))
    mesh.bus.clock.at(chance.uniform(0.6, 4.0), lambda: mesh.kill_scheduler(chance.uniform(0.1, 3.0)))
    finish(mesh, REQUESTS)
    assert all(len(scheduler.state.waiting) == 0 for scheduler in mesh.schedulers)


@settings(max_examples=30, deadline=None)
@given(shapes(spare_blocks=10), st.integers(2, 3), SEEDS)
def test_schedulers_that_die_or_are_cut_off_lose_no_request_and_keep_no_booking(
    shape: MeshShape, schedulers: int, seed: int
) -> None:
    """One that was cut off does not know what has ended, and places what others have placed meanwhile."""
    chance = random.Random(seed)
    mesh = make_mesh(replace(shape, schedulers=schedulers), seed)
    submit(mesh, chance, REQUESTS, within_s=FAULTS_END_S)
    clock = mesh.bus.clock
    for _ in range(chance.randint(0, 6)):
        befall(mesh, chance)
    for _ in range(chance.randint(1, 4)):
        away_s = chance.uniform(0.1, 6.0)
        clock.at(chance.uniform(0.5, FAULTS_END_S), partial(mesh.kill_scheduler, away_s))
        cut_off, cut_s = chance.choice(mesh.schedulers).name, chance.uniform(0.1, 8.0)
        clock.at(chance.uniform(0.5, FAULTS_END_S), partial(mesh.cut_scheduler_off, cut_off, cut_s))
    clock.at(ROLES_SETTLE_S, mesh.restore_roles)
    finish(mesh, REQUESTS)
