"""A model as an engine lists it under /v1/models."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

MOST_MODELS = 1_024
"""Of one engine; an engine with more adapters lists the first ones."""
MOST_NAME_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """One name, and what the engine tells of it; None for what it does not tell."""

    name: str
    max_model_len: int | None = None
    root: str | None = None
    """The model behind the name."""
    parent: str | None = None
    """The base model, where the name is an adapter of it."""
    created: int | None = None
    owned_by: str | None = None


def read_models(body: bytes) -> tuple[EngineModel, ...] | None:
    """The models of an answer to GET /v1/models, whatever else is in it; None if it is no list of models."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return None
    models = {model.name: model for entry in entries if (model := _model(entry)) is not None}
    return tuple(models.values())[:MOST_MODELS]


def _model(entry: object) -> EngineModel | None:
    if not isinstance(entry, dict):
        return None
    name = _text(entry.get("id"))
    if name is None:
        return None
    return EngineModel(
        name=name,
        max_model_len=_positive(entry.get("max_model_len")),
        root=_text(entry.get("root")),
        parent=_text(entry.get("parent")),
        created=_positive(entry.get("created")),
        owned_by=_text(entry.get("owned_by")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MOST_NAME_CHARS else None


def _positive(value: object) -> int | None:
    """A count that fits 62 bits; JSON numbers may be of any size."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value < 1 << 62 else None
