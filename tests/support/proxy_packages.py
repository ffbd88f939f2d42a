"""What the proxy's image installs: the packages that `python -m proxy` imports, and the packages that those need.

Imports are read from the source, from `proxy/__main__.py` on and through our own modules, inside functions too; needs
from the metadata of the installed packages. FOUND_BY_OTHERS and ON_SOME_PYTHONS are added, NOT_USED and what only
it needs is left out.
Run as a program where requirements.lock is installed, it passes on those lines of a lock file that name such a package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "proxy.__main__"
OWN = ("prefixcache", "proxy", "worker")
FOUND_BY_OTHERS = frozenset({"hiredis"})
"""redis parses replies with it where it is installed."""
ON_SOME_PYTHONS = frozenset({"async-timeout"})
"""redis needs it before Python 3.11.3; it needs nothing itself."""
NOT_USED = frozenset({"huggingface-hub"})
"""tokenizers needs it only to fetch a tokenizer by its name on the hub; the proxy fetches from workers."""


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_packages() -> set[str]:
    """Top-level names of the third-party packages that the proxy imports, itself or through our own modules."""
    found: set[str] = set()
    seen: set[Path] = set()
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        top = module.partition(".")[0]
        if top not in OWN:
            if top not in sys.stdlib_module_names:
                found.add(top)
            continue
        for path in _sources(module):
            if path not in seen:
                seen.add(path)
                waiting += _imports(path)
    return found


def proxy_pins(lock: list[str]) -> list[str]:
    """The lines `name==version` of a lock file that the proxy's image installs."""
    wanted = proxy_distributions()
    return [line for line in lock if normalised(line.partition("==")[0]) in wanted]


def proxy_distributions() -> set[str]:
    """Normalised names of the distributions that the proxy's image installs."""
    providers = packages_distributions()
    needed = set(ON_SOME_PYTHONS)
    waiting = [name for package in imported_packages() | FOUND_BY_OTHERS for name in providers[package]]
    while waiting:
        name = normalised(waiting.pop())
        if name not in needed and name not in NOT_USED:
            needed.add(name)
            requirements = map(Requirement, requires(name) or ())
            waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate()]
    return needed


def _sources(module: str) -> Iterator[Path]:
    """Files that are run when the module is imported: its own and those of the packages above it."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:length])
        yield from (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file())


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    print("\n".join(proxy_pins(sys.stdin.read().splitlines())))
