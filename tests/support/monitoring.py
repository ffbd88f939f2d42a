"""The files of deploy/monitoring as data, and every expression in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its types are a package of their own
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from edge.metrics import EdgeMetrics
from prefixcache.metrics import ProxyMetrics, WorkerMetrics
from tests.support.promql import named

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "alerts.yml"
RULE_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
PROMETHEUS = MONITORING / "prometheus.yml"
PROVISIONING = MONITORING / "grafana" / "provisioning"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "prefixcache.json"

_SAMPLES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
    "info": ("_info",),
}
OF_PROMETHEUS = {"up", "ALERTS"}
FIRING = 'ALERTS{alertstate="firing"}'


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alert, or one recorded series."""

    name: str
    expression: str
    is_alert: bool
    severity: str
    annotations: Mapping[str, str]


def rules() -> Sequence[Rule]:
    return [
        Rule(
            name=rule.get("alert") or rule["record"],
            expression=rule["expr"],
            is_alert="alert" in rule,
            severity=rule.get("labels", {}).get("severity", ""),
            annotations=rule.get("annotations", {}),
        )
        for group in read_yaml(RULES)["groups"]
        for rule in group["rules"]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At one alert, at one moment of a test of the rules."""

    alert: str
    fires: Sequence[Any]
    """Each with `exp_labels` and `exp_annotations`."""
    given: frozenset[str]
    """Metrics of which the test has series."""
    firing: frozenset[str] | None
    """All alerts that fire at that moment, by the test's query for them; None if it has none."""


def looks() -> Sequence[Look]:
    """Of all tests of the rules."""
    return [look for path in RULE_TESTS for group in read_yaml(path)["tests"] for look in _looks_of(group)]


def _looks_of(group: Any) -> Iterator[Look]:
    given = frozenset(selector.name for each in group["input_series"] for selector in named(each["series"]).selectors)
    firing = {
        query["eval_time"]: frozenset(re.findall(r'alertname="(\w+)"', str(query["exp_samples"])))
        for query in group["promql_expr_test"]
        if query["expr"] == FIRING
    }
    for look in group.get("alert_rule_test", []):
        yield Look(
            alert=look["alertname"],
            fires=look["exp_alerts"],
            given=given,
            firing=firing.get(look["eval_time"]),
        )


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> Sequence[Any]:
    """Those that show something; rows are left out."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def plain(expression: str) -> str:
    """With values in the place of Grafana's variables, as Grafana puts them there."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def dashboard_expressions() -> Sequence[str]:
    """Of all panels and annotations."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [plain(each) for each in (*shown, *(mark["expr"] for mark in dashboard()["annotations"]["list"]))]


def exported_names() -> set[str]:
    """Of every sample that a proxy, a worker or the edge can export."""
    of_edge = EdgeMetrics(num_known=0, num_ready=0, num_lost=0, num_reloads=0, looked_at=0.0).text
    return {
        *_sample_names(ProxyMetrics().registry),
        *_sample_names(WorkerMetrics().registry),
        *(sample.name for family in text_string_to_metric_families(of_edge) for sample in family.samples),
    }


def known_names() -> set[str]:
    """What an expression may name."""
    return exported_names() | OF_PROMETHEUS | {rule.name for rule in rules() if not rule.is_alert}


def _sample_names(registry: CollectorRegistry) -> set[str]:
    return {family.name + ending for family in registry.collect() for ending in _SAMPLES[family.type]}
