"""A plan as text and as one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefixcache.limits import MAX_RUNNING_REQUESTS
from prefixcache.memory import size_text
from prefixcache.planning.plan import ContextRow, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan and what was asked of it."""

    model: str
    dtype: str
    plan: Plan
    num_workers: int
    context_tokens: int
    shared_tokens: int

    def figures(self) -> dict[str, Any]:
        """For `--json`; everything but the number of workers is about one worker."""
        plan = self.plan
        return {
            "model": self.model,
            "dtype": self.dtype,
            "num_workers": self.num_workers,
            "kv_bytes_per_token": plan.bytes_per_token,
            "kv_bytes_per_block": plan.bytes_per_block,
            "block_size_tokens": plan.geometry.block_size,
            "num_blocks": plan.num_blocks,
            "num_tokens": plan.num_tokens,
            "kv_bytes": plan.kv_bytes,
            "weights_bytes": plan.weights_bytes,
            "memory_bytes": plan.memory_bytes,
            "left_bytes": plan.left_bytes,
            "longest_sequence_tokens": plan.longest_tokens,
            "shared_prefix_tokens": self.shared_tokens,
            "context": asdict(plan.row(self.context_tokens, self.shared_tokens)),
            "contexts": [asdict(row) for row in self._rows()],
        }

    def text(self) -> str:
        rows = self._rows()
        parts = [*self._facts(), "", *self._table(rows)]
        if max(row.num_requests_sharing or row.num_requests for row in rows) > MAX_RUNNING_REQUESTS:
            parts += ["", f"A worker runs at most {MAX_RUNNING_REQUESTS} requests at once; more of them wait."]
        return "\n".join(parts)

    def _rows(self) -> list[ContextRow]:
        return [self.plan.row(length, self.shared_tokens) for length in self.plan.contexts(self.context_tokens)]

    def _facts(self) -> list[str]:
        plan = self.plan
        weights = "not at hand" if plan.weights_bytes is None else size_text(plan.weights_bytes)
        lines = [
            ("model", f"{self.model}, {self.dtype}"),
            ("KV of a token", f"{plan.bytes_per_token:,} bytes: {self._arithmetic()}"),
            ("KV of a block", f"{plan.bytes_per_block:,} bytes: {plan.geometry.block_size} tokens"),
            ("weights", weights),
            ("KV cache", f"{size_text(plan.kv_bytes)}: {plan.num_blocks:,} blocks, {plan.num_tokens:,} tokens"),
            ("longest sequence", f"{plan.longest_tokens:,} tokens, of {plan.max_positions:,} that the model has"),
        ]
        if plan.memory_bytes is not None and plan.left_bytes is not None:
            purpose = "for the weights and all else" if plan.weights_bytes is None else "besides weights and KV cache"
            left = f"{size_text(plan.left_bytes)} left {purpose}"
            lines.append(("memory", f"{size_text(plan.memory_bytes)}: {left}"))
        row = plan.row(self.context_tokens, self.shared_tokens)
        lines.append((f"at {row.context_tokens:,} tokens", self._at_once(row)))
        width = max(len(name) for name, _ in lines)
        return [f"{name.ljust(width)}  {value}" for name, value in lines]

    def _at_once(self, row: ContextRow) -> str:
        if not row.num_requests:
            missing = (row.num_blocks - self.plan.num_blocks) * self.plan.bytes_per_block
            return f"no request fits: that takes {row.num_blocks:,} blocks, {size_text(missing)} more"
        said = f"{row.num_requests:,} requests at once"
        if row.num_requests_sharing is not None:
            said += f", {row.num_requests_sharing:,} that share their first {self.shared_tokens:,} tokens"
        if self.num_workers > 1:
            totals = [_count(self.num_workers, count) for count in _counts(row) if count is not None]
            said += f"; on {self.num_workers} workers {' and '.join(totals)}"
        return said

    def _arithmetic(self) -> str:
        """Layers x KV heads x (key + value) x bytes, for each kind of layer."""
        kinds = Counter(self.plan.layout.layers)
        terms = [
            f"{_of(count, 'layer')} x {_of(layer.num_kv_heads, 'KV head')} x ({layer.key_dim} + {layer.value_dim})"
            for layer, count in kinds.items()
        ]
        joined = " + ".join(terms)
        return f"{joined if len(terms) == 1 else f'({joined})'} x {self.plan.element_bytes} bytes"

    def _table(self, rows: Sequence[ContextRow]) -> list[str]:
        fleets = [1] if self.num_workers == 1 else [1, self.num_workers]
        head = ["context", "blocks", "KV memory", "requests at once", f"sharing {self.shared_tokens:,}"]
        lines = [[*head, *([f"on {self.num_workers} workers", "sharing"] if len(fleets) > 1 else [])]]
        for row in rows:
            counts = [_count(number, count) for number in fleets for count in _counts(row)]
            lines.append([f"{row.context_tokens:,}", f"{row.num_blocks:,}", size_text(row.kv_bytes), *counts])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _counts(row: ContextRow) -> tuple[int, int | None]:
    return row.num_requests, row.num_requests_sharing


def _count(num_workers: int, count: int | None) -> str:
    return "-" if count is None else f"{num_workers * count:,}"


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
