"""Settings samples name what exists, with values that are taken; containers are hardened and are let end in time."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from unittest.mock import patch

import click
import pytest

import proxy.__main__
import worker.__main__
from prefixcache.cli.up import up
from prefixcache.limits import (
    CLOSE_TIMEOUT_S,
    DRAIN_TIMEOUT_S,
    EDGE_LOOK_S,
    EDGE_READY_TIMEOUT_S,
    ENGINE_STOP_TIMEOUT_S,
    INDEX_WRITE_TIMEOUT_S,
    PROBE_ANSWER_S,
    PROBE_TIMEOUT_S,
    SELF_ANSWER_WAIT_S,
)
from tests.support.compose_file import seconds, services, variables

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "deploy" / "prefixcache.toml"
ENVIRONMENT = ROOT / ".env.example"
README = ROOT / "deploy" / "README.md"
PROGRAMS = {"proxy": proxy.__main__.main, "worker": worker.__main__.main, "up": up}
SERVICES = services()
OURS = ("worker", "proxy", "edge", "worker-gpu", "proxy-engine", "edge-engine")
EDGES = {"edge": "proxy", "edge-engine": "proxy-engine"}
"""And whom each of them stands before."""
STOCK_ROOT = ("vllm",)
"""Whose image is stock and runs as root in a root that it writes to."""


def test_has_a_table_for_every_program_and_no_other() -> None:
    assert set(tomllib.loads(SAMPLE.read_text())) == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_setting_is_taken(program: click.Command) -> None:
    taken: dict[str, object] = {}

    def remember(**settings: object) -> None:
        taken.update(settings)

    with patch.object(program, "callback", remember):
        program.main(["--config", str(SAMPLE)], standalone_mode=False)
    wanted = tomllib.loads(SAMPLE.read_text())[str(program.name)]
    values = {str(value) for value in taken.values()}
    assert {str(value) for value in wanted.values()} <= values


# --- .env.example ---------------------------------------------------------------------------------------------------


def explained() -> dict[str, str]:
    """Variables of the sample, each a comment line that can be uncommented, with their values."""
    return dict(re.findall(r"^#? ?([A-Z_]+)=(.*)$", ENVIRONMENT.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_sample_names_every_variable_of_the_compose_file_and_no_other() -> None:
    assert set(explained()) == set(variables())


def test_the_sample_shows_the_defaults() -> None:
    defaults = variables()
    assert {name for name, values in defaults.items() if len(values) > 1} == set(), "one default each"
    assert {name: {value} for name, value in explained().items()} == defaults


def test_every_variable_is_explained_above_it() -> None:
    for name in explained():
        (before,) = re.findall(rf"^(.*)\n#? ?{name}=", ENVIRONMENT.read_text(encoding="utf-8"), re.MULTILINE)
        assert re.match(r"# [A-Za-z0-9\"'(].{10,}", before) or "=" in before, f"nothing stands above {name}"


# --- the services ---------------------------------------------------------------------------------------------------


def test_every_container_is_hardened_and_bounded() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is (name not in STOCK_ROOT), name
        assert service["restart"] == "unless-stopped" and service["init"] is True, name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        limits = service["deploy"]["resources"]["limits"]
        assert re.fullmatch(r"\d+[mg]", str(limits["memory"])) and int(limits["pids"]) > 0, name
        assert "ulimits" not in service and "privileged" not in service, name


def test_only_edges_and_panels_are_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {*EDGES, "prometheus", "grafana"}
    for ports in published.values():
        assert len(ports) == 1 and re.fullmatch(r"127\.0\.0\.1:\d+:\d+", ports[0])


def test_every_edge_holds_the_same_keys_before_proxies_of_its_own() -> None:
    for name, before in EDGES.items():
        environment = dict(SERVICES[name]["environment"])
        assert environment.pop("EDGE_PROXIES") == f"{before}:8000"
        assert {"API_KEYS", "API_KEYS_FILE"} <= set(environment)
        assert environment["EDGE_PUBLISHED"] == SERVICES[name]["ports"][0].partition(":")[0]
        for key in ("image", "volumes", "tmpfs", "sysctls", "deploy", "healthcheck"):
            assert SERVICES[name][key] == SERVICES["edge"][key], (name, key)
        others = {key: value for key, value in SERVICES["edge"]["environment"].items() if key != "EDGE_PROXIES"}
        assert environment == others, name


def test_a_file_of_keys_that_is_missing_is_not_made_a_folder() -> None:
    (mounted,) = SERVICES["edge"]["volumes"]
    assert mounted["target"] == SERVICES["edge"]["environment"]["API_KEYS_FILE"]
    assert mounted["read_only"] and mounted["bind"] == {"create_host_path": False}


def test_services_start_after_redis_and_wait_for_no_model() -> None:
    def needs(name: str) -> dict[str, str]:
        return {other: how["condition"] for other, how in SERVICES[name]["depends_on"].items()}

    assert "depends_on" not in SERVICES["redis"]
    assert needs("worker") == needs("worker-gpu") == {"redis": "service_healthy"}
    assert needs("proxy") == {"redis": "service_healthy", "worker": "service_started"}
    assert {name: needs(name) for name in EDGES} == {name: {other: "service_started"} for name, other in EDGES.items()}
    assert needs("proxy-engine") == {"redis": "service_healthy", "vllm": "service_started"}


def test_every_check_has_the_time_that_it_takes() -> None:
    for name in OURS:
        check = SERVICES[name]["healthcheck"]
        assert check["test"][:5] in (
            ["CMD", "python", "-P", "-m", "prefixcache.probe"],
            ["CMD", "python3", "-P", "-m", "prefixcache.probe"],
        )
        assert seconds(check["timeout"]) > max(PROBE_ANSWER_S + PROBE_TIMEOUT_S, SELF_ANSWER_WAIT_S)
        assert seconds(check["start_period"]) >= 600
    assert SELF_ANSWER_WAIT_S < PROBE_TIMEOUT_S


def test_a_check_keeps_its_answer_where_no_body_and_no_program_can_fill_the_room() -> None:
    """A full /tmp would make each check ask for a token."""
    asking = {name: SERVICES[name] for name in OURS if "proxy" in SERVICES[name]["healthcheck"]["test"]}
    assert {"proxy", "edge", "proxy-engine"} <= set(asking)
    for service in asking.values():
        folder = service["healthcheck"]["test"][7]
        assert folder in {mount.partition(":")[0] for mount in service["tmpfs"]} - {"/tmp"}


def test_every_program_has_the_time_that_it_takes_to_leave() -> None:
    last_words_s = ENGINE_STOP_TIMEOUT_S + CLOSE_TIMEOUT_S + 3 * INDEX_WRITE_TIMEOUT_S
    for name in OURS:
        service = SERVICES[name]
        delay_s = float(service["environment"].get("PREFIXCACHE_DRAIN_DELAY", 0))
        assert "PREFIXCACHE_DRAIN_TIMEOUT" not in service["environment"], "the default"
        assert seconds(service["stop_grace_period"]) >= DRAIN_TIMEOUT_S + delay_s + last_words_s
        if name.startswith("proxy"):
            assert delay_s >= EDGE_LOOK_S + EDGE_READY_TIMEOUT_S, "the edge has looked before anybody is refused"


def test_redis_keeps_nothing_and_evicts_nothing() -> None:
    words = " ".join(map(str, SERVICES["redis"]["command"]))
    assert "--appendonly no" in words and "--maxmemory-policy noeviction" in words and "--save  " in words


def test_no_secret_has_a_value_in_a_file() -> None:
    for name, values in variables().items():
        if re.search("SECRET|TOKEN|API_KEYS$|PASSWORD", name):
            assert values <= {"", "admin"}, name
