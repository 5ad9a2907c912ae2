"""What a relay, inside the mesh, and the autoscaler, outside, say to each other: JSON, a line each.

The autoscaler needs no way to NATS, and no password: it runs `lamella relay` where these are, by
``docker compose exec`` or ``kubectl exec``, and talks to it through that program's pipes.
"""

import msgspec

from common.config import RolePolicyName, ScalingMode
from common.messages import DrainWish, ScaleWish
from common.scaling import DesiredCounts


class Began(msgspec.Struct, frozen=True, tag="began"):
    """relay → autoscaler, first: it is connected, and this is how the mesh was configured."""

    policy: ScalingMode
    window_s: float
    roles: RolePolicyName


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """relay → autoscaler: the leading scheduler has just decided that."""

    plan: DesiredCounts


class Wished(msgspec.Struct, frozen=True, tag="wished"):
    """relay → autoscaler: an operator's wish. ``number`` is the answer's, too."""

    number: int
    wish: ScaleWish | DrainWish


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """autoscaler → relay. ``refusal``: why it did not come about."""

    number: int
    refusal: str | None = None


Line = Began | Planned | Wished
MAX_LINE_BYTES = 1 << 20

encode = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode
decode_answer = msgspec.json.Decoder(Answered).decode
