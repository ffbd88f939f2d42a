"""What is read out of an expression."""

from __future__ import annotations

import pytest

from tests.support.promql import Matcher, Named, Selector, named


def test_a_bare_name() -> None:
    assert named("up") == Named(selectors=(Selector(name="up"),), labels=frozenset())


def test_matchers_are_read_with_their_operators() -> None:
    (selector,) = named('rate(a_total{code=~"5..|4\\"", job!="x"}[5m] offset 20m)').selectors
    assert selector.name == "a_total"
    assert selector.matchers == (
        Matcher(label="code", operator="=~", value='5..|4"'),
        Matcher(label="job", operator="!=", value="x"),
    )


def test_functions_words_numbers_and_labels_are_no_metrics() -> None:
    found = named(
        "histogram_quantile(0.95, sum by (le, model) (rate(a_bucket[5m]))) > 10 "
        "and on (model) sum(b) unless on () c * on (instance) group_left (worker) rec:d:rate10m < bool 1e3"
    )
    assert [each.name for each in found.selectors] == ["a_bucket", "b", "c", "rec:d:rate10m"]
    assert found.labels == {"le", "model", "instance", "worker"}


def test_a_selector_without_a_name() -> None:
    (selector,) = named('count({__name__=~"a|b", x=""})').selectors
    assert selector.name == ""
    assert [each.label for each in selector.matchers] == ["__name__", "x"]
    assert str(selector) == '{__name__=~"a|b", x=""}'


def test_what_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="no PromQL"):
        named("a ; b")
