"""The sample settings file names only settings that exist, with values that they take."""

from __future__ import annotations

import tomllib
from pathlib import Path
from unittest.mock import patch

import click
import pytest

import proxy.__main__
import worker.__main__
from prefixcache.cli.up import up

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "prefixcache.toml"
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
