"""Precedence flag > environment > TOML file > default, and errors that name the file and the setting."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from prefixcache.config import FiniteRange, file_setting, settings_command, worker_token_option


def _program(seen: dict[str, object]) -> click.Command:
    @settings_command("up", help="A program.")
    @click.option("--port", type=int, default=1, help="A port.")
    @click.option("--key-prefix", "prefix", default="p", help="A prefix.")
    def program(port: int, prefix: str) -> None:
        seen.update(port=port, key_prefix=prefix)

    return program


def _run(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[dict[str, object], str, int]:
    seen: dict[str, object] = {}
    outcome = CliRunner().invoke(_program(seen), arguments, env=environment)
    return seen, outcome.output, outcome.exit_code


def test_each_source_wins_over_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[up]\nport = 2\nkey-prefix = "f"\n[proxy]\nx = 1\n')
    environment = {"PREFIXCACHE_PORT": "3"}
    assert _run([])[0] == {"port": 1, "key_prefix": "p"}
    assert _run(["--config", str(file)])[0] == {"port": 2, "key_prefix": "f"}
    assert _run(["--config", str(file)], environment)[0] == {"port": 3, "key_prefix": "f"}
    assert _run(["--config", str(file), "--port", "4"], environment)[0] == {"port": 4, "key_prefix": "f"}
    assert _run([], {"PREFIXCACHE_KEY_PREFIX": "e"})[0] == {"port": 1, "key_prefix": "e"}
    assert _run([], {"PREFIXCACHE_CONFIG": str(file)})[0] == {"port": 2, "key_prefix": "f"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[up]\nprot = 2\n", "[up] has no setting 'prot'"),
        ("up = 3\n", "'up' is not one of the tables 'proxy', 'worker', 'up'"),
        ("[proxi]\nport = 3\n", "'proxi' is not one of the tables"),
        ("port = 3\n", "'port' is not one of the tables"),
        ("[up]\nport = true\n", "[up] port is true, which is no value for it"),
        ("[up\n", "settings.toml"),
        ('[up]\nport = "x"\n', "'x' is not a valid integer"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    seen, output, code = _run(["--config", str(file)])
    assert (seen, code) == ({}, 2)
    assert message in " ".join(output.split())


def test_the_file_is_passed_on_to_what_a_program_starts(tmp_path: Path) -> None:
    passed_on: list[dict[str, str]] = []

    @settings_command("up", help="A program.")
    @click.pass_context
    def program(context: click.Context) -> None:
        passed_on.append(file_setting(context))

    file = tmp_path / "settings.toml"
    file.write_text("[worker]\nname = 'w'\n")
    assert CliRunner().invoke(program, []).exit_code == 0
    assert CliRunner().invoke(program, ["--config", str(file)]).exit_code == 0
    assert passed_on == [{}, {"PREFIXCACHE_CONFIG": str(file)}]


def test_help_shows_defaults_and_environment_names() -> None:
    text = _run(["--help"])[1]
    assert "PREFIXCACHE_KEY_PREFIX" in text and "default: 1" in text and "PREFIXCACHE_CONFIG" in text


def _run_with_token(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[object, str, int]:
    seen: list[object] = []

    @settings_command("proxy", help="A program.")
    @worker_token_option
    def program(worker_token: str | None) -> None:
        seen.append(worker_token)

    outcome = CliRunner().invoke(program, arguments, env=environment)
    return seen, " ".join(outcome.output.split()), outcome.exit_code


def test_the_worker_token_comes_from_environment_or_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[proxy]\nworker-token = "of-the-file"\n')
    environment = {"PREFIXCACHE_WORKER_TOKEN": "of-the-environment"}
    assert _run_with_token([])[0] == [None]
    assert _run_with_token([], {"PREFIXCACHE_WORKER_TOKEN": ""})[0] == [None]
    assert _run_with_token([], environment)[0] == ["of-the-environment"]
    assert _run_with_token(["--config", str(file)])[0] == ["of-the-file"]
    assert _run_with_token(["--config", str(file)], environment)[0] == ["of-the-environment"]
    seen, output, code = _run_with_token(["--worker-token", "of-the-command-line"])
    assert (seen, code) == ([], 2)
    assert "set PREFIXCACHE_WORKER_TOKEN in the environment" in output and "of-the-command-line" not in output


def test_help_does_not_print_the_worker_token(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[proxy]\nworker-token = "of-the-file"\n')
    environment = {"PREFIXCACHE_WORKER_TOKEN": "of-the-environment"}
    _, output, code = _run_with_token(["--config", str(file), "--help"], environment)
    assert code == 0 and "PREFIXCACHE_WORKER_TOKEN" in output
    assert "of-the-file" not in output and "of-the-environment" not in output


@pytest.mark.parametrize(("given", "code"), [("1.5", 0), ("0", 0), ("-1", 2), ("nan", 2), ("inf", 2), ("soon", 2)])
def test_a_number_of_a_range_is_one(given: str, code: int) -> None:
    @click.command
    @click.option("--pause", type=FiniteRange(min=0))
    def program(pause: float) -> None:
        assert pause == float(given)

    assert CliRunner().invoke(program, ["--pause", given]).exit_code == code
