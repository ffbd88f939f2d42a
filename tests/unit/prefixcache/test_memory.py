"""Amounts of memory as people write them, and what is available in made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount, MemoryShare, available_bytes, parse_memory, parse_size, size_text

GIB = 2**30
SIZES = [
    ("2GiB", 2 * GIB),
    ("512 MiB", 512 * 2**20),
    ("1.5GB", 1_500_000_000),
    ("64kib", 64 * 2**10),
    ("1TiB", 2**40),
    ("1000000", 1_000_000),
    (" 10B ", 10),
]
NO_SIZES = ["", "GiB", "2 G iB", "two GiB", "-1GiB", "2GiBs", "1e3", "0", "0.2B", "½GiB", "nan"]


@pytest.mark.parametrize(("text", "size_bytes"), SIZES)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text, setting="--memory") == size_bytes
    assert parse_memory(text, setting="--memory") == size_bytes


@pytest.mark.parametrize("text", [*NO_SIZES, "50%"])
def test_a_size_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory is") as caught:
        parse_size(text, setting="--memory")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "percent"), [("50%", 50.0), (" 12.5 %", 12.5), ("95%", 95.0), ("0.78125%", 0.78125)])
def test_shares(text: str, percent: float) -> None:
    assert parse_memory(text, setting="--kv-memory") == MemoryShare(percent=percent)


@pytest.mark.parametrize("text", [*NO_SIZES, "%", "0%", "95.1%", "100%", "-5%", "5%%", "half"])
def test_an_amount_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory is") as caught:
        parse_memory(text, setting="--kv-memory")
    assert repr(text) in str(caught.value)


def test_a_share_is_of_what_is_there() -> None:
    share = MemoryShare(percent=12.5)
    assert share.of(8 * GIB) == GIB
    assert share.of(-1) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_a_divided_share_is_written_as_it_is_read(parts: int) -> None:
    share: MemoryAmount = MemoryShare(percent=50.0).divided(parts)
    read = parse_memory(str(share), setting="--kv-memory")
    assert isinstance(read, MemoryShare)
    assert read.percent * parts == pytest.approx(50.0, rel=1e-4)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (22_500, "22.0 KiB"),
        (368_640, "360 KiB"),
        (2 * GIB, "2.00 GiB"),
        (80 * GIB, "80.0 GiB"),
        (1_000 * GIB, "1,000 GiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_sizes_as_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


class Machine:
    """16 GiB available, and a process that has mapped 1 GiB of files."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write("proc/meminfo", "MemTotal: 99 kB\nMemFree: 5 kB\nMemAvailable:   16777216 kB\n")
        self.write("proc/self/status", "VmRSS:\t 9 kB\nRssAnon:\t 7 kB\nRssFile:\t 1048576 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def group(self, path: str, *, most: str, high: str = "max", used: int, stat: str = "") -> None:
        """One of version 2."""
        for name, text in (("max", most), ("high", high), ("current", str(used)), ("stat", stat)):
            self.write(f"cgroup/{path}memory.{name}", text + "\n")

    @property
    def available(self) -> int:
        return available_bytes(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups_it_is_what_the_machine_has_less_the_mapped_files(machine: Machine) -> None:
    assert machine.available == 15 * GIB


def test_pages_of_files_count_as_free_in_a_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod\n")
    stat = f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\nfile {9 * GIB}"
    machine.group("pod/", most=str(8 * GIB), used=6 * GIB, stat=stat)
    assert machine.available == (8 - 6 + 3 - 1) * GIB


def test_the_tightest_group_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.group("a/b/", most="max", used=GIB)
    machine.group("a/", most=str(4 * GIB), used=GIB)
    assert machine.available == 2 * GIB
    machine.group("a/", most=str(4 * GIB), high=str(3 * GIB), used=GIB)
    assert machine.available == GIB, "over memory.high a group is throttled"
    machine.group("", most=str(64 * GIB), used=GIB)
    assert machine.available == GIB


def test_a_full_group_leaves_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", most=str(GIB), used=GIB)
    assert machine.available == 0


def test_groups_of_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/pod\n0::/\n")
    machine.write("cgroup/memory/pod/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write("cgroup/memory/pod/memory.usage_in_bytes", f"{2 * GIB}\n")
    machine.write("cgroup/memory/pod/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    machine.write("cgroup/memory/memory.stat", "total_inactive_file 0\n")
    assert machine.available == 2 * GIB


def test_a_system_that_does_not_tell_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"meminfo does not tell what memory is available; give a size"):
        available_bytes(tmp_path / "proc", tmp_path / "cgroup")


def test_this_machine_tells() -> None:
    assert 0 < available_bytes() < 2**50
