"""The containers of one compose project as the engine sees them, and what can be done to one from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """As of one moment."""

    id: str
    service: str
    number: int
    """From 1 on, among those of its service."""
    pid: int
    """On this machine; 0 while it does not run."""
    is_running: bool
    is_paused: bool
    is_healthy: bool
    """False of one without a health check, too."""
    networks: Mapping[str, Sequence[str]]
    """Name -> the names by which others find it there."""
    inspected: Mapping[str, Any]
    """All that `docker inspect` says."""

    @classmethod
    def of(cls, inspected: Mapping[str, Any]) -> Container:
        labels, state = inspected["Config"]["Labels"], inspected["State"]
        networks = inspected["NetworkSettings"]["Networks"]
        return cls(
            id=inspected["Id"],
            service=labels["com.docker.compose.service"],
            number=int(labels["com.docker.compose.container-number"]),
            pid=state["Pid"],
            is_running=state["Running"] and not state["Restarting"],
            is_paused=state["Paused"],
            is_healthy=state.get("Health", {}).get("Status") == "healthy",
            networks={name: network["Aliases"] or () for name, network in networks.items()},
            inspected=inspected,
        )

    @property
    def name(self) -> str:
        return f"{self.service}-{self.number}"

    @property
    def started_at(self) -> str:
        """Comparable with those of others."""
        started_at: str = self.inspected["State"]["StartedAt"]
        return started_at

    @property
    def checks(self) -> Sequence[Mapping[str, Any]]:
        """The latest health checks, as `docker inspect` tells of them."""
        checks: Sequence[Mapping[str, Any]] = self.inspected["State"]["Health"]["Log"]
        return checks

    def kill(self) -> None:
        """kill -9 of its first process; `docker kill` would be taken for a wish, after which nothing restarts it."""
        os.kill(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        docker("pause", self.id)

    def unpause(self) -> None:
        docker("unpause", self.id)

    def disconnect(self) -> None:
        """Its connections hear nothing of it."""
        for network in self.networks:
            docker("network", "disconnect", network, self.id)

    def connect(self) -> None:
        """As it was at the time of this object."""
        for network, names in self.networks.items():
            docker("network", "connect", *(f"--alias={name}" for name in names), network, self.id)

    def restart(self) -> None:
        """SIGTERM, its grace, and a new start."""
        docker("restart", self.id, timeout_s=4 * ASK_TIMEOUT_S)

    def execute(self, *command: str) -> str:
        return docker("exec", self.id, *command)

    def log(self, num_lines: int = 200) -> str:
        done = subprocess.run(
            ["docker", "logs", "--tail", str(num_lines), self.id],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
        return done.stdout


def containers_of(project: str) -> list[Container]:
    """All of a compose project, stopped ones too, by service and number."""
    ids = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={project}").split()
    if not ids:
        return []
    found = map(Container.of, json.loads(docker("inspect", *ids)))
    return sorted(found, key=lambda container: (container.service, container.number))


def docker(*arguments: str, timeout_s: float = ASK_TIMEOUT_S) -> str:
    """What `docker ARGUMENTS` wrote to stdout. Raises CalledProcessError and prints what it wrote to stderr."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        print(f"docker {' '.join(arguments)}: {done.stderr[-4_000:]}")
        done.check_returncode()
    return done.stdout
