"""The plot of percentiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.cells import run_cells
from prefixcache.simulation.plot import require_plot, write_plot
from prefixcache.simulation.setup import Setup
from tests.unit.prefixcache.simulation.traces import chats, coding


@pytest.mark.parametrize(("name", "begin"), [("plot.png", b"\x89PNG"), ("plot.SVG", b"<?xml")])
def test_a_plot_is_written(tmp_path: Path, name: str, begin: bytes) -> None:
    cells = [
        Setup().cell(trace, policy, 4, load=load)
        for trace in (chats(), coding())
        for policy in ("eta", "round_robin")
        for load in (0.4, 0.8)
    ]
    path = tmp_path / name
    require_plot(path)
    rows = run_cells(cells, [1], jobs=1)
    write_plot(rows, path)
    assert path.read_bytes().startswith(begin)
    if path.suffix == ".SVG":
        first = path.read_bytes()
        write_plot(rows, path)
        assert path.read_bytes() == first


def test_it_is_told_beforehand_that_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the name must end in \.png or \.svg"):
        require_plot(tmp_path / "plot.pdf")
    with pytest.raises(ConfigError, match="there is no folder"):
        require_plot(tmp_path / "absent" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"install it with `pip install prefixcache\[plot\]`"):
        require_plot(tmp_path / "plot.png")
