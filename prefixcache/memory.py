"""Memory: amounts as people write them, and how much of it this process may still take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prefixcache.cgroups import CGROUPS, PROC, own_groups
from prefixcache.errors import ConfigError

DEFAULT_KV_MEMORY = "2GiB"
"""Of one worker, unless told otherwise."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_PERCENT = 95.0
"""The rest is for activations and for everybody else on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """A part of whatever memory is available when the question is asked."""

    percent: float

    def of(self, available_bytes: int) -> int:
        return int(max(available_bytes, 0) * self.percent / 100)

    def divided(self, parts: int) -> MemoryShare:
        return MemoryShare(percent=self.percent / parts)

    def __str__(self) -> str:
        return f"{self.percent:.6g}%"


MemoryAmount = int | MemoryShare
"""Bytes, or a part of what is available."""


def parse_size(text: str, *, setting: str) -> int:
    """Bytes of a size such as 2GiB, 512 MiB, 1.5GB or 1000000. Raises ConfigError."""
    return _size(text, setting=setting, kinds="a size such as 2GiB, 512MiB or 1.5GB")


def parse_memory(text: str, *, setting: str) -> MemoryAmount:
    """A size, or a share such as 50%. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text.strip())
    if match is None:
        return _size(text, setting=setting, kinds="a size such as 2GiB, 512MiB or 1.5GB, or a share such as 50%")
    percent = float(match[1])
    if not 0 < percent <= _MOST_PERCENT:
        raise ConfigError(
            f"{setting} is {text!r}; a share must be more than 0% and at most {_MOST_PERCENT:g}%, for a step needs "
            "memory besides"
        )
    return MemoryShare(percent=percent)


def _size(text: str, *, setting: str, kinds: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{setting} is {text!r}; it must be {kinds}")
    size_bytes = int(float(match[1]) * factor)
    if size_bytes <= 0:
        raise ConfigError(f"{setting} is {text!r}; it must be more than 0 bytes")
    return size_bytes


def size_text(size_bytes: int) -> str:
    """As people read it, three digits or more: 300 B, 22.5 MiB, 2.00 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            amount = size_bytes / factor
            return f"{amount:,.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{size_bytes} B"


# --- what is available ------------------------------------------------------------------------------------


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What this process may still take before anything is swapped out or killed. Raises ConfigError if nobody says.

    The least of the machine's MemAvailable and of what each of its cgroups has left of its limit (both count file
    pages as free, for the system can drop them), less the file pages that this process has mapped: those are its
    weights and libraries, read again in every step.
    """
    machine = _field(proc / "meminfo", "MemAvailable:")
    if machine is None:
        raise ConfigError(f"{proc / 'meminfo'} does not tell what memory is available; give a size, such as 2GiB")
    left = [left for folder in own_groups("memory", proc, cgroups) if (left := _left(folder)) is not None]
    mapped = _field(proc / "self" / "status", "RssFile:") or 0
    return max(min([1024 * machine, *left]) - 1024 * mapped, 0)


def _field(path: Path, name: str) -> int | None:
    """The number in a line such as `RssFile:   1024 kB`; None without it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)


def _left(folder: Path) -> int | None:
    """Bytes that one cgroup may still take; None for one without a limit. Version 2 has files of other names than 1."""
    limits: tuple[str, ...]
    if (folder / "memory.current").exists():
        limits, usage, prefix = ("memory.max", "memory.high"), "memory.current", ""
    else:
        limits, usage, prefix = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
    try:
        stated = [(folder / name).read_text(encoding="utf-8").strip() for name in limits]
        used = int((folder / usage).read_text(encoding="utf-8"))
    except OSError:
        return None
    most = [int(limit) for limit in stated if limit != "max"]
    file_pages = [_field(folder / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("inactive", "active")]
    return min(most) - used + sum(file_pages) if most else None
