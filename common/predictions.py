"""What was predicted of single requests, kept until it is used: the newest, and boundedly many."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.lengths import LengthDistribution

KEPT = 1024
"""About as many as wait for their first token at once. Of what is dropped, less is known; nothing breaks."""

Key = TypeVar("Key")


@dataclass(slots=True)
class NewestLengths(Generic[Key]):
    _kept: OrderedDict[Key, LengthDistribution] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, lengths: LengthDistribution) -> None:
        """In the place of what was kept of it before."""
        self._kept.pop(key, None)
        self._kept[key] = lengths
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def find(self, key: Key) -> LengthDistribution | None:
        return self._kept.get(key)

    def forget(self, key: Key) -> LengthDistribution | None:
        """What was kept of it."""
        return self._kept.pop(key, None)
