"""The sample settings file names only settings that exist, with values that they take; compose lets programs end."""

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
from prefixcache.limits import CLOSE_TIMEOUT_S, DRAIN_TIMEOUT_S, ENGINE_STOP_TIMEOUT_S, INDEX_WRITE_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "deploy" / "prefixcache.toml"
COMPOSE = ROOT / "docker-compose.yml"
PROGRAMS = {"proxy": proxy.__main__.main, "worker": worker.__main__.main, "up": up}


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


def test_compose_gives_every_program_the_time_that_it_takes_to_leave() -> None:
    services = re.split(r"\n  (?=[a-z]+:\n)", COMPOSE.read_text())
    for name in ("worker", "proxy"):
        (service,) = [text for text in services if text.startswith(f"{name}:\n")]
        grace, delay = (
            re.search(rf"{key}: (\d+)", service) for key in ("stop_grace_period", "PREFIXCACHE_DRAIN_DELAY")
        )
        assert grace is not None and (delay is not None) == (name == "proxy")
        assert "PREFIXCACHE_DRAIN_TIMEOUT:" not in service, "the default"
        last_words_s = ENGINE_STOP_TIMEOUT_S + CLOSE_TIMEOUT_S + 3 * INDEX_WRITE_TIMEOUT_S
        assert int(grace[1]) >= DRAIN_TIMEOUT_S + (int(delay[1]) if delay is not None else 0) + last_words_s
