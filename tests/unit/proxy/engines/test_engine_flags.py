"""How the operator sets what concerns engines: by flag, environment or file, each told in --help."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import proxy.__main__
from prefixcache.limits import CONNECT_TIMEOUT_S, ENGINE_GAP_S
from proxy.config import ProxySettings
from proxy.engines.engine_settings import EngineSettings
from proxy.engines.http_pool import EngineTimeouts

ENGINE = ["--engine", "http://h:1"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ProxySettings]:
    """What the program would have run with."""
    settings: list[ProxySettings] = []

    async def remember(given: ProxySettings) -> None:
        settings.append(given)

    monkeypatch.setattr(proxy.__main__, "run", remember)
    return settings


def _engines(taken: list[ProxySettings], *arguments: str, **environment: str) -> EngineSettings:
    done = CliRunner().invoke(proxy.__main__.main, [*ENGINE, *arguments], env=environment)
    assert done.exit_code == 0, done.output
    return taken[-1].engines


def test_defaults(taken: list[ProxySettings]) -> None:
    engines = _engines(taken)
    assert engines.timeouts == EngineTimeouts()
    assert (engines.timeouts.connect_s, engines.timeouts.first_byte_s) == (CONNECT_TIMEOUT_S, None)
    assert (engines.timeouts.gap_s, engines.passed_headers) == (ENGINE_GAP_S, frozenset())


def test_flags_environment_and_file(taken: list[ProxySettings], tmp_path: Path) -> None:
    wanted = EngineTimeouts(connect_s=1.5, first_byte_s=90.0, gap_s=20.0)
    flags = ["--engine-connect-timeout", "1.5", "--engine-first-byte-timeout", "90", "--engine-idle-timeout", "20"]
    assert _engines(taken, *flags).timeouts == wanted
    environment = {
        "PREFIXCACHE_ENGINE_CONNECT_TIMEOUT": "1.5",
        "PREFIXCACHE_ENGINE_FIRST_BYTE_TIMEOUT": "90",
        "PREFIXCACHE_ENGINE_IDLE_TIMEOUT": "20",
        "PREFIXCACHE_ENGINE_PASS_HEADER": "X-Tenant X-Trace",
    }
    engines = _engines(taken, **environment)
    assert engines.timeouts == wanted and engines.passed_headers == {b"x-tenant", b"x-trace"}
    file = tmp_path / "settings.toml"
    file.write_text(
        "[proxy]\nengine-connect-timeout = 1.5\nengine-first-byte-timeout = 90\nengine-idle-timeout = 20\n"
        'engine-pass-header = ["X-Tenant"]\n'
    )
    engines = _engines(taken, "--config", str(file))
    assert engines.timeouts == wanted and engines.passed_headers == {b"x-tenant"}


def test_zero_is_no_limit(taken: list[ProxySettings]) -> None:
    timeouts = _engines(taken, "--engine-first-byte-timeout", "0", "--engine-idle-timeout", "0").timeouts
    assert (timeouts.first_byte_s, timeouts.gap_s) == (None, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engine-connect-timeout", "0"],
        ["--engine-connect-timeout", "nan"],
        ["--engine-connect-timeout", "inf"],
        ["--engine-idle-timeout", "-1"],
        ["--engine-idle-timeout", "nan"],
        ["--engine-first-byte-timeout", "nan"],
        ["--engine-first-byte-timeout", "inf"],
        ["--engine-first-byte-timeout", "soon"],
        ["--engine-pass-header", "Host"],
        ["--engine-pass-header", "X-Tenant: a"],
    ],
)
def test_wrong_ones(taken: list[ProxySettings], arguments: list[str]) -> None:
    done = CliRunner().invoke(proxy.__main__.main, [*ENGINE, *arguments])
    assert done.exit_code == 2 and taken == []


def test_help_tells_units_and_defaults() -> None:
    text = " ".join(CliRunner().invoke(proxy.__main__.main, ["--help"]).output.split())
    for name, default in (("connect", "5.0"), ("first-byte", "(0, no limit)"), ("idle", "300.0")):
        _, _, told = text.partition(f"--engine-{name}-timeout SECONDS")
        assert told.partition("default: ")[2].startswith(default)
