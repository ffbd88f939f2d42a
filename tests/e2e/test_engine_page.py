"""docs/in-front-of-your-vllm.md, followed to the letter: its commands in its order, on ports of this machine's own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.cli.children import spawn
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "in-front-of-your-vllm.md"
PORTS = ("8000", "8001", "8002")
TIMEOUT_S = 120.0


def _blocks() -> list[str]:
    """Those that a reader is asked to run, but for the one that installs."""
    install, *blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "pip install" in install
    return blocks


def _here(script: str) -> str:
    """With free ports, and the programs of this environment instead of those just installed."""
    for port in PORTS:
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    script = script.replace(".venv/bin/python", sys.executable)
    return script.replace("proxy-env/bin/prefixcache", str(Path(sys.executable).parent / "prefixcache"))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each block printed."""
    folder = tmp_path_factory.mktemp("page")
    mark = "==== the next block ===="
    script = _here(f"\necho '{mark}'\n".join(_blocks())).replace("chat.json", str(folder / "chat.json"))
    command = ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p)' EXIT\n{script}"]
    log = folder / "log"
    with log.open("wb") as written:
        child = spawn(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=written)
        try:
            printed, _ = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()
    assert child.returncode == 0, log.read_text()[-3000:]
    return printed.decode().split(mark)


def test_the_engines_and_the_proxy_come_up(output: list[str]) -> None:
    assert '{"workers_ready":0,"engines_ready":' in output[1]


def test_the_second_of_two_equal_requests_is_cached_where_it_was_predicted(output: list[str]) -> None:
    first, second = (
        dict(re.findall(r"^(x-prefixcache-\S+): (\S+)\r$", part, re.MULTILINE)) for part in _answers(output)
    )
    assert first["x-prefixcache-reason"] == "no_prefix"
    assert second["x-prefixcache-reason"] == "longest_prefix"
    assert second["x-prefixcache-worker"] == first["x-prefixcache-worker"]
    assert int(second["x-prefixcache-hit-tokens"]) > 0
    cached = [json.loads(part.splitlines()[-1])["usage"]["prompt_tokens_details"] for part in _answers(output)]
    assert cached[0] == {"cached_tokens": 0}
    assert cached[1]["cached_tokens"] > 0


def _answers(output: list[str]) -> list[str]:
    answers = [part.strip() for part in output[2].split("HTTP/1.1 ") if part.strip()]
    assert [answer[:6] for answer in answers] == ["200 OK", "200 OK"]
    return answers


def test_statistics_health_and_metrics_say_what_the_page_says(output: list[str]) -> None:
    stats, health, *metrics = output[3].strip().splitlines()
    assert json.loads(stats)["total"]["since_start"]["hit_rate"] > 0.4
    engines = json.loads(health)["engines"]
    assert [(engine["up"], engine["capacity_blocks"], engine["models"]) for engine in engines] == [
        (True, 2000, ["my-model"]),
        (True, 2000, ["my-model"]),
    ]
    assert sum(line.startswith("prefixcache_engine_up{") and line.endswith(" 1.0") for line in metrics) == 2
    assert any(line.startswith("prefixcache_cached_tokens_total{") for line in metrics)


def test_other_paths_pass_through(output: list[str]) -> None:
    tokens, models = map(json.loads, output[4].strip().splitlines())
    assert tokens["tokens"] == list(b"high water")
    assert [card["id"] for card in models["data"]] == ["my-model"]


def test_every_engine_forgets(output: list[str]) -> None:
    assert output[5].strip().startswith("HTTP/1.1 200 OK")
    (told,) = re.findall(r"^x-prefixcache-engines: (.*)\r$", output[5], re.MULTILINE)
    assert [each.rpartition("=")[2] for each in told.split(", ")] == ["200", "200"]
