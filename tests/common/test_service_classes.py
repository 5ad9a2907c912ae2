"""Which class of service a request has, by what it asks for."""

import pytest

from common.config import Config, ObjectivesConfig
from common.errors import InvalidRequest
from common.service_classes import asked_class, service_classes_of

CLASSES = service_classes_of(Config())


@pytest.mark.parametrize(
    ("header", "tier", "expected"),
    [
        (None, None, "default"),
        (None, "auto", "default"),
        (None, "default", "default"),
        (None, "scale", "default"),
        (None, "priority", "interactive"),
        (None, "flex", "batch"),
        (None, "batch", "batch"),
        ("interactive", None, "interactive"),
        ("interactive", "flex", "interactive"),
    ],
)
def test_a_class_is_named_by_the_header_or_else_by_the_tier(
    header: str | None, tier: str | None, expected: str
) -> None:
    assert asked_class(CLASSES, header, tier) == expected


def test_a_word_of_openais_means_the_default_class_where_its_own_is_not_configured() -> None:
    classes = {"default": ObjectivesConfig(), "gold": ObjectivesConfig()}
    assert asked_class(classes, None, "priority") == "default"
    assert asked_class({**classes, "flex": ObjectivesConfig()}, None, "flex") == "flex"


@pytest.mark.parametrize(
    ("header", "tier", "param"), [("gold", None, "x-lamella-class"), (None, "gold", "service_tier")]
)
def test_an_unknown_class_is_refused_with_those_that_are_there(
    header: str | None, tier: str | None, param: str
) -> None:
    with pytest.raises(InvalidRequest, match="there are default, interactive, batch") as refused:
        asked_class(CLASSES, header, tier)
    assert refused.value.param == param
