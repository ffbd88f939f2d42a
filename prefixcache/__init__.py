"""Core of the prefix-caching proxy: hashing, index, rendering and routing, without a server or a tensor."""

__version__ = "0.1.0"
