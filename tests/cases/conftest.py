"""The Valkey that the cases are played with."""

from tests.support.valkey import valkey, valkey_process

__all__ = ["valkey", "valkey_process"]
