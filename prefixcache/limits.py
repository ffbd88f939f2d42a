"""Every limit, timeout and interval of the path in one place. Seconds, bytes and counts as the names say."""

from __future__ import annotations

# --- what a client may send -------------------------------------------------------------------------------
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Agent prompts pass aiohttp's default of 1 MiB daily."""
MAX_MESSAGES = 16_384
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_NESTING = 64
"""Depth of lists and objects in a request body."""

# --- protocol v1 ------------------------------------------------------------------------------------------
MAX_FRAME_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 5.0
BEAT_INTERVAL_S = 0.5
MAX_STREAM_BACKLOG_BYTES = 1024 * 1024
"""Bytes a client may leave unread before its stream is cut."""

# --- registry, leases and index ---------------------------------------------------------------------------
LEASE_S = 5.0
LEASE_RENEWAL_S = 0.25
REGISTRY_READ_S = 0.25
INDEX_DEADLINE_S = 0.030
INDEX_WRITE_TIMEOUT_S = 1.0
REANNOUNCE_JITTER_S = 5.0
"""A new incarnation after a fault spreads its announcement over this time."""
MAX_APPLY_HASHES = 256

# --- tokenizer --------------------------------------------------------------------------------------------
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
TOKENIZE_INLINE_CHARS = 2_048
"""Uncached text up to this length is tokenized on the event loop (under 0.5 ms); more goes to a thread."""
TOKENIZE_THREADS = 2

# --- upstream ---------------------------------------------------------------------------------------------
CONNECT_TIMEOUT_S = 5.0
RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 2.0
