"""Rotational staggered pipelining: which model replica computes which slice, and when nobody waits.

n batches share n − 1 replicas and the attention workers (Lamina 2, section 4.3; Lamina 1, 5.1.1). Slice k of
batch j runs on replica (j + k) mod (n − 1), counted from 0. Its *turn* in the whole rotation is j + n·k:
batch, slice and replica follow from the turn alone, so a replica that serves its ready slices by their turns
serves them as the paper's figure shows. A batch that is missing leaves its turns out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of ``batches`` ≥ 1. Two alternate on one replica; one has it to itself."""

    batches: int

    @property
    def replicas(self) -> int:
        return max(1, self.batches - 1)

    def replica(self, batch: int, piece: int) -> int:
        """Who computes the batch's slice number ``piece``."""
        return (batch + piece) % self.replicas

    def turn(self, batch: int, piece: int) -> int:
        """Place of that slice in the order of the rotation."""
        return batch + self.batches * piece

    def next_piece(self, batch: int, turn: int) -> int:
        """The batch's first slice after ``turn``, where one that was missing joins the present round."""
        return (turn - batch) // self.batches + 1


@dataclass(frozen=True, slots=True)
class RotationTiming:
    """What a rotation can reach: ``cycle_s`` passes between two slices of one batch. Shares are of time."""

    cycle_s: float
    replica_share: float
    attention_share: float


def rotation_timing(rotation: Rotation, slice_s: float, attention_s: float) -> RotationTiming:
    """Of slices that take ``slice_s`` on a replica, and attention that takes ``attention_s`` on all workers.

    In a cycle each batch has a slice and an attention, each replica n / (n − 1) slices, the workers n
    attentions. The three are equal, and everybody busy, where slice_s = (n − 1) · attention_s.
    """
    batches, replicas = rotation.batches, rotation.replicas
    cycle_s = max(slice_s + attention_s, batches * slice_s / replicas, batches * attention_s)
    return RotationTiming(cycle_s, batches * slice_s / (replicas * cycle_s), batches * attention_s / cycle_s)
