"""The control groups that this process is in: where the system says what it may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = "unified"
"""Where systemd mounts version 2 on machines whose controllers are still those of version 1."""


def own_groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of the process's own group and of every one above it, cgroup v2 and v1; some may not exist.

    A container without a namespace of its own is told the host's path: only the root of what it sees exists then.
    """
    try:
        memberships = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for membership in memberships:
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0":
            mount = cgroups / _UNIFIED if (cgroups / _UNIFIED).is_dir() else cgroups
        elif controller in controllers.split(","):
            mount = cgroups / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder.is_relative_to(mount):
            yield folder
            folder = folder.parent
