"""The project's compose file, run under a name and on a port of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_ASK_TIMEOUT_S = 30.0
_BUILD_TIMEOUT_S = 3_600.0
_UP_TIMEOUT_S = 600.0
_DOWN_TIMEOUT_S = 120.0


def why_not() -> str | None:
    """Why no compose file can be run here, None if one can."""
    if shutil.which("docker") is None:
        return "no `docker` on PATH"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` gave no answer within {_ASK_TIMEOUT_S:.0f} s"
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            return f"`{' '.join(command)}` failed: {said[-1]}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeStack:
    """One run of the compose file; every call raises CalledProcessError with what the command printed."""

    project: str
    port: int

    def run(self, *arguments: str, timeout_s: float = _ASK_TIMEOUT_S) -> str:
        """`docker compose ARGUMENTS`; what it wrote to stdout."""
        environment = {**os.environ, "BIND": "127.0.0.1", "PORT": str(self.port)}
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            print(done.stdout[-4_000:], done.stderr[-4_000:], sep="\n")
            done.check_returncode()
        return done.stdout

    def containers(self) -> list[dict[str, Any]]:
        """What `docker inspect` says of every container, stopped ones too."""
        ids = self.run("ps", "--all", "--quiet").split()
        done = subprocess.run(["docker", "inspect", *ids], capture_output=True, timeout=_ASK_TIMEOUT_S, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def stop(self) -> None:
        self.run("stop", timeout_s=_DOWN_TIMEOUT_S)


@contextmanager
def compose_stack() -> Iterator[ComposeStack]:
    """Builds the images, starts the services, waits until all are healthy; removes all but the images afterwards."""
    stack = ComposeStack(project=f"prefixcache-test-{secrets.token_hex(3)}", port=free_port())
    stack.run("build", timeout_s=_BUILD_TIMEOUT_S)
    try:
        try:
            stack.run("up", "--detach", "--no-build", "--wait", timeout_s=_UP_TIMEOUT_S)
        except subprocess.SubprocessError:
            print(stack.run("logs", "--tail", "50"))
            raise
        yield stack
    finally:
        stack.run("down", "--volumes", "--remove-orphans", timeout_s=_DOWN_TIMEOUT_S)
