"""Certificates of 127.0.0.1, made for a test by the openssl on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

VALID_DAYS = "2"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Paths of a certificate that is its own authority, and of its key. Raises FileNotFoundError without openssl."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ("-subj", "/CN=prefixcache test", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", VALID_DAYS, *subject)
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key
