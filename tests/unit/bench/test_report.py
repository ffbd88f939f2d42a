"""What a benchmark prints and writes, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.report import Floor, Table, report

HELD = Floor(what="held", value=1.0, most=1.0)
MISSED = Floor(what="missed", value=1.001, most=1.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".bench"


def test_a_table_has_every_column_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Table(title="costs", rows=[{"call": "empty"}, {"call": "match", "ms": (0.5, 1.0, 2.25)}]).show()
    assert capsys.readouterr().out.split("\n") == [
        "",
        "costs",
        " call                     ms",
        "empty                       ",
        "match  0.500 / 1.000 / 2.250",
        "",
    ]


@pytest.mark.parametrize(
    ("value", "verdict"), [(2.0, "held, very good"), (2.1, "held"), (3.0, "held"), (3.1, "MISSED")]
)
def test_the_verdict_on_a_floor(value: float, verdict: str) -> None:
    assert Floor(what="figure", value=value, most=3.0, very_good=2.0).verdict == verdict


def test_a_missed_floor_fails_the_run_and_all_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title="costs", rows=[{"call": "match", "ms": (0.5, 1.0, 2.25)}])
    with pytest.raises(SystemExit) as ended:
        report("some", [table], [HELD, MISSED], about={"seed": 7})
    assert ended.value.code == 1
    content = json.loads((folder / "some.json").read_text())
    assert content["seed"] == 7
    assert content["tables"] == [{"title": "costs", "rows": [{"call": "match", "ms": [0.5, 1.0, 2.25]}]}]
    assert [(floor["what"], floor["value"], floor["held"]) for floor in content["floors"]] == [
        ("held", 1.0, True),
        ("missed", 1.001, False),
    ]
    assert "missed: 1.001 (at most 1.000): MISSED" in capsys.readouterr().out


def test_floors_that_hold_or_are_not_judged_end_well(folder: Path) -> None:
    report("good", [], [HELD])
    report("smoke", [], [MISSED], judged=False)
    assert {path.name for path in folder.iterdir()} == {"good.json", "smoke.json"}
