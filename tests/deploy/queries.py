"""Every PromQL query of the files in ``deploy/``: of dashboards, of alerts, of Kubernetes' scalers."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = tuple(sorted((ROOT / "deploy" / "grafana").glob("*.json")))
RULES = tuple(sorted((ROOT / "deploy" / "prometheus").glob("rules*.yml")))
KUBERNETES = tuple(sorted((ROOT / "deploy" / "kubernetes").rglob("*.y*ml")))
LABEL_VALUES = re.compile(r"label_values\((?P<expr>.+),\s*(?P<label>\w+)\)")
INTERVAL = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """``where``: the file and what asks within it. ``shown``: labels of the result that are read.
    ``is_of_pods``: asked where the targets are Kubernetes' pods, whose labels every series has."""

    where: str
    expr: str
    shown: frozenset[str] = frozenset()
    is_of_pods: bool = False

    def parse(self) -> promql_parser.Expr:
        """Raises ValueError for what is no PromQL."""
        expr: promql_parser.Expr = promql_parser.parse(self.expr.replace(INTERVAL, "5m"))
        return expr


@dataclass(frozen=True, slots=True)
class Read:
    """What a query asks for: its selectors, and the labels by which it groups and joins."""

    selectors: tuple[promql_parser.VectorSelector, ...]
    labels: frozenset[str]


def all_queries() -> list[Query]:
    found = [query for file in DASHBOARDS for query in dashboard_queries(file)]
    found += [query for file in RULES for query in rule_queries(file)]
    return found + [query for file in KUBERNETES for query in scaler_queries(file)]


def dashboard_queries(file: Path) -> Iterator[Query]:
    dashboard: dict[str, Any] = json.loads(file.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            shown = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Query(f"{file.name}: {panel['title']}", target["expr"], shown)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = LABEL_VALUES.fullmatch(variable["definition"])
            assert found is not None, variable["definition"]
            yield Query(f"{file.name}: ${variable['name']}", found["expr"], frozenset((found["label"],)))


def rule_queries(file: Path) -> Iterator[Query]:
    for group in yaml.safe_load(file.read_text())["groups"]:
        for rule in group["rules"]:
            texts = " ".join(rule["annotations"].values())
            shown = frozenset(re.findall(r"\$labels\.(\w+)", texts))
            yield Query(f"{file.name}: {rule['alert']}", rule["expr"], shown)


def scaler_queries(file: Path) -> Iterator[Query]:
    """KEDA's triggers on Prometheus, and the metrics of pods by which the autoscaler itself scales."""
    for document in yaml.safe_load_all(file.read_text()):
        if not isinstance(document, dict):
            continue
        spec = document.get("spec") or {}
        name = f"{file.name}: {(document.get('metadata') or {}).get('name')}"
        match document.get("kind"):
            case "ScaledObject":
                for trigger in spec["triggers"]:
                    if trigger["type"] == "prometheus":
                        yield Query(name, trigger["metadata"]["query"], is_of_pods=True)
            case "HorizontalPodAutoscaler":
                for metric in spec.get("metrics", ()):
                    if metric["type"] == "Pods":
                        yield Query(name, metric["pods"]["metric"]["name"], is_of_pods=True)


def read_by(expr: promql_parser.Expr) -> Read:
    selectors: list[promql_parser.VectorSelector] = []
    labels: set[str] = set()

    def look(node: promql_parser.Expr) -> None:
        match node:
            case promql_parser.VectorSelector():
                selectors.append(node)
            case promql_parser.AggregateExpr() if node.modifier is not None:
                labels.update(node.modifier.labels)
            case promql_parser.BinaryExpr() if node.modifier is not None:
                if node.modifier.matching is not None:
                    labels.update(node.modifier.matching.labels)
                labels.update(node.modifier.group_labels or ())
            case _:
                pass

    promql_parser.walk(expr, look)
    return Read(tuple(selectors), frozenset(labels))


def selects(selector: promql_parser.VectorSelector, labels: dict[str, str]) -> bool:
    """Whether the matchers let such a series through; a dashboard's variable lets every one through."""
    for matcher in selector.matchers.matchers:
        if "$" in matcher.value:
            continue
        value = labels.get(matcher.name, "")
        match matcher.op:
            case promql_parser.MatchOp.Equal:
                is_let = value == matcher.value
            case promql_parser.MatchOp.NotEqual:
                is_let = value != matcher.value
            case promql_parser.MatchOp.Re:
                is_let = re.fullmatch(matcher.value, value) is not None
            case _:
                is_let = re.fullmatch(matcher.value, value) is None
        if not is_let:
            return False
    return True
