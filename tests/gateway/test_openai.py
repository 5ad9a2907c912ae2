"""The fields that clients send, as they are understood."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.openai import ChatRequest, CompletionRequest, tell_error


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"model": "default", "messages": messages, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "default", "prompt": "Hi", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_one_or_several_of_either_kind(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, [1, "a"], [["a"]], [1.5], [True], {"a": 1}])
def test_a_prompt_of_another_kind_is_refused(prompt: object) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


@pytest.mark.parametrize(("stop", "strings"), [(None, []), ("END", ["END"]), (["a", "b"], ["a", "b"])])
def test_stop_strings_are_one_or_several(stop: object, strings: list[str]) -> None:
    assert chat(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 7}, 7)],
)
def test_the_newer_name_of_the_token_limit_wins(fields: dict[str, Any], limit: int | None) -> None:
    assert chat(**fields).token_limit == limit


def test_a_completion_without_a_limit_has_openais_sixteen_tokens() -> None:
    assert completion().token_limit == 16


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
    ],
)
def test_chat_logprobs_are_asked_for_by_two_fields(fields: dict[str, Any], reported: int | None) -> None:
    assert chat(**fields).reported_logprobs == reported


def test_content_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).messages
    assert message.as_template_input()["content"] == "Hello there"


def test_what_a_message_carries_besides_reaches_the_template() -> None:
    (message,) = chat(messages=[{"role": "tool", "content": "42", "tool_call_id": "x"}]).messages
    assert message.as_template_input() == {"role": "tool", "content": "42", "tool_call_id": "x"}


def test_unknown_fields_are_ignored_and_named() -> None:
    assert chat(tools=[], store=True, user="anna", temperature=1).ignored == ["store", "tools"]


def test_tools_that_are_not_to_be_called_are_ignored_and_named() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert chat(tools=tools, tool_choice="none").ignored == ["tool_choice", "tools"]
    functions = chat(functions=[{"name": "look"}], function_call="none", modalities=["text"])
    assert functions.ignored == ["function_call", "functions", "modalities"]


@pytest.mark.parametrize("role", ["assistant", "function"])
def test_who_called_or_was_called_may_have_said_nothing(role: str) -> None:
    messages = [{"role": role, "content": None, "name": "look"}]
    (message,) = chat(messages=messages).messages
    assert message.as_template_input() == {"role": role, "content": "", "name": "look"}


def test_a_field_sent_as_null_is_a_field_not_sent() -> None:
    names = ("stream", "n", "logprobs", "min_tokens", "ignore_eos", "skip_special_tokens", "stop", "seed")
    assert chat(**dict.fromkeys(names)) == chat()
    assert completion(**dict.fromkeys((*names, "echo"))) == completion()
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert not chat(stream=True, stream_options=options).wants_usage


@pytest.mark.parametrize("body", [[], None, "chat", 5])
def test_a_body_that_is_no_object_is_told_so_without_a_name_of_ours(body: object) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(body)
    assert tell_error(refused.value.errors()) == (None, "should be a JSON object")
    messages = ["Hi"]
    with pytest.raises(ValidationError) as refused:
        chat(messages=messages)
    assert tell_error(refused.value.errors()) == ("messages.0", "should be a JSON object")
