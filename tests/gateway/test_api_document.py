"""docs/api.md says what a gateway does: fields with limits and defaults, refusals, headers, errors, paths."""

import json
import re
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.app import GatewayApp
from gateway.errors import HTTP_STATUS, STATUS
from gateway.openai import CHOICE_OF, PROMISES, ChatRequest, CompletionRequest
from gateway.protocol import MAX_HEADER_BYTES
from gateway.service import routes
from tests.documents import ROOT
from tests.gateway.processes import GatewayProcess, send

DOCUMENT = (ROOT / "docs/api.md").read_text()
BODIES: dict[str, tuple[type[ChatRequest | CompletionRequest], dict[str, Any]]] = {
    "chat": (ChatRequest, {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (CompletionRequest, {"model": "default", "prompt": "Hi"}),
}
OF_OTHER_FIELDS: dict[str, object] = {"suffix": "end", "best_of": 3}
"""Refused, and in the schema; with a value that is."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, or of the document's first."""
    text = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else DOCUMENT
    table = re.search(r"^\| --- .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def endpoints(cell: str) -> tuple[str, ...]:
    return tuple(BODIES) if cell == "both" else (cell,)


def test_each_field_of_the_schema_is_listed_with_its_limits_and_default() -> None:
    listed = {
        (each, names(field)[0], takes, default.strip("`"))
        for field, of, takes, default, _ in rows("Fields that count")
        for each in endpoints(of)
    }
    known = set()
    for name, (kind, _) in BODIES.items():
        schema = kind.model_json_schema()
        for field, rule in schema["properties"].items():
            if field not in OF_OTHER_FIELDS:
                is_required = field in schema["required"]
                known.add((name, field, told(rule), "required" if is_required else default_of(rule)))
    assert listed == known


def told(rule: dict[str, Any]) -> str:
    """A rule of JSON schema in the document's words."""
    if "anyOf" in rule:
        return ", or ".join(told(each) for each in rule["anyOf"] if each.get("type") != "null")
    kind = rule.get("type", "object")
    if kind == "array":
        few, many = rule.get("minItems"), rule.get("maxItems")
        return f"array of {told(rule['items'])}" + (f", {few} to {many} of them" if many else "")
    if isinstance(rule.get("additionalProperties"), dict):
        return f"object of {told(rule['additionalProperties'])}"
    if "maxLength" in rule:
        return f"{kind} of at most {rule['maxLength']} characters"
    low = bound(rule, "minimum", "exclusiveMinimum", "over")
    high = bound(rule, "maximum", "exclusiveMaximum", "under")
    if low and high:
        return f"{kind}, {low} to {high}"
    return f"{kind}, {low} or more" if low else str(kind)


def bound(rule: dict[str, Any], inclusive: str, exclusive: str, word: str) -> str:
    if inclusive in rule:
        return str(rule[inclusive])
    return f"{word} {rule[exclusive]}" if exclusive in rule else ""


def default_of(rule: dict[str, Any]) -> str:
    return "none" if rule["default"] is None else json.dumps(rule["default"])


def test_what_is_listed_as_refused_is_refused_but_for_what_is_listed_beside_it() -> None:
    refused = {names(field)[0]: (of, taken) for field, of, taken in rows("Fields that are refused")}
    assert refused.keys() == PROMISES.keys() | OF_OTHER_FIELDS.keys()
    for name, (of, taken) in refused.items():
        for kind, body in map(BODIES.__getitem__, endpoints(of)):
            with pytest.raises(InvalidRequest) as error:
                kind.model_validate({**body, name: OF_OTHER_FIELDS.get(name, {"any": "thing"})})
            assert error.value.param == name
        if name in PROMISES:
            assert (taken == "never") == (not PROMISES[name])
            listed = [json.loads(each) for each in names(taken.partition(", or anything")[0]) if each]
            assert listed == list(PROMISES[name])
            assert ("or anything" in taken) == (name in CHOICE_OF)


def test_what_is_listed_as_ignored_is_ignored() -> None:
    text = DOCUMENT.partition("## Fields that are ignored\n")[2].partition("\n## ")[0]
    listed = [name for name in names(text) if "-" not in name]
    assert len(listed) > 10
    for kind, body in BODIES.values():
        assert kind.model_validate({**body, **dict.fromkeys(listed, 1)}).ignored == sorted(listed)


def test_the_roles_are_those_of_the_schema() -> None:
    text = DOCUMENT.partition("A message has a `role`, one of ")[2].partition(", and a `content`")[0]
    message = ChatRequest.model_json_schema()["$defs"]["Message"]
    assert names(text) == message["properties"]["role"]["enum"]


def test_every_error_is_listed_with_its_status_type_and_code() -> None:
    listed = {(int(status), names(kind)[0], names(code)[0]) for status, kind, code, _ in rows("Errors")}
    known = {(status, kind, code or "null") for _, status, kind, code in STATUS}
    known |= {(status, "invalid_request_error", "null") for status in HTTP_STATUS.values()}
    assert listed == known | {(500, "server_error", "internal_error")}


def test_every_header_is_one_that_the_gateway_reads_or_sends() -> None:
    sources = " ".join(
        path.read_text() for folder in ("gateway", "common") for path in (ROOT / folder).glob("*.py")
    )
    for header, *_ in rows("Headers and limits"):
        for name in names(header):
            assert f'"{name}"' in sources, name
    assert f"at most {MAX_HEADER_BYTES >> 10} KiB" in DOCUMENT


def test_every_path_is_listed_and_takes_what_is_listed(gateway: GatewayProcess) -> None:
    listed = {path: methods.split(", ") for cell, methods, _ in rows("") for path in names(cell)}
    for path, methods in listed.items():
        answer = send(f"{gateway.url}{path.replace('{name}', 'default')}", b"{}", method="DELETE")
        assert (answer.status, set(answer.headers["allow"].split(", "))) == (405, set(methods)), path
    known = {route.path.replace(":path", "") for route in routes(GatewayApp.__new__(GatewayApp))}
    assert known <= listed.keys()
