"""What this machine's CPU offers: cores this process may use, and fast bfloat16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""With one of these a bfloat16 prefill is 3 to 4 times faster than float32; without them it is slower."""


def has_bf16(proc: Path = _PROC) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware. False where /proc/cpuinfo does not say so."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not _BF16_FLAGS.isdisjoint(flags)


def auto_dtype() -> Literal["bfloat16", "float32"]:
    """The dtype that `--dtype auto` means on this machine."""
    return "bfloat16" if has_bf16() else "float32"


def usable_cores(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Cores this process may keep busy: its affinity, lowered to the whole cores of its cgroups' quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min([cores, *_quotas(proc, cgroups)])))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """CPU quotas in cores of the process's own cgroup and of every one above it, cgroup v2 and v1."""
    try:
        memberships = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for membership in memberships:
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0":
            mount = cgroups
        elif "cpu" in controllers.split(","):
            mount = cgroups / "cpu"
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder.is_relative_to(mount):
            quota = _quota(folder)
            if quota is not None:
                yield quota
            folder = folder.parent


def _quota(folder: Path) -> float | None:
    """Cores one cgroup may use; None for one without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)
