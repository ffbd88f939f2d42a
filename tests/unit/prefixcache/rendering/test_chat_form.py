"""Content parts: texts as they are, everything else by the digest of what it refers to."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_form import Part, content_parts, joined_text

URL = "https://example.com/a.png"
DATA_URI = "data:image/png;base64,AAAA"


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def test_text_in_every_spelling() -> None:
    assert content_parts("Hi") == content_parts([{"type": "text", "text": "Hi"}]) == (Part("text", "Hi"),)
    assert content_parts(["Hi"]) == content_parts([{"text": "Hi"}]) == content_parts("Hi")
    for kind in ("input_text", "output_text"):
        assert content_parts([{"type": kind, "text": "Hi", "annotations": []}]) == content_parts("Hi")
    assert content_parts([{"type": "refusal", "refusal": "No"}]) == content_parts("No")
    assert content_parts(None) == content_parts("") == content_parts([]) == ()
    assert content_parts([{"type": "text", "text": None}]) == ()


@pytest.mark.parametrize(
    ("part", "kind", "reference"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, "image", URL),
        ({"type": "image_url", "image_url": URL}, "image", URL),
        ({"image_url": {"url": URL}}, "image", URL),
        ({"type": "input_image", "image_url": DATA_URI, "detail": "auto"}, "image", DATA_URI),
        ({"type": "image", "source": {"type": "url", "url": URL}}, "image", URL),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            "image",
            DATA_URI,
        ),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "audio", "UklG"),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", URL),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file", "file-1"),
        ({"type": "input_file", "file_data": DATA_URI}, "file", DATA_URI),
        ({"type": "image_url", "image_url": None, "uuid": "u1"}, "image", "u1"),
    ],
)
def test_anything_else_is_known_by_the_digest_of_its_reference(part: dict[str, Any], kind: str, reference: str) -> None:
    assert content_parts([part]) == (Part(kind, digest(reference)),)


def test_a_part_that_nobody_knows_is_known_by_all_that_it_says() -> None:
    first, again, other = content_parts(
        [
            {"type": "hologram", "a": 1, "b": 2},
            {"b": 2, "type": "hologram", "a": 1, "cache_control": {}},
            {"type": "hologram", "a": 1, "b": 3},
        ]
    )
    assert first == again != other
    assert first.kind == "hologram"


@pytest.mark.parametrize("content", [1, {"type": "text"}, [1], [[]], [{"type": 1}], [{"type": "text", "text": 5}]])
def test_odd_content_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequest):
        content_parts(content)


def test_joined_text_leaves_images_out() -> None:
    assert joined_text([{"type": "text", "text": "a"}, {"image_url": URL}, "b"], "\n") == "a\nb"
