"""What is read of bodies: all of a prompt, else the model alone, and of what is no such thing nothing."""

from __future__ import annotations

import gc
import json

import pytest

from prefixcache.limits import MAX_BODY_COMMAS, MAX_BODY_LISTS
from proxy.engines.request_fields import BodyFields, read_fields

JSON = "application/json"
FORM = "multipart/form-data; boundary=b"


def test_a_prompt_is_read_as_a_whole_anything_else_by_its_model() -> None:
    body = b' \n{"model": "m", "messages": [1.0, "\\u00e4"], "stream": true}'
    whole = {"model": "m", "messages": [1.0, "ä"], "stream": True}
    assert read_fields(body, JSON, is_predicted=True) == BodyFields(model="m", parsed=whole)
    assert read_fields(body, JSON, is_predicted=False) == BodyFields(model="m")
    assert read_fields(body, "application/x-www-form-urlencoded", is_predicted=True).model == "m", "as curl -d says"


@pytest.mark.parametrize("is_predicted", [True, False])
@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"{}", None),
        (b'{"model": ""}', None),
        (b'{"model": 3}', None),
        (b'{"model": null}', None),
        (b'{"model": ["m"]}', None),
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"x": {"model": "inner"}}', None),
        (b'{"model": "\\u00e4/b"}', "ä/b"),
    ],
)
def test_models(body: bytes, model: str | None, is_predicted: bool) -> None:
    assert read_fields(body, JSON, is_predicted=is_predicted).model == model


@pytest.mark.parametrize("is_predicted", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b'"model"',
        b'{"model": "m"',
        b'{"model": "m"} x',
        b'{"model": "\xff"}',
        b'{"model": "m", "x": ' + b"[" * 100_000,
        b"\x00" * 100,
    ],
)
def test_what_is_no_object_is_nothing(body: bytes, is_predicted: bool) -> None:
    assert read_fields(body, JSON, is_predicted=is_predicted) == BodyFields()


@pytest.mark.parametrize("part", ["[]", '{"a":1}', "1,2,3"])
def test_of_a_prompt_of_too_many_parts_only_the_model_is_read(part: str) -> None:
    most = MAX_BODY_COMMAS // 3 if part == "1,2,3" else MAX_BODY_LISTS
    for count, is_read in ((most // 2, True), (most + 1, False)):
        body = ('{"model":"m","prompt":[' + ",".join([part] * count) + "]}").encode()
        fields = read_fields(body, JSON, is_predicted=True)
        assert (fields.model, fields.parsed is not None) == ("m", is_read)


def test_no_objects_are_made_of_what_stands_beside_the_model() -> None:
    body = json.dumps({"model": "m", "input": [[1, 2]] * 200_000}).encode()
    gc.collect()
    before = sum(gc.get_count())
    collections = sum(each["collections"] for each in gc.get_stats())
    assert read_fields(body, JSON, is_predicted=False).model == "m"
    assert sum(each["collections"] for each in gc.get_stats()) - collections <= 1
    assert sum(gc.get_count()) - before < 700


def _form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"


FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
FIELD = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1'


@pytest.mark.parametrize(
    "body",
    [
        _form(FIELD, FILE + b"RIFF\x00\xff"),
        _form(FILE + b"RIFF\r\n\r\n\xff" * 1000, FIELD),
        _form(FIELD.replace(b"Content-D", b"content-d")),
        _form(FIELD.replace(b"\r\n\r\n", b"\r\nContent-Type: text/plain\r\n\r\n")),
        _form(FILE + b'..name="model"..\r\n\r\nno\r\n', FIELD),
    ],
)
def test_the_model_of_a_form(body: bytes) -> None:
    assert read_fields(body, FORM, is_predicted=False) == BodyFields(model="whisper-1")
    assert read_fields(body, "MultiPart/Form-Data; boundary=b", is_predicted=False).model == "whisper-1"
    assert read_fields(body, "application/octet-stream", is_predicted=False) == BodyFields()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        _form(FILE + b"x"),
        _form(FIELD.replace(b"whisper-1", b"")),
        FIELD,
        b'--b\r\nContent-Disposition: form-data; name="model"',
        b'name="model"' * 100_000,
    ],
)
def test_a_form_without_a_model(body: bytes) -> None:
    assert read_fields(body, FORM, is_predicted=False) == BodyFields()
