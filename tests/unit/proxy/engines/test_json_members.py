"""Where members of an object stand, whatever strings are in it."""

from __future__ import annotations

import json

import pytest

from proxy.engines.json_members import members


@pytest.mark.parametrize(
    "value",
    ["", "\\", '"', '\\"', '\\\\"', '"}', "]{", "\\" * 5 + '"' * 3, {'a"': '\\"}'}, [["\\"], '"]', {}], 1.5, None, []],
)
def test_strings_end_where_they_end(value: object) -> None:
    data = json.dumps({"a": value, 'k"\\': value, "z": 0}, ensure_ascii=False).encode()
    found = list(members(data, 0))
    assert [member.key for member in found] == ["a", 'k"\\', "z"]
    assert [json.loads(data[member.value_begin : member.end]) for member in found] == [value, value, 0]
