"""The import rule, the fences around third-party packages, and whose `proxy`, `worker` and `edge` are imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge
import prefixcache
import proxy
import worker

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("prefixcache", "proxy", "worker", "edge")

LAYERS = (
    (
        "prefixcache.types",
        "prefixcache.errors",
        "prefixcache.limits",
        "prefixcache.cgroups",
        "prefixcache.step_costs",
    ),
    ("prefixcache.cpu", "prefixcache.memory", "prefixcache.model_files"),
    (
        "prefixcache.hashing",
        "prefixcache.protocol",
        "prefixcache.worker_token",
        "prefixcache.metrics",
        "prefixcache.config",
        "prefixcache.load",
        "prefixcache.probe",
    ),
    ("prefixcache.registry",),
    ("prefixcache.index", "prefixcache.rendering", "prefixcache.routing"),
    ("prefixcache.store", "prefixcache.local_store", "prefixcache.keeper"),
    ("prefixcache.demo", "prefixcache.simulation", "prefixcache.planning"),
    ("prefixcache.cli",),
)
"""prefixcache from the bottom up: a module imports its own entry or lower layers."""

FENCES = {
    "torch": (
        "worker.kv_cache",
        "worker.kv_memory",
        "worker.attention",
        "worker.identity",
        "worker.model_runner",
        "worker.sampler",
        "worker.model_loader",
        "worker.packed_linear",
        "worker.rope",
        "worker.sibling_layers",
    ),
    "transformers": (
        "worker.attention",
        "worker.identity",
        "worker.model_runner",
        "worker.model_loader",
        "worker.rope",
    ),
    "safetensors": ("worker.model_loader",),
    "redis": ("prefixcache.store", "prefixcache.index"),
    "hiredis": ("prefixcache.index",),
    "prometheus_client": ("prefixcache.metrics",),
    "tokenizers": ("prefixcache.rendering", "prefixcache.demo"),
    "jinja2": ("prefixcache.rendering",),
    "numpy": ("prefixcache.demo",),
    "matplotlib": ("prefixcache.simulation.plot",),
    "click": ("prefixcache.config", "prefixcache.cli", "proxy.__main__", "worker.__main__"),
    "uvloop": ("proxy.__main__", "worker.__main__"),
    "aiohttp": ("proxy", "worker"),
    "httptools": ("proxy.engines.http_connection",),
    "msgspec": ("prefixcache", "proxy", "worker"),
    "xxhash": ("prefixcache.hashing", "worker.draw", "worker.sim_context", "worker.sim_model"),
}
"""Third-party package -> the modules (and what lies below them) that may import it. Any other package is refused."""


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield _module_name(path), ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction of an import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


EDGES = [(name, imported) for name, tree in _sources() for imported in _imports(tree)]
MODULES = {name for name, _tree in _sources()}


def test_proxy_and_worker_import_the_core_and_never_each_other() -> None:
    allowed = {
        "prefixcache": ("prefixcache",),
        **{name: (name, "prefixcache") for name in ("proxy", "worker", "edge")},
    }
    wrong = [
        (name, imported)
        for name, imported in EDGES
        if imported.split(".")[0] in PACKAGES and imported.split(".")[0] not in allowed[name.split(".")[0]]
    ]
    assert wrong == []


def test_imports_inside_the_core_point_down() -> None:
    height = {place: level for level, places in enumerate(LAYERS) for place in places}

    def place_of(module: str) -> str | None:
        return next((place for place in height if _within(module, place)), None)

    unplaced = [name for name in MODULES if name.startswith("prefixcache.") and place_of(name) is None]
    assert unplaced == []
    wrong = []
    for name, imported in EDGES:
        source, target = place_of(name), place_of(imported)
        if source and target and source != target and height[target] >= height[source]:
            wrong.append((name, imported))
    assert wrong == []


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, imported in EDGES:
        if imported in MODULES and imported != name:
            graph[name].add(imported)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        if name in done:
            return
        for imported in graph[name]:
            visit(imported, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_third_party_packages_stay_behind_their_fences() -> None:
    wrong = []
    for name, imported in EDGES:
        top = imported.split(".")[0]
        if top in PACKAGES or top in sys.stdlib_module_names:
            continue
        if not any(_within(name, place) for place in FENCES.get(top, ())):
            wrong.append((name, imported))
    assert wrong == []


@pytest.mark.parametrize("module", [prefixcache, proxy, worker, edge])
def test_the_packages_imported_are_ours(module: object) -> None:
    """Other distributions publish packages of these names."""
    origin = getattr(module, "__file__", None)
    assert isinstance(origin, str)
    assert Path(origin).resolve().is_relative_to(ROOT)


def test_architecture_has_one_line_a_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        section = text.partition(f"### {package}:")[2].partition("\n#")[0]
        listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        present = [
            str(path.relative_to(ROOT / package))
            for path in sorted((ROOT / package).rglob("*"))
            if path.suffix in (".py", ".lua") and path.name != "__init__.py"
        ]
        assert listed == present
