"""The edge as a program, with the machine's own nginx, in front of proxies that a test scripts or starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from prefixcache.cli.children import end, spawn
from tests.support.ports import free_port
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 40.0
CLOCK_TICK_S = 0.02
"""Times of processes are counted in hundredths."""

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="no `nginx` on PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEdge:
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    run_dir: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def said(self, words: str) -> list[str]:
        """Everything in the log that matches."""
        return re.findall(words, self.log.read_text())

    def lists(self) -> list[str]:
        """The lists of proxies that nginx was given, as they were logged."""
        return self.said(r"proxies in the list: (.*); ready: \d+\n")

    def metric(self, name: str) -> float:
        """Of its own, without `prefixcache_edge_`."""
        lines = (self.run_dir / "metrics").read_text()
        [value] = re.findall(rf"^prefixcache_edge_{name} (\S+)$", lines, re.MULTILINE)
        return float(value)

    async def lists_only(self, *ports: int) -> None:
        """Returns when nginx serves by this list and no other one."""
        wanted = ", ".join(f"127.0.0.1:{port}" for port in sorted(ports)) or "none"
        await eventually(lambda: self.lists()[-1:] == [wanted], timeout_s=15.0)
        await eventually(self._serves_by_the_last_list, timeout_s=15.0)

    def _serves_by_the_last_list(self) -> bool:
        written_s = time.time() - (self.run_dir / "nginx.conf").stat().st_mtime
        ages_s = self._ages_s("nginx: worker process")
        return bool(ages_s) and max(ages_s) < written_s + CLOCK_TICK_S

    def nginx_master(self) -> psutil.Process:
        (master,) = psutil.Process(self.process.pid).children()
        return master

    def nginx_rss_bytes(self) -> int:
        """Of all its processes."""
        master = self.nginx_master()
        return sum(each.memory_info().rss for each in (master, *master.children()))

    def num_open_bodies(self) -> int:
        """Files of bodies whose answers have not begun."""
        return sum(
            "/edge-bodies/" in os.readlink(entry)
            for each in self.nginx_master().children()
            for entry in Path(f"/proc/{each.pid}/fd").iterdir()
        )

    def _ages_s(self, title: str) -> list[float]:
        """Of nginx's processes with this title; those of an old list have another one."""
        found = []
        for each in self.nginx_master().children():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                if " ".join(each.cmdline()).strip() == title:
                    found.append(_age_s(each.pid))
        return found


def _age_s(pid: int) -> float:
    """Of a process. psutil's times are those of a boot that it knows to the second alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def running_edge(
    folder: Path, proxies: Sequence[str | int], *, environment: Mapping[str, str] | None = None
) -> AsyncIterator[RunningEdge]:
    """`proxies`: HOST:PORT, or a port of this machine. Yields when nginx listens; ends it with SIGTERM."""
    names = ",".join(each if isinstance(each, str) else f"127.0.0.1:{each}" for each in proxies)
    run_dir = folder / "edge"
    run_dir.mkdir(exist_ok=True)
    log = folder / "edge.log"
    with tempfile.TemporaryDirectory(prefix="edge-") as bodies:
        os.chmod(bodies, 0o755)  # started by root, nginx works as another user
        settings = {
            "EDGE_PROXIES": names,
            "EDGE_LISTEN": f"127.0.0.1:{free_port()}",
            "EDGE_RUN_DIR": str(run_dir),
            "EDGE_TMP_DIR": bodies,
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        with log.open("ab") as output:
            process = spawn(
                [sys.executable, "-P", "-m", "edge"],
                environment={**os.environ, **settings},
                stdout=output,
                stderr=output,
            )
        port = int(settings["EDGE_LISTEN"].rpartition(":")[2])
        edge = RunningEdge(port=port, process=process, log=log, run_dir=run_dir)
        try:
            await eventually(lambda: _listens(edge), timeout_s=15.0)
            yield edge
        finally:
            await asyncio.to_thread(end, process, patience_s=STOP_TIMEOUT_S)


async def _listens(edge: RunningEdge) -> bool:
    assert edge.process.poll() is None, edge.log.read_text()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    except OSError:
        return False
    writer.transport.abort()
    return True
