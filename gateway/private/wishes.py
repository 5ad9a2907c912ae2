"""What came of operators' wishes, as whoever took them up tells it: for ``/api/mesh``.

Heard by every gateway as long as it runs, whether anybody looks or not: a wish that fails minutes after it
was taken up is there to be seen at the next look. Pure but for being told the time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.messages import DrainWish, ScaleWish, WishNews, WishState

KEPT = 6
FORGOTTEN_AFTER_S = 600.0


class WishView(msgspec.Struct, frozen=True, kw_only=True):
    """``since_s``: how long it has been under way, or is over. ``reason``: why it failed."""

    id: str
    wish: ScaleWish | DrainWish
    state: WishState
    reason: str
    since_s: float


@dataclass(slots=True)
class WishLog:
    """The newest wishes. One that is under way is kept until others push it out: whoever carried it out may
    have ended, and then its age is all that is known."""

    clock: Callable[[], float]
    _newest: dict[str, tuple[float, WishNews]] = field(default_factory=dict)

    def take(self, news: WishNews) -> None:
        self._newest.pop(news.id, None)
        self._newest[news.id] = (self.clock(), news)
        while len(self._newest) > KEPT:
            del self._newest[next(iter(self._newest))]

    def views(self) -> list[WishView]:
        """The newest first."""
        now = self.clock()
        return [
            WishView(id=each.id, wish=each.wish, state=each.state, reason=each.reason, since_s=now - told_s)
            for told_s, each in reversed(self._newest.values())
            if each.state == "under_way" or now - told_s < FORGOTTEN_AFTER_S
        ]
