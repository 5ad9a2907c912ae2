"""Classes of service: what each promises (``[objectives]``, ``[service_classes.NAME]``), and which one a
request asks for.

The class ``default`` is there always. A request names its class in the header ``x-lamella-class``, or in
OpenAI's field ``service_tier``, by its name or by a word of OpenAI's; an operator's proxy may set the header,
so the header decides. Classes are few and configured: they are labels of metrics.
"""

from collections.abc import Mapping

from common.config import Config, ObjectivesConfig
from common.errors import InvalidRequest
from common.latency import ServiceObjectives

DEFAULT_CLASS = "default"
CLASS_HEADER = "x-lamella-class"
PROBE_HEADER = "x-lamella-probe"
"""Of a request by which an operator sees whether the mesh serves: what was promised is not judged by it."""
TIERS = {"auto": DEFAULT_CLASS, "scale": DEFAULT_CLASS, "priority": "interactive", "flex": "batch"}
"""OpenAI's words, and the class that each means where one is configured; else it is the default one."""
MEANT_BY = {meant: word for word, meant in TIERS.items() if meant != DEFAULT_CLASS}
"""OpenAI's words for classes, in which an answer tells how it was served."""

ServiceClasses = Mapping[str, ObjectivesConfig]


def service_classes_of(config: Config) -> dict[str, ObjectivesConfig]:
    """All of them by name, the default one first."""
    return {DEFAULT_CLASS: config.objectives, **config.service_classes}


def objectives_of(service_class: ObjectivesConfig) -> ServiceObjectives:
    return ServiceObjectives(
        ttft_s=service_class.ttft_s, tpot_s=service_class.tpot_s, end_to_end_s=service_class.end_to_end_s
    )


def asked_class(classes: ServiceClasses, header: str | None, tier: str | None) -> str:
    """The name of the class. Raises InvalidRequest naming those that are there."""
    if header is not None:
        if header not in classes:
            raise InvalidRequest(f"{header!r} is no class of service: {_named(classes)}", param=CLASS_HEADER)
        return header
    if tier is None or tier in classes:
        return tier or DEFAULT_CLASS
    if tier not in TIERS:
        words = ", ".join(TIERS)
        raise InvalidRequest(
            f"{tier!r} is no class of service: {_named(classes)}; nor is it {words}", param="service_tier"
        )
    meant = TIERS[tier]
    return meant if meant in classes else DEFAULT_CLASS


def tier_of(service_class: str) -> str:
    """What an answer's ``service_tier`` says: the class, which may be another one than was asked for."""
    return MEANT_BY.get(service_class, service_class)


def _named(classes: ServiceClasses) -> str:
    return f"there are {', '.join(classes)}"
