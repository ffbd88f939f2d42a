"""The project's compose file, run under a name and on a port of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.containers import ASK_TIMEOUT_S, Container, containers_of
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_REPLICAS = {"worker": "WORKERS", "proxy": "PROXIES"}
"""Service -> the variable that says how many of it there are."""
_BUILD_TIMEOUT_S = 3_600.0
_UP_TIMEOUT_S = 600.0
_DOWN_TIMEOUT_S = 120.0


def why_not() -> str | None:
    """Why no compose file can be run here, None if one can."""
    if shutil.which("docker") is None:
        return "no `docker` on PATH"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` gave no answer within {ASK_TIMEOUT_S:.0f} s"
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            return f"`{' '.join(command)}` failed: {said[-1]}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeStack:
    """One run of the compose file; every call raises CalledProcessError after printing what the command said."""

    project: str
    port: int
    """Where the edge is published."""
    files: Sequence[Path] = ()
    """Laid over the compose file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    profiles: Sequence[str] = ()
    scale: dict[str, int] = field(default_factory=dict)
    """Replicas by service, where they are not what the file says."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str, timeout_s: float = ASK_TIMEOUT_S) -> str:
        """`docker compose ARGUMENTS`; what it wrote to stdout."""
        return self._told(["docker", "compose", *arguments], timeout_s)

    def shell(self, script: str, *, timeout_s: float = _UP_TIMEOUT_S) -> str:
        """What bash made of a script whose `docker compose` means this stack; it ends at the first failure."""
        return self._told(["bash", "-euo", "pipefail", "-c", script], timeout_s)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """The same, not waited for; stdout and stderr are one."""
        return subprocess.Popen(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self, **scale: int) -> None:
        """Starts what does not run and waits until all is healthy; `scale` holds from then on."""
        self.scale.update(scale)
        self.run(*self.up_arguments(), timeout_s=_UP_TIMEOUT_S)

    def up_arguments(self) -> Sequence[str]:
        replicas = [f"--scale={service}={number}" for service, number in self.scale.items()]
        return ("up", "--detach", "--no-build", "--no-recreate", "--wait", *replicas)

    def containers(self, service: str | None = None) -> list[Container]:
        """Stopped ones, too."""
        return [each for each in containers_of(self.project) if service in (None, each.service)]

    def stop(self) -> None:
        self.run("stop", timeout_s=_DOWN_TIMEOUT_S)

    def down(self) -> None:
        """Removes all but the images."""
        self.run("down", "--volumes", "--remove-orphans", timeout_s=_DOWN_TIMEOUT_S)

    def logs(self, num_lines: int = 60) -> str:
        return "\n".join(f"--- {each.name}\n{each.log(num_lines)}" for each in self.containers())

    def _told(self, command: Sequence[str], timeout_s: float) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            print(done.stdout[-4_000:], done.stderr[-4_000:], sep="\n")
            done.check_returncode()
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """What makes `docker compose` mean this stack, in its present size."""
        return {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_FILE": os.pathsep.join(map(str, (ROOT / "docker-compose.yml", *self.files))),
            "COMPOSE_PROFILES": ",".join(self.profiles),
            "BIND": "127.0.0.1",
            "PORT": str(self.port),
            **{_REPLICAS[service]: str(number) for service, number in self.scale.items() if service in _REPLICAS},
            **self.environment,
        }


def stack_of(
    name: str,
    *,
    files: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    profiles: Sequence[str] = (),
    scale: Mapping[str, int] | None = None,
) -> ComposeStack:
    """Nothing of it runs yet."""
    return ComposeStack(
        project=f"prefixcache-{name}-{secrets.token_hex(3)}",
        port=free_port(),
        files=files,
        environment=environment or {},
        profiles=profiles,
        scale=dict(scale or {}),
    )


def build_images(*services: str) -> None:
    """Those of the compose file, or of some of its services."""
    stack_of("build").run("build", *services, timeout_s=_BUILD_TIMEOUT_S)


@contextmanager
def removed_afterwards(stack: ComposeStack) -> Iterator[ComposeStack]:
    """Shows the logs of its containers if the block fails, and removes them in any case."""
    try:
        yield stack
    except BaseException:
        print(stack.logs(), file=sys.stderr)
        raise
    finally:
        stack.down()
