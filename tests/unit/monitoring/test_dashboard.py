"""The dashboard as Grafana reads it: its schema, a layout without overlaps, metrics that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.monitoring import DASHBOARD, PROVISIONING, dashboard, known_names, panels, plain, read_yaml
from tests.support.promql import named

COLUMNS = 24
TYPES = {"timeseries", "stat", "table", "row"}
UNITS = {"short", "s", "bytes", "percentunit", "reqps", "ops"}
GRAFANAS_OWN = {"__rate_interval"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANELS = [pytest.param(panel, id=panel["title"]) for panel in panels()]


def test_is_one_that_is_found_by_its_uid_and_read_only() -> None:
    top = dashboard()
    assert top["uid"] == "prefixcache" and top["title"]
    assert top["schemaVersion"] >= 39, "older ones are migrated each time they are shown"
    assert top["editable"] is False, "what is changed in the browser is lost: the file is the truth"
    assert "id" not in top, "Grafana gives it"
    assert top["time"] == {"from": "now-30m", "to": "now"}


def test_panels_have_an_id_a_title_and_a_type_that_every_grafana_has() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert {panel["type"] for panel in every} == TYPES
    titles = [panel["title"] for panel in every]
    assert all(titles) and len(set(titles)) == len(titles)


def test_panels_lie_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= COLUMNS and place["h"] > 0
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: Any) -> None:
    assert panel["description"].endswith(".")
    assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
    assert panel["fieldConfig"]["defaults"].get("unit", "short") in UNITS
    assert panel["datasource"] == DATASOURCE and panel["options"]
    assert [target["refId"] for target in panel["targets"]] == [chr(65 + n) for n in range(len(panel["targets"]))]
    for target in panel["targets"]:
        assert target["datasource"] == DATASOURCE and target["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_names_metrics_that_exist(panel: Any) -> None:
    known = known_names()
    for target in panel["targets"]:
        for selector in named(plain(target["expr"])).selectors:
            if selector.name:
                assert selector.name in known
            else:
                (pattern,) = [each.value for each in selector.matchers if each.label == "__name__"]
                assert sum(re.fullmatch(pattern, name) is not None for name in known) > 1


@pytest.mark.parametrize("panel", PANELS)
def test_a_legend_names_labels_that_are_left(panel: Any) -> None:
    for target in panel["targets"]:
        expression, told = plain(target["expr"]), set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        if re.match(r"\(*(sum|max|histogram_quantile)\b", expression):
            assert told <= named(expression).labels


def test_variables_are_defined_and_used() -> None:
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    text = DASHBOARD.read_text(encoding="utf-8")
    assert names == {"datasource", "model"}
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__all"} == names | GRAFANAS_OWN
    (model,) = [each for each in dashboard()["templating"]["list"] if each["name"] == "model"]
    (asked,) = [each.value for each in named(model["definition"]).selectors[0].matchers]
    assert {name for name in known_names() if re.fullmatch(asked, name)} == {
        "prefixcache_workers_ready",
        "prefixcache_requests_total",
    }


def test_rates_are_taken_over_what_the_scrape_interval_allows() -> None:
    """A fixed range below two scrapes shows nothing, and one far above them hides what happens."""
    for panel in panels():
        for target in panel["targets"]:
            assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= {"$__rate_interval", "5m", "10m"}


def test_grafana_is_told_where_both_are() -> None:
    (source,) = read_yaml(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["uid"], source["access"]) == ("prometheus", "prometheus", "proxy")
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (provider,) = read_yaml(PROVISIONING / "dashboards" / "prefixcache.yml")["providers"]
    assert provider["type"] == "file" and provider["options"]["path"] == "/etc/grafana/dashboards"
    (variable,) = [each for each in dashboard()["templating"]["list"] if each["name"] == "datasource"]
    assert variable["type"] == "datasource" and variable["query"] == source["type"]
