"""The console script: subcommands, exit codes, and programs that are found where they should be."""

from __future__ import annotations

import importlib.machinery
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from prefixcache import __version__
from prefixcache.cli import programs
from prefixcache.cli.main import cli, main
from prefixcache.errors import ConfigError


def test_lists_its_subcommands_and_version() -> None:
    runner = CliRunner()
    assert set(cli.commands) == {"up", "proxy", "worker", "simulate", "plan"}
    assert __version__ in runner.invoke(cli, ["--version"]).output


@pytest.mark.parametrize("package", ["proxy", "worker"])
def test_programs_run_as_modules_without_the_working_directory(package: str) -> None:
    assert programs.program_command(package) == [sys.executable, "-P", "-m", package]


@pytest.mark.parametrize("origin", ["/elsewhere/site-packages/proxy/__init__.py", None])
def test_a_package_of_another_distribution_is_refused(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = importlib.machinery.ModuleSpec("proxy", None, origin=origin)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    with pytest.raises(ConfigError, match="hidden by another distribution"):
        programs.program_command("proxy")


def test_the_console_script_imports_neither_program_nor_torch() -> None:
    probe = "import sys, prefixcache.cli.main; print([m for m in ('proxy', 'worker', 'torch') if m in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


def test_a_used_port_is_one_plain_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["prefixcache", "up", "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"port {port} on 127.0.0.1 cannot be used" in lines[0]


def test_a_folder_without_a_model_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prefixcache", "up", "--port", "18999", "--model", "/nowhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no model folder there" in capsys.readouterr().err
