"""What `--kv-memory` comes to once the weights are loaded, and a warning of a cache that cannot grow full."""

from __future__ import annotations

import logging

import torch

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount, MemoryShare, available_bytes, size_text

logger = logging.getLogger(__name__)


def kv_memory_bytes(amount: MemoryAmount, device: torch.device) -> int:
    """A size as it is, a share of what the device has left at this moment. Raises ConfigError if nobody says."""
    return amount.of(free_bytes(device)) if isinstance(amount, MemoryShare) else amount


def free_bytes(device: torch.device) -> int:
    """What this process may still take on the device. Raises ConfigError if nobody says."""
    if device.type == "cpu":
        return available_bytes()
    free, _total = torch.cuda.mem_get_info(device)
    return free


def warn_of_excess(kv_bytes: int, device: torch.device) -> None:
    """Main memory is committed as blocks are first written: a cache that is too large ends the process hours later."""
    try:
        free = free_bytes(device)
    except ConfigError:
        return
    if kv_bytes > free:
        logger.warning(
            "the KV cache may grow to %s, but only %s are available beside the weights: the system may end this "
            "process before the cache is full; give less KV memory, or a share such as --kv-memory 50%%",
            size_text(kv_bytes),
            size_text(free),
        )
