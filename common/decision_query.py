"""Which decisions somebody asks for: ``/decisions`` of a scheduler, ``/api/decisions`` of a gateway.

Pure. What cannot be meant is refused, naming key, value and rule: an empty answer would say that nothing has
been decided.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from common.errors import InvalidRequest
from common.ids import ID_PATTERN, is_valid_id

NEWEST, MOST_NEWEST = 20, 1000
WHOLE = re.compile(r"[0-9]{1,9}")
KEYS = ("newest", "class", "instance")
SHOWN = 80
"""Characters of a value that a refusal repeats."""


class DecisionQuery(NamedTuple):
    """The ``newest``; only those of a class, or that looked at an instance, where one is given."""

    newest: int = NEWEST
    service_class: str | None = None
    instance: str | None = None


def read_query(query: Mapping[str, str]) -> DecisionQuery:
    """Raises InvalidRequest."""
    for key in query.keys() - set(KEYS):
        raise _refusal(query, key, f"is not a known key, of {', '.join(KEYS)}")
    for key in ("class", "instance"):
        if key in query and not is_valid_id(query[key]):
            raise _refusal(query, key, f"must match {ID_PATTERN.pattern}")
    return DecisionQuery(_newest(query), query.get("class"), query.get("instance"))


def as_query(asked: DecisionQuery) -> str:
    """The part of an address that ``read_query`` reads as this."""
    given = zip(KEYS, asked, strict=True)
    return urlencode({key: value for key, value in given if value is not None})


def _newest(query: Mapping[str, str]) -> int:
    if "newest" not in query:
        return NEWEST
    text = query["newest"]
    if WHOLE.fullmatch(text) is None or not 1 <= int(text) <= MOST_NEWEST:
        raise _refusal(query, "newest", f"must be a whole number, 1..{MOST_NEWEST}")
    return int(text)


def _refusal(query: Mapping[str, str], key: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{key[:SHOWN]} = {query[key][:SHOWN]!r}: {rule}", param=key[:SHOWN])
