"""Which groups a process is in, over made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.cgroups import own_groups


def _groups(folder: Path, memberships: str, controller: str = "memory") -> list[str]:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(memberships, encoding="utf-8")
    found = own_groups(controller, folder / "proc", folder / "cgroup")
    return [str(group.relative_to(folder / "cgroup")) for group in found]


def test_without_groups_there_are_none(tmp_path: Path) -> None:
    assert list(own_groups("memory", tmp_path / "proc", tmp_path / "cgroup")) == []


def test_version_2_has_one_tree_for_all_controllers(tmp_path: Path) -> None:
    assert _groups(tmp_path, "0::/a/b\n") == ["a/b", "a", "."]


@pytest.mark.parametrize(("controller", "groups"), [("memory", ["memory/x", "memory"]), ("cpu", ["cpu/pod", "cpu"])])
def test_version_1_has_a_tree_for_each(tmp_path: Path, controller: str, groups: list[str]) -> None:
    assert _groups(tmp_path, "4:memory:/x\n2:cpu,cpuacct:/pod\n1:name=systemd:/\n", controller) == groups


def test_both_versions_beside_each_other(tmp_path: Path) -> None:
    """systemd's hybrid layout: the controllers are those of version 1, the tree of version 2 stands under unified/."""
    (tmp_path / "cgroup/unified").mkdir(parents=True)
    assert _groups(tmp_path, "4:memory:/\n0::/a\n") == ["memory", "unified/a", "unified"]
