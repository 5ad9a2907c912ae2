"""Staggered pipelining: which model replica computes which slice, and when nobody waits.

n batches share model replicas and the attention workers, in one of two ways (Lamina 1, section 5.1):

- *rotational* (5.1.1; Lamina 2, 4.3): n − 1 replicas, and slice k of batch j runs on replica
  (j + k) mod (n − 1), counted from 0. Nobody has to wait where times are balanced; contexts travel.
- *fixed* (5.1.2): n replicas, and batch j stays on replica j, which waits while its batch is at attention.

A slice's *turn* among all batches' is j + n·k: a replica that serves its ready slices by their turns serves
them as the papers' figures show. A batch that is missing leaves its turns out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staggering:
    """Of ``batches`` ≥ 1. In rotation two alternate on one replica; one has it to itself."""

    batches: int
    is_fixed: bool = False

    @property
    def replicas(self) -> int:
        return self.batches if self.is_fixed else max(1, self.batches - 1)

    def replica(self, batch: int, piece: int) -> int:
        """Who computes the batch's slice number ``piece``."""
        return batch if self.is_fixed else (batch + piece) % self.replicas

    def turn(self, batch: int, piece: int) -> int:
        """Place of that slice in the order of all batches' slices."""
        return batch + self.batches * piece

    def next_piece(self, batch: int, turn: int) -> int:
        """The batch's first slice after ``turn``, where one that was missing joins the present round."""
        return (turn - batch) // self.batches + 1


@dataclass(frozen=True, slots=True)
class StaggeringTiming:
    """What can be reached: ``cycle_s`` passes between two slices of one batch. Shares are of time."""

    cycle_s: float
    replica_share: float
    attention_share: float


def staggering_timing(staggering: Staggering, slice_s: float, attention_s: float) -> StaggeringTiming:
    """Of slices that take ``slice_s`` on a replica, and attention that takes ``attention_s`` on all workers.

    In a cycle each batch has a slice and an attention, the workers have n attentions, and the replicas share
    n slices. Where slice_s = (n − 1) · attention_s the workers are always busy, and so are rotating replicas;
    fixed ones wait for their batch's attention even then.
    """
    batches, replicas = staggering.batches, staggering.replicas
    cycle_s = max(slice_s + attention_s, batches * slice_s / replicas, batches * attention_s)
    return StaggeringTiming(
        cycle_s, batches * slice_s / (replicas * cycle_s), batches * attention_s / cycle_s
    )
