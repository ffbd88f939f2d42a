"""Attention over the paged KV cache, one backend a file."""
