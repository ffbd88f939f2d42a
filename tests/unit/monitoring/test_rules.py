"""Alert rules and scrape settings: they name what exists, say what to do, and each has a test of its own."""

from __future__ import annotations

import re

import pytest

from tests.support.monitoring import (
    PROMETHEUS,
    RULE_TESTS,
    RULES,
    Look,
    Rule,
    exported_names,
    known_names,
    looks,
    read_yaml,
    rules,
)
from tests.support.promql import named

ALERTS = [rule for rule in rules() if rule.is_alert]
LOOKS = looks()
TARGET_LABELS = {"job", "instance", "service"}
"""Those that Prometheus gives to every series, by prometheus.yml."""


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_names_metrics_that_exist(rule: Rule) -> None:
    selectors = named(rule.expression).selectors
    assert selectors
    assert {each.name for each in selectors} <= known_names()


def test_a_misspelt_metric_is_found() -> None:
    (selector,) = named("rate(prefixcache_request_total[5m])").selectors
    assert selector.name not in known_names()
    assert "prefixcache_requests_total" in exported_names()


def test_names_are_given_once() -> None:
    names = [rule.name for rule in rules()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_an_alert_says_what_is_the_case_and_what_to_do(rule: Rule) -> None:
    assert rule.severity in ("critical", "warning")
    assert set(rule.annotations) == {"summary", "action"}
    for text in rule.annotations.values():
        assert len(text) > 20 and re.search(r"[.?]$", text), text


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_an_annotation_names_only_labels_that_are_left(rule: Rule) -> None:
    """A sum without `by` has none: the text would have a hole."""
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.annotations.values())))
    if re.match(r"\(*(sum|max|count|histogram_quantile|absent)\b", rule.expression.strip()):
        assert told <= named(rule.expression).labels


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_an_alert_fires_in_a_test_that_holds_what_it_says(rule: Rule) -> None:
    """promtool compares all of it; here: that there is something to compare, and no hole where a label is missing."""
    fired = [each for look in LOOKS if look.alert == rule.name for each in look.fires]
    assert fired
    for each in fired:
        assert each["exp_labels"]["severity"] == rule.severity
        assert set(each["exp_annotations"]) == set(rule.annotations)
        for key, text in rule.annotations.items():
            parts = re.split(r"{{.*?}}", text)
            said = re.fullmatch(r"(\S+(?: \S+)*)".join(map(re.escape, parts)), each["exp_annotations"][key])
            assert said and not {"", "<no value>", "NaN"} & set(said.groups())


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_an_alert_does_not_fire_in_a_test_that_gives_it_something_to_judge(rule: Rule) -> None:
    judged = {selector.name for selector in named(rule.expression).selectors}
    quiet = [look for look in LOOKS if look.alert == rule.name and not look.fires]
    assert any(judged & look.given for look in quiet)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.alert)
def test_wherever_one_alert_is_looked_at_all_others_are(look: Look) -> None:
    assert look.firing is not None, "the test does not ask what else fires then"
    assert (look.alert in look.firing) == bool(look.fires)


def test_every_alert_of_the_tests_exists() -> None:
    assert {look.alert for look in LOOKS} == {rule.name for rule in ALERTS}
    for path in RULE_TESTS:
        assert read_yaml(path)["rule_files"] == [f"../{RULES.name}"]


def test_what_is_scraped_are_services_on_their_ports() -> None:
    config = read_yaml(PROMETHEUS)
    assert config["rule_files"] == [RULES.name]
    found = {
        name: discovery["port"]
        for job in config["scrape_configs"]
        for discovery in job.get("dns_sd_configs", [])
        for name in discovery["names"]
    }
    assert found == {
        "proxy": 8000,
        "proxy-engine": 8000,
        "worker": 7001,
        "worker-gpu": 7001,
        "vllm": 8000,
        "edge": 9145,
        "edge-engine": 9145,
    }


def test_jobs_that_rules_ask_for_are_scraped() -> None:
    jobs = {job["job_name"] for job in read_yaml(PROMETHEUS)["scrape_configs"]}
    for rule in rules():
        for selector in named(rule.expression).selectors:
            for matcher in selector.matchers:
                if matcher.label == "job":
                    assert set(matcher.value.split("|")) <= jobs
