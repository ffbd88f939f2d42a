"""The alphabet of byte-level vocabularies."""

from __future__ import annotations


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
