"""How many clients the edge takes at once, and the most memory that they hold of it.

A request that waits for its key check holds its head alone. From then on it is in hand and counted over all processes,
also those of older lists: it holds its head twice, as it came and as it goes on, the begin of its body, and a piece of
its answer; what follows of its body lies in EDGE_TMP_DIR until the answer begins. Where that folder is a tmpfs it is
memory of the container, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.limits import (
    EDGE_ANSWER_BUFFER_BYTES,
    EDGE_BODY_BUFFER_BYTES,
    EDGE_HEADER_BUFFERS,
    MAX_HEADER_LINE_BYTES,
)

_HEAD_BYTES = EDGE_HEADER_BUFFERS * MAX_HEADER_LINE_BYTES
_REQUEST_BYTES = 10 * 1024
"""Of nginx, beside buffers."""
_SOCKET_BYTES = 4 * 1024
"""Of the kernel, without what is in it."""
WAITING_BYTES = _HEAD_BYTES + _REQUEST_BYTES + _SOCKET_BYTES
IN_HAND_BYTES = (
    2 * _HEAD_BYTES + EDGE_BODY_BUFFER_BYTES * 5 // 4 + EDGE_ANSWER_BUFFER_BYTES + _REQUEST_BYTES + 2 * _SOCKET_BYTES
)
"""A body that is longer than its buffer by less than a quarter is held whole."""
_SPARE = 64
"""Connections of one process that are none of a client: what it listens on, and idle ones to proxies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    num_processes: int
    num_files: int
    """That each process may open: one for each connection, and one for a body."""
    num_requests: int
    """In hand, over all processes."""
    num_connections: int
    """Of each process, to clients and to proxies."""

    @property
    def most_bytes(self) -> int:
        """Of one list's processes, with every request in hand and nothing but long heads on all other connections."""
        others = self.num_processes * self.num_connections - 2 * self.num_requests
        return self.num_requests * IN_HAND_BYTES + others * WAITING_BYTES


def capacity(*, num_clients: int, num_processes: int, num_files: int) -> Capacity:
    """Fewer requests than `num_clients` where processes may not open enough files."""
    # The kernel spreads clients over the processes, a few more to one than to the other.
    num_connections = -(-2 * num_clients * 9 // (8 * num_processes)) + _SPARE
    if num_connections > num_files * 2 // 3:
        num_connections = num_files * 2 // 3
        num_clients = min(num_clients, max(1, (num_connections - _SPARE) * num_processes * 8 // (2 * 9)))
    return Capacity(
        num_processes=num_processes,
        num_files=num_files,
        num_requests=num_clients,
        num_connections=num_connections,
    )
