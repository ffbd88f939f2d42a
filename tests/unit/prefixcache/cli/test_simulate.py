"""`prefixcache simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prefixcache.cli.simulate import simulate
from prefixcache.errors import PrefixCacheError
from prefixcache.simulation.policies import NAMES
from tests.unit.prefixcache.simulation.traces import CHATS_FILE, CODING_FILE


def _out(*arguments: str | Path) -> str:
    result = CliRunner().invoke(simulate, ["--jobs", "1", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def _json(*arguments: str | Path) -> Any:
    return json.loads(_out("--json", *arguments))


def test_a_row_for_each_trace_size_and_policy() -> None:
    lines = _out(CHATS_FILE, CODING_FILE, "--workers", "2,4").splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [trace, policy, workers]
        for trace in ("mooncake_conversation_part", "coding_part")
        for workers in ("2", "4")
        for policy in ("eta", "round_robin", "pooled")
    ]


def test_json_is_the_same_for_the_same_seed() -> None:
    arguments = (
        CHATS_FILE,
        "--policy",
        "all",
        "--seeds",
        "2",
        "--workers",
        "3",
        "--minutes",
        "0-1",
        "--rate-error",
        "0.3",
    )
    content = _json(*arguments)
    assert [row["policy"] for row in content["rows"]] == list(NAMES)
    assert {tuple(row["seeds"]) for row in content["rows"]} == {(1, 2)}
    assert _json(*arguments) == content
    assert _json(*arguments, "--seed", "5") != content


CHANGES = (
    ("--event-lag-ms", "20000"),
    ("--load-lag-ms", "5000"),
    ("--rate-error", "1"),
    ("--kill", "1@60"),
    ("--hot-share", "0.9"),
    ("--overhead-ms", "200"),
    ("--itl-ms", "50"),
    ("--capacity", "0.5"),
    ("--load", "0.1"),
    ("--arrival-speed", "2"),
    ("--minutes", "0-5"),
    ("--order", "tail"),
    ("--order", "fifo"),
    ("--no-slices",),
    ("--no-steal",),
    ("--cache-tokens", "100000"),
)


def test_options_reach_the_fleet() -> None:
    arguments = (CODING_FILE, "--workers", "3", "--policy", "eta", "--proxies", "2", "--load", "0.2")
    plain = _json(*arguments)["rows"][0]
    for changed in CHANGES:
        assert _json(*arguments, *changed)["rows"][0]["ttft_mean_s"] != plain["ttft_mean_s"], changed
    late = (CHATS_FILE, "--policy", "least_ttft", "--workers", "4", "--load-lag-ms", "5000")
    seen = [_json(*late, "--proxies", number)["rows"][0]["ttft_mean_s"] for number in ("1", "4")]
    assert seen[0] != seen[1]
    meeting = [_json(CHATS_FILE, "--policy", "eta", *more)["rows"][0] for more in ((), ("--no-pending",))]
    assert meeting[0]["ttft_mean_s"] != meeting[1]["ttft_mean_s"]
    rate = _json(CODING_FILE, "--policy", "eta", "--prefill-rate", "9000")["rows"][0]["prefill_rate"]
    assert rate == 9000.0
    steps = [_json(CODING_FILE, "--policy", "eta", "--steps", *more)["rows"][0] for more in ((), ("--sim-speed", "3"))]
    assert steps[0]["ttft_mean_s"] > 2 * steps[1]["ttft_mean_s"]
    assert steps[1]["prefill_rate"] == pytest.approx(3 * steps[0]["prefill_rate"])


def test_the_fewest_workers() -> None:
    part = ("--minutes", "0-2")
    arguments = ("--find-workers", "p90<=4s", "--prefill-rate", "8000", "--cache-tokens", "200000", *part)
    content = _json(CHATS_FILE, "--policy", "eta,round_robin", *arguments)
    found = {each["policy"]: each["workers"] for each in content["found"]}
    assert 1 <= found["eta"] <= found["round_robin"] <= 64
    tried = {row["workers"]: row["ttft_p90_s"] for row in content["rows"] if row["policy"] == "round_robin"}
    assert tried[found["round_robin"]] <= 4.0 < tried[found["round_robin"] - 1]
    told = _out(CHATS_FILE, "--policy", "eta", *arguments).splitlines()[-1]
    assert told == f"mooncake_conversation_part, eta: p90 <= 4 s: {found['eta']} workers"
    told = _out(CHATS_FILE, "--policy", "eta", "--workers", "1-2", "--find-workers", "p90<=1ms", *arguments[2:])
    assert "p90 <= 0.001 s: not with 2 workers, which have " in told.splitlines()[-1]


def test_a_plot(tmp_path: Path) -> None:
    _out(CHATS_FILE, "--load", "0.5,0.9", "--plot", tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("absent.jsonl",), "absent.jsonl cannot be read as a trace"),
        ((CHATS_FILE, "--policy", "eta,best"), "no policy is called 'best'"),
        ((CHATS_FILE, "--workers", "0"), "--workers is '0'; it must be numbers from 1 to 1024"),
        ((CHATS_FILE, "--workers", "8-4"), "a range goes up"),
        ((CHATS_FILE, "--workers", "many"), "--workers is 'many'"),
        ((CHATS_FILE, "--capacity", "x"), "--capacity is 'x'"),
        ((CHATS_FILE, "--load", "0"), "--load is '0'"),
        ((CHATS_FILE, "--load", "0.5", "--prefill-rate", "9"), "--load sets the prefill rate"),
        ((CHATS_FILE, "--steps", "--prefill-rate", "9"), "--steps has a rate of its own"),
        ((CHATS_FILE, "--kill", "9"), "--kill is '9'; it must be like 3@600"),
        ((CHATS_FILE, "--kill", "9@5"), "worker 9 of 8 cannot die"),
        ((CHATS_FILE, "--minutes", "5"), "--minutes is '5'; it must be like 0-10"),
        ((CHATS_FILE, "--minutes", "600-700"), "mooncake_conversation_part has no request in that time"),
        ((CHATS_FILE, "--find-workers", "p99<=2s"), "--find-workers needs to know what a worker can do"),
        ((CHATS_FILE, "--plot", "plot.pdf"), "must end in .png or .svg"),
        ((CHATS_FILE, "--steps", "--sim-speed", "0"), "speed is 0"),
    ],
)
def test_what_is_refused(arguments: tuple[str | Path, ...], told: str) -> None:
    with pytest.raises(PrefixCacheError) as caught:
        _out(*arguments)
    assert told in str(caught.value)
