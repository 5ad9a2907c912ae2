"""What the routes refuse, and how: always OpenAI's error object, never a 500, whatever was sent."""

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.model.tokens import Tokenizer
from tests.gateway.processes import Answer, GatewayProcess, send

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"temperature": "warm"}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"min_p": 1.5}, "min_p"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"service_tier": "gold"}, "service_tier"),
    (TEXT, {"service_tier": 3}, "service_tier"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"stream": 1}, "stream"),
    (CHAT, {"stream": "false"}, "stream"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": "5"}, "max_tokens"),
    (CHAT, {"max_tokens": 5.0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": "5"}, "max_completion_tokens"),
    (CHAT, {"seed": 1.0}, "seed"),
    (CHAT, {"stop_token_ids": [True]}, "stop_token_ids.0"),
    (CHAT, {"logit_bias": {"5": True}}, "logit_bias"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"best_of": "1"}, "best_of"),
    (CHAT, {"n": 100}, "n"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"min_tokens": -1}, "min_tokens"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"seed": "x"}, "seed"),
    (CHAT, {"stop": 5}, "stop"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["x" * 257]}, "stop"),
    (CHAT, {"stop": ["x"] * 33}, "stop"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1000000": 1}}, "logit_bias"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": None}]}, "messages.1.content"),
    (CHAT, {"messages": [{"role": "system"}]}, "messages.0.content"),
    (CHAT, {"tools": TOOLS}, "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": "auto"}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"functions": [{"name": "look"}]}, "functions"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs"),
    (TEXT, {"guided_regex": "[0-9]+"}, "guided_regex"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**6]}, "prompt"),
    (TEXT, {"prompt": {"text": "Hi"}}, "prompt"),
    (TEXT, {"prompt": ["a"] * 9}, "prompt"),
    (TEXT, {"logprobs": 21}, "logprobs"),
]


def post(gateway: GatewayProcess, path: str, **changes: Any) -> Answer:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    return send(gateway.url + path, {"model": "default", **base, **changes})


@pytest.mark.parametrize(("path", "changes", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_that_breaks_a_rule_is_named(
    path: str, changes: dict[str, Any], param: str, gateway: GatewayProcess
) -> None:
    answer = post(gateway, path, **changes)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
    assert answer.error["param"] == param, answer.body
    assert answer.error["message"]


@pytest.mark.parametrize(
    ("path", "changes", "name"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"echo": True, "logprobs": 1}, "echo"),
    ],
    ids=["top_logprobs", "stream_options", "suffix", "best_of", "echo"],
)
def test_fields_that_contradict_each_other_are_named(
    path: str, changes: dict[str, Any], name: str, gateway: GatewayProcess
) -> None:
    answer = post(gateway, path, **changes)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert answer.error["param"] == name


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str, gateway: GatewayProcess) -> None:
    body: dict[str, object] = {"model": "default", "messages": MESSAGES}
    del body[field]
    answer = send(gateway.url + CHAT, body)
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"model": "default", "messages": NaN}',
    ],
    ids=lambda body: repr(body[:12]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(path: str, body: bytes, gateway: GatewayProcess) -> None:
    answer = send(gateway.url + path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


def test_a_body_over_the_limit_is_refused(gateway: GatewayProcess) -> None:
    limit = gateway.config.gateway.max_body_bytes
    answer = post(gateway, TEXT, prompt="x" * limit)
    assert answer.status == 413
    assert "max_body_bytes" in str(answer.error["message"])


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (TEXT, {"prompt": [5] * 9000}),
        (TEXT, {"prompt": "word " * 9000}),
        (TEXT, {"prompt": [5] * 10, "max_tokens": 8190}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (CHAT, {"max_tokens": 8190}),
    ],
    ids=["tokens", "text", "with-output", "chat", "chat-with-output"],
)
def test_what_does_not_fit_the_context_is_refused(
    path: str, changes: dict[str, Any], gateway: GatewayProcess
) -> None:
    answer = post(gateway, path, **changes)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_an_unknown_model_is_not_found(path: str, gateway: GatewayProcess) -> None:
    body: dict[str, object] = {"model": "gpt-99", "messages": MESSAGES, "prompt": "Hi"}
    answer = send(gateway.url + path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", TEXT, "POST"),
        ("OPTIONS", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/version", "GET, HEAD"),
    ],
)
def test_another_method_is_refused_and_told_which_one_is_meant(
    method: str, path: str, allowed: str, gateway: GatewayProcess
) -> None:
    answer = send(gateway.url + path, b"{}", method=method)
    assert (answer.status, answer.error["type"]) == (405, "invalid_request_error")
    assert answer.headers["allow"] == allowed


def test_the_health_routes_tell_their_methods_too(gateway: GatewayProcess) -> None:
    answer = send(f"{gateway.url}/health/live", b"{}")
    assert answer.status == 405
    assert {*answer.headers["allow"].split(", ")} == {"GET", "HEAD"}


def test_a_gateway_alone_is_ready_and_says_who_is_missing(gateway: GatewayProcess) -> None:
    for path in ("/health", "/health/ready"):
        answer = send(gateway.url + path, None)
        assert (answer.status, json.loads(answer.body)) == (200, {"status": "ready"})
    answer = post(gateway, TEXT)
    assert (answer.status, answer.error["code"]) == (503, "no_instance_ready")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/ready", "/metrics", "/v1/models", "/v1/models/default", "/version"]
)
def test_whatever_can_be_read_has_a_head(path: str, gateway: GatewayProcess) -> None:
    answer = send(gateway.url + path, None, method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == send(gateway.url + path, None).headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/gpt-99", 404),
        ("POST", "/nothing/%00%ff", 404),
    ],
)
def test_routes_that_do_not_exist_answer_as_openai_would(
    method: str, path: str, status: int, gateway: GatewayProcess
) -> None:
    body = None if method in ("GET", "DELETE") else b"{}"
    answer = send(gateway.url + path, body, method=method)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("my-request_1.0", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a;b", False)],
)
@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
def test_a_plain_request_id_is_echoed_and_any_other_replaced(
    path: str, sent: str, is_echoed: bool, gateway: GatewayProcess
) -> None:
    answer = send(gateway.url + path, b"{}", {"x-request-id": sent})
    echoed = answer.headers["x-request-id"]
    assert (echoed == sent) == is_echoed
    assert set(echoed) <= set(string.ascii_letters + string.digits + "._-")


def test_the_model_answers_to_its_name_and_to_default(gateway: GatewayProcess) -> None:
    cards = json.loads(send(f"{gateway.url}/v1/models", None).body)["data"]
    names = [card["id"] for card in cards]
    assert "default" in names
    for name in names:
        assert json.loads(send(f"{gateway.url}/v1/models/{name}", None).body)["id"] == name


@pytest.mark.parametrize("text", ["Hello there", " 日本語 12 ", "<|im_end|>"])
def test_tokenizing_and_back_gives_the_text(text: str, gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    tokens = json.loads(send(f"{gateway.url}/tokenize", {"prompt": text}).body)
    assert tokens["tokens"] == tokenizer.encode(text)
    assert tokens["count"] == len(tokens["tokens"])
    answer = send(f"{gateway.url}/detokenize", {"tokens": tokens["tokens"]})
    assert json.loads(answer.body)["prompt"] == tokenizer.decode(tokens["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**70], ["x"], "x", None])
def test_an_id_that_is_no_token_is_refused(tokens: object, gateway: GatewayProcess) -> None:
    answer = send(f"{gateway.url}/detokenize", {"tokens": tokens})
    assert answer.status == 400
    assert str(answer.error["param"]).startswith("tokens")


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_prompt_s_id_that_is_no_token_is_named(token: int, gateway: GatewayProcess) -> None:
    answer = post(gateway, TEXT, prompt=[1, token])
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert str(answer.error["message"]).startswith(f"token id {token}: the vocabulary has 0..")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "best_of",
        "chat_template_kwargs",
        "user",
        "tools",
        "role",
        "content",
        "tokens",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize"]), fields=st.dictionaries(FIELDS, JSON))
def test_no_body_makes_a_defect(path: str, fields: dict[str, object], gateway: GatewayProcess) -> None:
    """Nobody serves this mesh, so what is understood is refused with 503."""
    body = {"model": "default", "messages": MESSAGES, "prompt": "Hi", **fields}
    answer = send(gateway.url + path, body)
    assert answer.status in (200, 400, 404, 503), (answer.status, body)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "self"]), JSON))
def test_no_message_makes_a_defect(message: dict[str, object], gateway: GatewayProcess) -> None:
    answer = post(gateway, CHAT, messages=[{"role": "user", "content": "Hi", **message}])
    assert answer.status in (400, 503), (answer.status, message)


def test_a_page_elsewhere_may_not_send_untyped_bytes(gateway: GatewayProcess) -> None:
    body = json.dumps({"model": "default", "prompt": "Hi"}).encode()
    typed = {"content-type": "application/json", "origin": "http://evil.example"}
    assert send(gateway.url + "/tokenize", body, typed).status == 200
    untyped = {"content-type": "", "origin": "http://evil.example"}
    assert send(gateway.url + "/tokenize", body, untyped).status == 415
