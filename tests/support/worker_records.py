"""Worker records for tests that need no worker."""

from __future__ import annotations

import msgspec

from prefixcache.protocol import MAJOR, MINOR
from prefixcache.registry import WorkerRecord

_RECORD = WorkerRecord(
    worker_id="w1",
    address="127.0.0.1:1",
    namespace="0123456789abcdef",
    incarnation=1,
    protocol=(MAJOR, MINOR),
    model="tiny",
    revision="r1",
    served_names=("tiny",),
    tokenizer_fingerprint="f" * 64,
    vocab_size=512,
    max_model_len=4096,
    stop_token_ids=(2,),
    block_size=16,
    stride=4,
    num_blocks=1024,
    kv_bytes_per_token=64,
    started_at=1.0,
)


def worker_record(**fields: object) -> WorkerRecord:
    """A sound record with `fields` in place of the usual ones."""
    return msgspec.structs.replace(_RECORD, **fields)
