"""Settings: flag > environment PREFIXCACHE_<NAME> > TOML file > default, for every program alike.

A program declares its flags with click; `settings_command` adds the environment name of each flag and `--config FILE`,
whose table of the program's own name ([proxy], [worker], [up]) gives defaults under the flags' long names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ENVIRONMENT_PREFIX = "PREFIXCACHE"


def _load_file(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    program = context.command.name or ""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
    table = content.get(program, {})
    if not isinstance(table, dict):
        raise click.BadParameter(f"{path}: [{program}] must be a table")
    known = {parameter.name for parameter in context.command.params if isinstance(parameter, click.Option)}
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        option = name.replace("-", "_")
        if option not in known:
            raise click.BadParameter(f"{path}: [{program}] has no setting {name!r}")
        defaults[option] = value
    context.default_map = {**(context.default_map or {}), **defaults}


def settings_command(name: str, *, help: str) -> Callable[[Callable[..., None]], click.Command]:
    """A click command whose flags may also come from the environment and from a TOML file."""
    context_settings = {
        "auto_envvar_prefix": ENVIRONMENT_PREFIX,
        "show_default": True,
        "help_option_names": ["-h", "--help"],
    }
    config = click.Option(
        ["--config"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load_file,
        help=f"TOML file; its table [{name}] gives defaults under the flags' long names.",
    )

    def decorate(function: Callable[..., None]) -> click.Command:
        command = click.command(name, context_settings=context_settings, help=help)(function)
        command.params.append(config)
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                parameter.show_envvar = True
        return command

    return decorate
