"""The phases of a sequence inside an instance, and which may follow which.

::

    prefill:  QUEUED → COMPUTING → COMPUTED → (gone)
    decode:   WAITING → PULLING → RUNNING ⇄ MOVING, RUNNING → (gone)
              RUNNING → SWAPPING_OUT → SWAPPED → SWAPPING_IN → RUNNING

Prefill's are those of the prompt; its KV is handed over beside them (``prefill.handover``). A cancelled
sequence leaves at once, except where somebody else still touches its blocks: the engine (a chunk or step in
flight; a copy to or from the host tier) or the transfer engine (a portion of KV in the air, MOVING). There it
stays, ``is_cancelled``, until that ends. An illegal move raises ValueError and changes nothing.
"""

from enum import Enum


class PrefillPhase(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    COMPUTED = "computed"

    # Enum's own runs in Python, at each look into the tables below.
    __hash__ = object.__hash__


class DecodePhase(Enum):
    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    MOVING = "moving"
    SWAPPING_OUT = "swapping out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping in"

    __hash__ = object.__hash__


NEXT_PREFILL_PHASES: dict[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.QUEUED: frozenset({PrefillPhase.COMPUTING}),
    PrefillPhase.COMPUTING: frozenset({PrefillPhase.COMPUTED}),
    PrefillPhase.COMPUTED: frozenset(),
}

NEXT_DECODE_PHASES: dict[DecodePhase, frozenset[DecodePhase]] = {
    DecodePhase.WAITING: frozenset({DecodePhase.PULLING}),
    DecodePhase.PULLING: frozenset({DecodePhase.RUNNING}),
    DecodePhase.RUNNING: frozenset({DecodePhase.MOVING, DecodePhase.SWAPPING_OUT}),
    DecodePhase.MOVING: frozenset({DecodePhase.RUNNING}),
    DecodePhase.SWAPPING_OUT: frozenset({DecodePhase.SWAPPED}),
    DecodePhase.SWAPPED: frozenset({DecodePhase.SWAPPING_IN}),
    DecodePhase.SWAPPING_IN: frozenset({DecodePhase.RUNNING}),
}


def next_prefill_phase(now: PrefillPhase, then: PrefillPhase) -> PrefillPhase:
    if then not in NEXT_PREFILL_PHASES[now]:
        raise ValueError(f"a sequence cannot go from {now.value} to {then.value}")
    return then


def next_decode_phase(now: DecodePhase, then: DecodePhase) -> DecodePhase:
    if then not in NEXT_DECODE_PHASES[now]:
        raise ValueError(f"a sequence cannot go from {now.value} to {then.value}")
    return then
