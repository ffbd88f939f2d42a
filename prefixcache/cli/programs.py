"""The programs that the console script starts: our own top-level packages `proxy` and `worker`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import prefixcache
from prefixcache.errors import ConfigError


def program_command(package: str) -> list[str]:
    """Command line that runs our top-level package `package` in a process of its own.

    -P keeps the working directory off the path, where a folder of the same name would win. Raises ConfigError if the
    name is taken by another distribution.
    """
    spec = importlib.util.find_spec(package)
    ours = Path(prefixcache.__file__).resolve().parent.parent
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != ours:
        found = spec.origin if spec is not None else "nothing"
        raise ConfigError(
            f"the package {package!r} of prefixcache is hidden by another distribution: expected it in {ours}, "
            f"found {found}; uninstall the other one or install prefixcache in a virtual environment of its own"
        )
    return [sys.executable, "-P", "-m", package]
