"""The fields of other projects' objects that the manifests use, as strictly as those would take them.

kubernetes-validate knows Kubernetes' own schemas only. Names and types are those of KEDA's ScaledObject
(keda.sh/v1alpha1) and the Prometheus operator's PodMonitor (monitoring.coreos.com/v1).
"""

from typing import Any, Literal

import msgspec


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A misspelt key is refused instead of ignored."""


class ScalingPolicy(Strict):
    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: int


class ScalingRules(Strict):
    stabilization_window_seconds: int
    policies: list[ScalingPolicy]


class Behavior(Strict):
    scale_up: ScalingRules
    scale_down: ScalingRules


class HorizontalPodAutoscaler(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontal_pod_autoscaler_config: HorizontalPodAutoscaler


class PrometheusQuery(Strict):
    """KEDA takes texts only."""

    server_address: str
    query: str
    threshold: str
    ignore_null_values: Literal["true", "false"]


class Trigger(Strict):
    type: Literal["prometheus"]
    name: str
    metadata: PrometheusQuery


class ScaleTarget(Strict):
    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    name: str


class ScaledObject(Strict):
    scale_target_ref: ScaleTarget
    min_replica_count: int
    max_replica_count: int
    polling_interval: int
    advanced: Advanced
    triggers: list[Trigger]


class LabelSelector(Strict):
    match_labels: dict[str, str]


class Relabeling(Strict):
    """``action`` replace needs a ``target_label``, drop a ``regex`` of the whole value."""

    source_labels: list[str]
    target_label: str | None = None
    regex: str | None = None
    action: Literal["replace", "drop"] = "replace"


class PodEndpoint(Strict):
    port: str
    path: str
    interval: str
    scrape_timeout: str
    relabelings: list[Relabeling]


class PodMonitor(Strict):
    selector: LabelSelector
    pod_metrics_endpoints: list[PodEndpoint]


def scaled_object(manifest: dict[str, Any]) -> ScaledObject:
    """Raises msgspec.ValidationError naming what KEDA would not know."""
    assert manifest["apiVersion"] == "keda.sh/v1alpha1"
    return msgspec.convert(manifest["spec"], ScaledObject)


def pod_monitor(manifest: dict[str, Any]) -> PodMonitor:
    """Raises msgspec.ValidationError naming what the Prometheus operator would not know."""
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    return msgspec.convert(manifest["spec"], PodMonitor)
