"""A model as the proxy serves it: what all workers of one namespace share."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.hashing import root_hash
from prefixcache.index.base import PrefixIndex
from prefixcache.registry import WorkerRecord
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import CacheGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One namespace with its tokenizer and its index."""

    name: str
    """The main served name: what metrics and statistics call it."""
    namespace: str
    model: str
    revision: str
    tokenizer_fingerprint: str
    vocab_size: int
    geometry: CacheGeometry
    renderer: Renderer
    index: PrefixIndex

    @classmethod
    def of(cls, record: WorkerRecord, renderer: Renderer, index: PrefixIndex) -> Model:
        return cls(
            name=main_name(record),
            namespace=record.namespace,
            model=record.model,
            revision=record.revision,
            tokenizer_fingerprint=record.tokenizer_fingerprint,
            vocab_size=record.vocab_size,
            geometry=record.geometry,
            renderer=renderer,
            index=index,
        )

    def root_hash(self, *, seed: int, cache_salt: str) -> int:
        return root_hash(
            seed=seed,
            model=self.model,
            revision=self.revision,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            cache_salt=cache_salt,
        )


def main_name(record: WorkerRecord) -> str:
    return record.served_names[0] if record.served_names else record.model
