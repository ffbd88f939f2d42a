"""What is held goes into huge pages; what is not there is not made, and no byte changes."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.huge_pages import needs_huge_pages
from worker import huge_pages

HUGE_BYTES = 2 << 20
PAGES = HUGE_BYTES // mmap.PAGESIZE
NUM_HUGE = 4


class Memory:
    """Anonymous memory of its own with room for NUM_HUGE huge pages, of which nothing is there yet."""

    def __init__(self) -> None:
        self.mapped = mmap.mmap(-1, (NUM_HUGE + 1) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped.madvise(mmap.MADV_DONTFORK)  # the kernel makes one mapping of neighbours that are alike
        self._held = ctypes.c_char.from_buffer(self.mapped)
        self.address = ctypes.addressof(self._held)
        self.skipped = -self.address % HUGE_BYTES
        """Up to where the first huge page may stand."""

    def write(self, huge: int, num_pages: int) -> None:
        """Something of its own into the first pages of a huge page, all small ones even where `enabled` is `always`."""
        with suppress(OSError):  # no kernel must know the advice
            self.mapped.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(num_pages):
            place = self.skipped + huge * HUGE_BYTES + page * mmap.PAGESIZE
            self.mapped[place : place + 8] = (huge * 1000 + page).to_bytes(8, "little")
        with suppress(OSError):
            self.mapped.madvise(mmap.MADV_HUGEPAGE)

    def read(self, huge: int, num_pages: int) -> list[int]:
        places = (self.skipped + huge * HUGE_BYTES + page * mmap.PAGESIZE for page in range(num_pages))
        return [int.from_bytes(self.mapped[place : place + 8], "little") - huge * 1000 for place in places]

    def line(self, mode: str = "rw-p", inode: int = 0, name: str = "") -> str:
        """As /proc/PID/maps has it."""
        return f"{self.address:x}-{self.address + len(self.mapped):x} {mode} 00000000 00:00 {inode} {name}\n"

    def kilobytes(self, field: str) -> int:
        """Of this memory, by the kernel's account."""
        _, own = Path("/proc/self/smaps").read_text().split(f"\n{self.line().split()[0]} ")
        [value] = re.findall(rf"^{field}: +(\d+) kB$", own.partition("VmFlags")[0], re.MULTILINE)
        return int(value)

    def close(self) -> None:
        del self._held
        self.mapped.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def maps(tmp_path: Path, memory: Memory) -> Path:
    path = tmp_path / "maps"
    path.write_text(memory.line())
    return path


@needs_huge_pages
def test_what_is_held_goes_into_huge_pages_and_stays_the_same(
    memory: Memory, maps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for huge in range(NUM_HUGE):
        memory.write(huge, PAGES)
    before = memory.kilobytes("AnonHugePages")
    with caplog.at_level("INFO"):
        assert huge_pages.gather(maps=maps) == NUM_HUGE * HUGE_BYTES
    assert caplog.messages == ["8.00 MiB of memory are in huge pages"]
    assert memory.kilobytes("AnonHugePages") - before == NUM_HUGE * HUGE_BYTES >> 10
    for huge in range(NUM_HUGE):
        assert memory.read(huge, PAGES) == list(range(PAGES))
    assert huge_pages.gather(maps=maps) == NUM_HUGE * HUGE_BYTES, "a second time nothing is left to do"


@needs_huge_pages
@pytest.mark.parametrize(("num_pages", "gathered"), [(0, 0), (1, 0), (480, 0), (490, HUGE_BYTES)])
def test_what_is_not_there_is_not_made(num_pages: int, gathered: int, memory: Memory, maps: Path) -> None:
    if mmap.PAGESIZE != 4096:
        pytest.skip(f"pages of {mmap.PAGESIZE} bytes")
    memory.write(1, num_pages)
    resident = memory.kilobytes("Rss")
    assert huge_pages.gather(maps=maps) == gathered
    assert memory.kilobytes("Rss") - resident == ((512 - num_pages) * 4 if gathered else 0)
    assert memory.read(1, num_pages) == list(range(num_pages))


def test_memory_of_others_and_of_files_is_left_alone(memory: Memory, maps: Path) -> None:
    for huge in range(NUM_HUGE):
        memory.write(huge, PAGES)
    before = memory.kilobytes("AnonHugePages")
    maps.write_text(
        memory.line(mode="r--p")
        + memory.line(mode="rw-s")
        + memory.line(inode=7)
        + memory.line(inode=7, name="/weights.safetensors")
        + memory.line(name="[stack]")
        + memory.line(name="/memfd:with a space (deleted)")
    )
    assert huge_pages.gather(maps=maps) == 0
    assert memory.kilobytes("AnonHugePages") == before


def test_where_the_administrator_wants_none_there_are_none(memory: Memory, maps: Path, tmp_path: Path) -> None:
    memory.write(0, PAGES)
    policy = tmp_path / "enabled"
    policy.write_text("always madvise [never]\n")
    assert huge_pages.gather(maps=maps, policy=policy) == 0
    assert huge_pages.gather(maps=maps, policy=tmp_path / "no such kernel") == 0
    assert huge_pages.gather(maps=tmp_path / "no such system") == 0


def test_memory_that_is_gone_by_then_is_passed_over(maps: Path) -> None:
    maps.write_text("10000000000-10000800000 rw-p 00000000 00:00 0\n00000000-00001000 rw-p 00000000 00:00 0\n")
    assert huge_pages.gather(maps=maps) == 0
