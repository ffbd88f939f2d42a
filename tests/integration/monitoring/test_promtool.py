"""promtool on what deploy/monitoring holds: settings, rules, the rules' own tests, and every query of the dashboard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from tests.support.monitoring import MONITORING, PROMETHEUS, RULE_TESTS, RULES, dashboard_expressions, read_yaml
from tests.support.prometheus import missing

TIMEOUT_S = 120.0

pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", PROMETHEUS.name), ("check", "rules", RULES.name), ("test", "rules", RULE_TESTS.name)],
    ids=" ".join,
)
def test_is_what_prometheus_takes(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_never_fires_fails_its_test(tmp_path: Path) -> None:
    """The tests of the rules are not green whatever the rules say."""
    (tmp_path / RULES.name).write_text(RULES.read_text(encoding="utf-8").replace("> 0.85", "> 8.5"), encoding="utf-8")
    tests = read_yaml(RULE_TESTS)
    tests["tests"] = [each for each in tests["tests"] if "RedisAlmostFull" in str(each)]
    (tmp_path / RULE_TESTS.name).write_text(yaml.safe_dump(tests), encoding="utf-8")
    done = promtool("test", "rules", str(tmp_path / RULE_TESTS.name))
    assert done.returncode != 0 and "RedisAlmostFull" in done.stdout + done.stderr


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    """As rules, for promtool parses no other expressions without a server."""
    expressions = dashboard_expressions()
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(expressions)} rules found" in done.stdout
