"""The console script `prefixcache`."""

from __future__ import annotations

import os
import sys

import click

import prefixcache
from prefixcache.cli.plan import plan
from prefixcache.cli.programs import program_command
from prefixcache.cli.simulate import simulate
from prefixcache.cli.up import up
from prefixcache.errors import ConfigError, PrefixCacheError

_EXIT_CONFIG = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(prefixcache.__version__, prog_name="prefixcache")
def cli() -> None:
    """Cross-request prefix caching for LLM inference.

    Every flag of every program can also be set in the environment as PREFIXCACHE_<NAME> or in a TOML file (--config).
    """


def _add_program(package: str, summary: str) -> None:
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @cli.command(package, context_settings=passed_on, help=summary, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        command = [*program_command(package), *arguments]
        os.execv(command[0], command)


_add_program("proxy", "Run the proxy (`prefixcache proxy --help` lists its flags).")
_add_program("worker", "Run one worker (`prefixcache worker --help` lists its flags).")
cli.add_command(up)
cli.add_command(simulate)
cli.add_command(plan)


def main() -> None:
    """Entry point: one plain line on stderr for an error that the user can mend."""
    try:
        cli()
    except PrefixCacheError as error:
        click.echo(f"prefixcache: {error}", err=True)
        sys.exit(_EXIT_CONFIG if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
