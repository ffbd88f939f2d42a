"""Settings: flag > environment PREFIXCACHE_<NAME> > TOML file > default, for every program alike.

A program declares its flags with click; `settings_command` adds the environment name of each flag and `--config FILE`,
whose table of the program's own name ([proxy], [worker], [up]) gives defaults under the flags' long names.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

ENVIRONMENT_PREFIX = "PREFIXCACHE"
PROGRAMS = ("proxy", "worker", "up")
"""One table each in a settings file."""

_FILE = "prefixcache.config.file"


class FiniteRange(click.FloatRange):
    """As FloatRange, which takes a NaN for a number of any range and infinity for one without an upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def file_setting(context: click.Context) -> dict[str, str]:
    """What a program puts into the environment of those it starts, so that they read the same settings file."""
    path = context.meta.get(_FILE)
    return {} if path is None else {f"{ENVIRONMENT_PREFIX}_CONFIG": str(path.resolve())}


def _load_file(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    program = context.command.name or ""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
    for name, table in content.items():
        if name not in PROGRAMS or not isinstance(table, dict):
            raise click.BadParameter(f"{path}: {name!r} is not one of the tables {', '.join(map(repr, PROGRAMS))}")
    context.meta[_FILE] = path
    table = content.get(program, {})
    known = {_long_name(option): option for option in _options(context.command)}
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            raise click.BadParameter(f"{path}: [{program}] has no setting {name!r}; it has {', '.join(sorted(known))}")
        if isinstance(value, bool) and not known[name].is_flag:
            raise click.BadParameter(f"{path}: [{program}] {name} is {str(value).lower()}, which is no value for it")
        defaults[str(known[name].name)] = value
    context.default_map = {**(context.default_map or {}), **defaults}


def secret_option(name: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A setting that has no place on a command line, which any user of the machine can read."""
    flag = f"--{name}"
    variable = f"{ENVIRONMENT_PREFIX}_{name.replace('-', '_').upper()}"

    def from_elsewhere(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            raise click.BadParameter(
                f"any user of the machine can read a command line; set {variable} in the environment, or {name} in "
                "the settings file"
            )
        return value

    return click.option(flag, callback=from_elsewhere, show_default=False, metavar="TEXT", help=help)


worker_token_option = secret_option(
    "worker-token",
    "Secret that proxies and workers prove to each other; not as a flag.  [default: none, anyone is served]",
)


def _options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _long_name(option: click.Option) -> str:
    """The flag as it is typed, without its dashes."""
    return max(option.opts, key=len).lstrip("-")


def settings_command(name: str, *, help: str) -> Callable[[Callable[..., None]], click.Command]:
    """A click command whose flags may also come from the environment and from a TOML file."""
    context_settings = {
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
        for option in _options(command):
            option.envvar = f"{ENVIRONMENT_PREFIX}_{_long_name(option).replace('-', '_').upper()}"
            option.show_envvar = True
        return command

    return decorate
