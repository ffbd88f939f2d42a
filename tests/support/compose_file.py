"""docker-compose.yml as data, without an engine: services with their defaults filled in, and the variables it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no stubs of its own, and comes with transformers

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")


def variables() -> dict[str, set[str]]:
    """Name -> its defaults; one that has two is a mistake."""
    found: dict[str, set[str]] = {}
    for line in COMPOSE.read_text(encoding="utf-8").splitlines():
        for name, default in _VARIABLE.findall(line.partition("# ")[0]):
            found.setdefault(name, set()).add(default)
    return found


def services() -> dict[str, dict[str, Any]]:
    """All services of all profiles, merged, as an empty environment makes them."""
    text = _VARIABLE.sub(lambda match: match[2] or "", COMPOSE.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def seconds(duration: str) -> float:
    """Of "45s" or "2m"."""
    number, unit = float(duration[:-1]), duration[-1]
    return number * {"s": 1, "m": 60, "h": 3_600}[unit]
