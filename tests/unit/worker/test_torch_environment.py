"""What is set for torch before it is imported."""

from __future__ import annotations

import os

import pytest

from worker import torch_environment

NAMES = ("OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the original is restored, also where it is none
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    torch_environment.settle()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert all(0 < int(os.environ[name]) < 1_024 for name in NAMES[1:])
