"""Free TCP ports for programs that must be told theirs."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path

_FIRST = 20_000
_END = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
"""From here on the system itself gives ports to whoever asks for any."""
_numbers = itertools.count(random.randrange(_END - _FIRST))
"""Tests run in several processes at a time: each begins somewhere else, and comes back to a port as late as it can."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that nobody is given who does not ask for this one."""
    while True:
        port = _FIRST + next(_numbers) % (_END - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
