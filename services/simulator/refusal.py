"""Why simulated requests were rejected. By itself, as its Struct is written and the gateway is compiled."""

import msgspec


class Refusal(msgspec.Struct, frozen=True):
    """Of so many requests; ``message``: the first one's."""

    code: str
    requests: int
    message: str
