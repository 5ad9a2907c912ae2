"""How far steps over attention workers have come, by now."""

import math
import random
from types import SimpleNamespace
from typing import cast

from services.simulator.attention_course import Course
from services.simulator.attention_engine import AttentionEngine
from services.simulator.step_times import StepTimes


def course(began_s: float, step_s: float, steps: int) -> Course:
    engine = cast("AttentionEngine", SimpleNamespace(network=SimpleNamespace(exposed_s=0.0)))
    found = Course(engine, 0, (), steps, began_s, began_s, began_s)
    found.times = StepTimes(lambda step: step_s + 1e-6 * step, steps)
    return found


def test_steps_that_are_done_by_now_have_not_ended_after_now() -> None:
    """A second token was drawn 2e-15 s after its request's end: that run was refused as not conserved."""
    made = random.Random(0)
    for _ in range(1000):
        steps = made.randint(1, 5)
        looked_at = course(made.uniform(0, 1000), made.uniform(0.01, 0.2), steps)
        now = math.nextafter(looked_at.end_s(steps), 0.0)
        looked_at.advance(now)
        assert looked_at.done == steps
        assert looked_at.first_end_s <= looked_at.step_began_s == now
