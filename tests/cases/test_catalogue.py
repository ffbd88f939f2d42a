"""No case is forgotten: each has its tests, and its line in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cases.catalogue import CASES, Placeholders, calls

FOLDER = Path(__file__).parent
RESULTS = ("passes", "in part", "not played")


def _rows() -> dict[str, tuple[str, str]]:
    """Case -> result and remark, as the README's table has them."""
    found: dict[str, tuple[str, str]] = {}
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| RW-"):
            case_id, result, remark = (cell.strip() for cell in line.strip("|").split("|"))
            assert case_id not in found
            found[case_id] = (result, remark)
    return found


def test_the_readme_has_one_line_a_case() -> None:
    rows = _rows()
    assert list(rows) == list(CASES)
    for result, remark in rows.values():
        assert result in RESULTS
        assert remark or result == "passes", "what is left out has a reason"


def test_every_case_has_a_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("test_*.py")))
    tested = {f"RW-{number}" for number in re.findall(r"^async def test_rw_(\d+)_", sources, re.MULTILINE)}
    assert tested == {case_id for case_id, (result, _) in _rows().items() if result != "not played"}


def test_placeholders() -> None:
    fill = Placeholders(model="m", vocab_size=100)
    assert fill.filled({"model": "$MODEL", "n": 3, "list": ["$IDS:4", "kept: as it is"]}) == {
        "model": "m",
        "n": 3,
        "list": [*fill.ids(4), "kept: as it is"],
    }
    assert fill.filled("$FILL:50") == fill.filled("$FILL:50")
    assert fill.filled("$UNIQUE:50") != fill.filled("$UNIQUE:50")
    assert len(fill.filled("$FILL:50").split()) == 50
    assert fill.ids(4) != fill.ids(8)[:4]


@pytest.mark.parametrize(
    ("case_id", "count"), [("RW-001", 1), ("RW-005", 3), ("RW-090", 8), ("RW-092", 1), ("RW-128", 3)]
)
def test_requests_of_each_kind(case_id: str, count: int) -> None:
    found = calls(case_id, Placeholders(model="m"))
    assert len(found) == count
    assert all(b"$MODEL" not in call.content for call in found)
