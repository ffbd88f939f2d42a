"""How many KV blocks a worker's memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount, size_text

OTHER_USES = 0.10
"""Of all memory: activations, kernels and libraries. vLLM leaves as much unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one worker has."""

    weights_bytes: int | None
    """None where the weights are not at hand."""
    memory_bytes: int | None
    """All that it may take; None where nobody said."""
    num_workers: int
    """Workers that share the machine."""
    bytes_per_block: int

    def num_blocks(self, amount: MemoryAmount | None, available_bytes: Callable[[], int]) -> int:
        """Blocks that fit into an amount of KV memory; None takes what the memory leaves beside weights and OTHER_USES.

        A share is of what the weights leave: of the worker's memory where that is known, else its part of what is
        available on this machine, as `prefixcache up` divides it. Raises ConfigError when no block fits, or when it
        takes the size of weights that are not at hand.
        """
        if isinstance(amount, int):
            kv_bytes = amount
        elif amount is None:
            assert self.memory_bytes is not None
            kv_bytes = int(self.memory_bytes * (1 - OTHER_USES)) - self._weights()
        elif self.memory_bytes is not None:
            kv_bytes = amount.of(self.memory_bytes - self._weights())
        else:
            kv_bytes = amount.divided(self.num_workers).of(available_bytes() - self._weights())
        if kv_bytes < self.bytes_per_block:
            raise ConfigError(
                f"{max(kv_bytes, 0):,} bytes are left for the KV cache, less than one block of "
                f"{self.bytes_per_block:,} bytes: give the worker more memory"
            )
        return kv_bytes // self.bytes_per_block

    def checked(self, num_blocks: int) -> int:
        """The number itself. Raises ConfigError when so many blocks and the weights do not fit into the memory."""
        kv_bytes = num_blocks * self.bytes_per_block
        weights_bytes = self.weights_bytes or 0
        if self.memory_bytes is not None and kv_bytes + weights_bytes > self.memory_bytes:
            left = size_text(max(self.memory_bytes - weights_bytes, 0))
            raise ConfigError(
                f"a KV cache of {size_text(kv_bytes)} does not fit into --memory {size_text(self.memory_bytes)}: "
                f"weights of {size_text(weights_bytes)} leave {left}"
            )
        return num_blocks

    def _weights(self) -> int:
        if self.weights_bytes is None:
            raise ConfigError(
                "what the weights leave is not known without them: give --kv-memory as a size, or name a folder "
                "with safetensors weights"
            )
        return self.weights_bytes
