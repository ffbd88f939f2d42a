"""The files that define how a model's text becomes token ids, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from prefixcache.errors import ConfigError
from prefixcache.limits import MAX_TOKENIZER_BYTES

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"

TOKENIZER_FILE_NAMES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE)
"""Every file that is read, fetched or served; only the first one must exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Names and bytes, the same on a worker and on every proxy that fetched them.

    Raises ConfigError for an unknown name, without tokenizer.json, and above limits.MAX_TOKENIZER_BYTES.
    """

    files: Mapping[str, bytes]
    fingerprint: str = field(init=False)
    """sha-256 hex over names in order and bytes, each length-framed."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.files) - set(TOKENIZER_FILE_NAMES))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not a tokenizer file; those are {', '.join(TOKENIZER_FILE_NAMES)}")
        if TOKENIZER_JSON not in self.files:
            raise ConfigError(f"the tokenizer files lack {TOKENIZER_JSON}")
        size = sum(map(len, self.files.values()))
        if size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"the tokenizer files have {size} bytes, over the limit of {MAX_TOKENIZER_BYTES}")
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        object.__setattr__(self, "fingerprint", _fingerprint(self.files))

    @classmethod
    def from_folder(cls, path: str | Path) -> TokenizerFiles:
        """Reads the tokenizer files of a model folder. Raises ConfigError naming the folder."""
        folder = Path(path)
        try:
            present = {name: folder / name for name in TOKENIZER_FILE_NAMES if (folder / name).is_file()}
            if TOKENIZER_JSON not in present:
                raise ConfigError(f"{folder} has no {TOKENIZER_JSON}")
            size = sum(file.stat().st_size for file in present.values())
            if size > MAX_TOKENIZER_BYTES:
                raise ConfigError(
                    f"{folder}: the tokenizer files have {size} bytes, over the limit of {MAX_TOKENIZER_BYTES}"
                )
            return cls(files={name: file.read_bytes() for name, file in present.items()})
        except OSError as error:
            raise ConfigError(f"{folder}: the tokenizer files cannot be read: {error}") from error


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        for item in (name.encode(), files[name]):
            digest.update(len(item).to_bytes(4, "little"))
            digest.update(item)
    return digest.hexdigest()
