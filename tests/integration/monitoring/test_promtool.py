"""promtool on what deploy/monitoring holds: settings, rules, the rules' own tests, and every query of the dashboard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from tests.support.monitoring import MONITORING, PROMETHEUS, RULE_TESTS, RULES, dashboard_expressions
from tests.support.prometheus import missing

TIMEOUT_S = 120.0

pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", PROMETHEUS.name),
        ("check", "rules", RULES.name),
        *(("test", "rules", f"tests/{each.name}") for each in RULE_TESTS),
    ],
    ids=" ".join,
)
def test_is_what_prometheus_takes(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("right", "wrong"), [("> 0.85", "> 8.5"), ("of its maxmemory", "of it"), ("> 0.85", "> 0.84")])
def test_a_rule_that_is_wrong_fails_its_test(right: str, wrong: str, tmp_path: Path) -> None:
    """One that never fires, or too soon, or says something else: its tests are not green whatever it says."""
    rules = RULES.read_text(encoding="utf-8")
    assert rules.count(right) == 1
    (tmp_path / RULES.name).write_text(rules.replace(right, wrong), encoding="utf-8")
    [tests] = [each for each in RULE_TESTS if each.name == "redis.yml"]
    copy = tmp_path / "tests" / tests.name
    copy.parent.mkdir()
    copy.write_bytes(tests.read_bytes())
    done = promtool("test", "rules", str(copy))
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
