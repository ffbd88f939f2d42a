"""Settings of the worker program, checked."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount
from prefixcache.registry import WORKER_ID_PATTERN
from prefixcache.routing.order import Order
from worker.sim_costs import CostModel

_WILDCARDS = ("", "0.0.0.0", "::")


DEVICES = ("auto", "cpu", "cuda")
ATTENTIONS = ("auto", "cpu_sdpa", "torch_varlen", "sdpa_gather")
"""auto and the names of worker/attention/backends.py, which only a process with torch can import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens or is reached; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig:
    """A model from a folder, computed by torch."""

    model: Path
    device: str
    attention: str
    dtype: str
    kv_memory: MemoryAmount
    threads: int
    deterministic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulated engine."""

    model_name: str
    costs: CostModel

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that looks like a folder's."""
        if not self.model_name or "/" in self.model_name:
            raise ConfigError(
                f"--model is {self.model_name!r}; with --runner sim it only names the simulated model, "
                "which has a tokenizer of its own and reads no folder"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one worker is told at its start."""

    redis_url: str
    engine: TorchConfig | SimConfig
    worker_id: str
    listen: Address
    advertise: Address | None
    served_names: tuple[str, ...]
    """Empty for the name of the model."""
    order: Order
    """What goes first of the requests that wait."""
    step_s: float
    """What prefill chunks add to a step at most while others get their next token."""
    drain_s: float
    """What it has may take so long once it is told to end; then it is handed back."""
    num_blocks: int | None
    """None for what fits into the memory given, or for the simulation's own number."""
    max_model_len: int | None
    key_prefix: str
    worker_token: bytes | None = field(default=None, repr=False)
    """None serves every proxy."""


def parse_address(text: str, *, setting: str, least_port: int = 0) -> Address:
    """HOST:PORT, an IPv6 host in brackets. Raises ConfigError."""
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and least_port <= int(port) <= 65535
    if not separator or not is_port or (":" in host and not bracketed):
        raise ConfigError(f"{setting} is {text!r}; it must be HOST:PORT, such as 127.0.0.1:8001 or [::1]:8001")
    return Address(host=host[1:-1] if bracketed else host, port=int(port))


def step_s(step_ms: float) -> float:
    """Seconds of --step-ms. Raises ConfigError."""
    if not step_ms > 0:
        raise ConfigError(f"--step-ms is {step_ms:g}; it must be more than 0, inf for no limit in time")
    return step_ms / 1e3


def check_worker_id(name: str) -> str:
    """The name itself. Raises ConfigError: it stands in headers, labels and log lines."""
    if not re.fullmatch(WORKER_ID_PATTERN, name):
        raise ConfigError(f"--name is {name!r}; it must be 1 to 128 printable ASCII characters without blanks")
    return name


def unique_worker_id() -> str:
    """A name that no other worker has, also not an earlier one of the same process id."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def advertised(listening: Address, advertise: Address | None) -> Address:
    """What others connect to: as told, else where the server listens; a wildcard is replaced by the host's name."""
    if advertise is not None:
        return Address(host=advertise.host, port=advertise.port or listening.port)
    if listening.host in _WILDCARDS:
        return Address(host=socket.gethostname(), port=listening.port)
    return listening
