"""Fixtures of all tests that need a server."""

from tests.support.valkey import any_server, redis_process, valkey, valkey_process

__all__ = ["any_server", "redis_process", "valkey", "valkey_process"]
