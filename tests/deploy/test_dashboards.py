"""Dashboards and alerts as files: what Grafana and Prometheus would refuse, and what a reader would miss."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.queries import (
    DASHBOARDS,
    ROOT,
    Query,
    all_queries,
    dashboard_queries,
    read_by,
    rule_queries,
)

CONCERNS = {"overview", "latency", "capacity", "transfer", "reliability"}
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def loaded(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_there_is_one_dashboard_for_each_concern_under_a_name_of_its_own() -> None:
    assert {file.stem for file in DASHBOARDS} == CONCERNS
    found = [loaded(file) for file in DASHBOARDS]
    assert {each["uid"] for each in found} == {f"lamella-{concern}" for concern in CONCERNS}
    assert all(each["description"] and each["title"].startswith("lamella: ") for each in found)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_have_room_and_do_not_cover_each_other(file: Path) -> None:
    panels = loaded(file)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= COLUMNS
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_whoever_imports_a_dashboard_chooses_its_data_source(file: Path) -> None:
    panels = [panel for panel in loaded(file)["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"] == DATASOURCE for panel in panels)
    assert all(target["datasource"] == DATASOURCE for panel in panels for target in panel["targets"])


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_query_keeps_to_the_chosen_mesh_and_to_variables_that_exist(file: Path) -> None:
    declared = {variable["name"] for variable in loaded(file)["templating"]["list"]}
    for query in dashboard_queries(file):
        for selector in read_by(query.parse()).selectors:
            matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            used = {value[1:] for value in matchers.values() if value.startswith("$")}
            assert used <= declared, query
            is_choice = query.where.endswith(("$job", "$model_name"))
            assert matchers.get("job") == "$job" or is_choice, query


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_is_of_the_meshes_that_serve_the_chosen_model(file: Path) -> None:
    """By their jobs, which every query keeps to: most series have no label of a model."""
    chosen = {each["name"]: each for each in loaded(file)["templating"]["list"]}
    assert list(chosen)[:3] == ["datasource", "model_name", "job"]
    assert chosen["job"]["definition"] == 'label_values(lamella_model_info{model_name=~"$model_name"}, job)'
    assert "allValue" not in chosen["job"], "all of them are those of the model"


@pytest.mark.parametrize("query", all_queries(), ids=lambda query: query.where)
def test_every_query_is_promql_that_asks_for_something(query: Query) -> None:
    assert read_by(query.parse()).selectors


def test_alerts_say_what_happened_and_what_to_do() -> None:
    file = ROOT / "deploy" / "prometheus" / "rules.yml"
    names = [query.where for query in rule_queries(file)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("rules.yml: Lamella") for name in names)
