"""prefixcache.cpu over made-up /proc and cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixcache.cpu import auto_dtype, has_bf16, usable_cores


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f avx512_bf16 sse2", True), ("fpu amx_bf16", True), ("fpu avx512f avx512_bf16x", False), ("", False)],
)
def test_bf16_is_a_whole_flag(tmp_path: Path, flags: str, expected: bool) -> None:
    _write(tmp_path / "cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: amx_bf16\n")
    assert has_bf16(tmp_path) is expected


def test_no_cpuinfo_means_no_bf16(tmp_path: Path) -> None:
    assert has_bf16(tmp_path) is False
    _write(tmp_path / "cpuinfo", "Features\t: fp asimd\n")
    assert has_bf16(tmp_path) is False


def test_auto_dtype_follows_the_flags() -> None:
    assert auto_dtype() == ("bfloat16" if has_bf16() else "float32")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
class TestUsableCores:
    def test_no_cgroup_leaves_the_affinity(self, tmp_path: Path) -> None:
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == 8

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
    )
    def test_quota_of_cgroup_v2(self, tmp_path: Path, limit: str, expected: int) -> None:
        _write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
        _write(tmp_path / "cgroup/a/b/cpu.max", limit + "\n")
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == expected

    def test_the_tightest_level_counts(self, tmp_path: Path) -> None:
        _write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
        _write(tmp_path / "cgroup/a/b/cpu.max", "500000 100000\n")
        _write(tmp_path / "cgroup/a/cpu.max", "300000 100000\n")
        _write(tmp_path / "cgroup/cpu.max", "max 100000\n")
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == 3

    def test_a_container_sees_its_own_root_only(self, tmp_path: Path) -> None:
        """Without a cgroup namespace the path is the host's and does not exist inside."""
        _write(tmp_path / "proc/self/cgroup", "0::/docker/0123abcd\n")
        _write(tmp_path / "cgroup/cpu.max", "400000 100000\n")
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == 4

    @pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("300000", 3)])
    def test_quota_of_cgroup_v1(self, tmp_path: Path, quota: str, expected: int) -> None:
        _write(tmp_path / "proc/self/cgroup", "4:memory:/x\n2:cpu,cpuacct:/pod\n0::/\n")
        _write(tmp_path / "cgroup/cpu/pod/cpu.cfs_quota_us", quota + "\n")
        _write(tmp_path / "cgroup/cpu/pod/cpu.cfs_period_us", "100000\n")
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == expected
