"""What an operator wishes of whoever starts and ends processes, as the local launcher does."""

from typing import Literal

import msgspec

from common.scaling import ScaledRole

WishState = Literal["under_way", "done", "failed"]


class ScaleWish(msgspec.Struct, frozen=True, tag="scale-wish"):
    """gateway → launcher: let there be ``count`` of that role. Acknowledged once it is taken up, which may be
    minutes before it is so; InvalidRequest: it cannot be, and why."""

    role: ScaledRole
    count: int


class DrainWish(msgspec.Struct, frozen=True, tag="drain-wish"):
    """gateway → launcher: let that process finish what it has and end, and start no other in its place.
    ``service_id``: as members are named. Answered as a ScaleWish."""

    service_id: str


class WishNews(msgspec.Struct, frozen=True, tag="wish-news"):
    """launcher → gateways: what comes of a wish that was acknowledged. ``id`` is the launcher's; ``reason``:
    why it failed. What was refused at once is not told: who asked knows."""

    id: str
    wish: ScaleWish | DrainWish
    state: WishState
    reason: str = ""
