"""Why simulated requests were rejected, or failed. By itself, as its Struct is written and the gateway is
compiled."""

import msgspec


class Refusal(msgspec.Struct, frozen=True):
    """Of so many requests; ``message``: the first one's."""

    code: str
    requests: int
    message: str


def count_refusal(refusals: dict[str, Refusal], code: str, message: str) -> None:
    """Of one more request; ``refusals`` are by their codes."""
    known = refusals.get(code)
    requests = 1 if known is None else 1 + known.requests
    refusals[code] = Refusal(code, requests, message if known is None else known.message)
