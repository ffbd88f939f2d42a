"""What this machine's CPU offers: cores this process may use, and fast bfloat16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from prefixcache.cgroups import CGROUPS, PROC, own_groups

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""With one of these a bfloat16 prefill is 3 to 4 times faster than float32; without them it is slower."""


def has_bf16(proc: Path = PROC) -> bool:
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


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Cores this process may keep busy: its affinity, lowered to the whole cores of its cgroups' quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    quotas = [quota for folder in own_groups("cpu", proc, cgroups) if (quota := _quota(folder)) is not None]
    return max(1, int(min([cores, *quotas])))


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
