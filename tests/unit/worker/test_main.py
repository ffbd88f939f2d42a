"""The worker program's settings: which engine they make, and which do not go together."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import click
import pytest
import uvloop
from click.testing import CliRunner, Result

from prefixcache.limits import DRAIN_TIMEOUT_S, MAX_STEP_S
from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, byte_tokenizer_files
from worker import __main__ as program
from worker.config import SimConfig, WorkerConfig
from worker.runner import Runner
from worker.service import ServedModel
from worker.sim_costs import CostModel
from worker.sim_runner import DEFAULT_NUM_BLOCKS, SimRunner

REDIS = ["--redis", "redis://127.0.0.1:1"]


class Served:
    """What would have been served."""

    config: WorkerConfig
    model: ServedModel
    runner: Runner


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Stands in for everything that the program does to its process after the settings are read."""
    found = Served()

    def serve(config: WorkerConfig, model: ServedModel, runner: Runner, *_process: object) -> None:
        found.config, found.model, found.runner = config, model, runner

    def configure(**_settings: Any) -> None:
        """The test's own logging stays."""

    def handle(_number: int, _handler: Any) -> None:
        """The test's own signal handlers stay."""

    monkeypatch.setattr(program, "_serve", serve)
    monkeypatch.setattr(uvloop, "run", lambda _serving: 0)
    monkeypatch.setattr(logging, "basicConfig", configure)
    monkeypatch.setattr(signal, "signal", handle)
    return found


def run(*flags: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(program.main, [*REDIS, *flags], env=environment)


def test_a_simulated_worker_needs_no_further_setting(served: Served) -> None:
    assert run("--runner", "sim").exit_code == 0
    assert isinstance(served.runner, SimRunner)
    assert served.runner.limits.num_blocks == DEFAULT_NUM_BLOCKS
    assert (served.model.name, served.model.served_names) == ("sim", ("sim",))
    assert served.model.tokenizer.fingerprint == byte_tokenizer_files().fingerprint
    assert served.model.stop_token_ids == (BYTE_STOP_ID,)


def test_its_settings(served: Served) -> None:
    names = ["--model", "big", "--served-model-name", "one", "--served-model-name", "two"]
    limits = ["--num-blocks", "100", "--max-model-len", "1000"]
    costs = ["--sim-prefill-us", "3", "--sim-itl-per-1k-context-ms", "0.5", "--sim-speed", "inf"]
    assert run("--runner", "sim", *names, *limits, *costs).exit_code == 0
    assert (served.model.name, served.model.served_names) == ("big", ("one", "two"))
    assert (served.runner.limits.num_blocks, served.runner.limits.max_model_len) == (100, 1000)
    assert served.config.engine == SimConfig(
        model_name="big", costs=CostModel(prefill_us=3, itl_per_1k_context_ms=0.5, speed=float("inf"))
    )


def test_how_long_it_drains(served: Served) -> None:
    assert run("--runner", "sim").exit_code == 0
    assert served.config.drain_s == DRAIN_TIMEOUT_S
    assert run("--runner", "sim", "--drain-timeout", "0.5").exit_code == 0
    assert served.config.drain_s == 0.5
    for wrong in ("-1", "inf", "nan"):
        assert run("--runner", "sim", "--drain-timeout", wrong).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "seconds"), [([], MAX_STEP_S), (["--step-ms", "80"], 0.08), (["--step-ms", "inf"], inf)]
)
def test_what_a_step_may_take_beside_decodes(served: Served, flags: list[str], seconds: float) -> None:
    assert run("--runner", "sim", *flags).exit_code == 0
    assert served.config.step_s == seconds


def test_two_names_are_two_models(served: Served) -> None:
    namespaces = set()
    for name in ("big", "small"):
        run("--runner", "sim", "--model", name)
        namespaces.add(served.model.namespace(16))
    assert len(namespaces) == 2


def test_costs_come_from_the_environment_too(served: Served) -> None:
    assert run("--runner", "sim", environment={"PREFIXCACHE_SIM_SPEED": "4"}).exit_code == 0
    assert served.config.engine == SimConfig(model_name="sim", costs=CostModel(speed=4))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runner", "sim", "--dtype", "auto"], "--dtype means nothing with --runner sim; leave it away"),
        (["--runner", "sim", "--device", "cpu"], "--device means nothing with --runner sim; leave it away"),
        (["--runner", "sim", "--attention", "cpu_sdpa"], "--attention means nothing with --runner sim"),
        (["--runner", "sim", "--kv-memory", "1GiB"], "--kv-memory means nothing with --runner sim"),
        (["--runner", "sim", "--threads", "1"], "--threads means nothing with --runner sim"),
        (["--runner", "sim", "--deterministic"], "--deterministic means nothing with --runner sim"),
        (["--runner", "sim", "--model", "/models/one"], "--model is '/models/one'; with --runner sim it only names"),
        (["--runner", "sim", "--step-ms", "0"], "--step-ms is 0; it must be more than 0, inf for no limit in time"),
        (["--runner", "sim", "--step-ms", "nan"], "--step-ms is nan; it must be more than 0"),
        (["--runner", "sim", "--model", ""], "--model is ''; with --runner sim it only names"),
        (["--runner", "sim", "--sim-speed", "0"], "--sim-speed is 0.0; it must be more than 0"),
        (["--runner", "sim", "--sim-step-ms", "nan"], "--sim-step-ms is nan; it must be a finite number"),
        (["--runner", "sim", "--num-blocks", "2", "--max-model-len", "33"], "maximum model length 33 is over the 32"),
        (["--model", "/m", "--sim-speed", "1"], "--sim-speed means nothing with --runner torch"),
        (["--runner", "torch"], "--model is missing; it names the folder of the model to serve"),
    ],
)
def test_what_does_not_go_together_is_one_plain_line(served: Served, flags: list[str], message: str) -> None:
    result = run(*flags)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"worker: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert not hasattr(served, "runner")


def test_a_setting_from_elsewhere_is_named_with_its_place(served: Served, tmp_path: Path) -> None:
    result = run("--runner", "sim", environment={"PREFIXCACHE_DTYPE": "float32"})
    assert result.stderr.startswith("worker: PREFIXCACHE_DTYPE in the environment means nothing with --runner sim")
    file = tmp_path / "settings.toml"
    file.write_text('[worker]\nkv-memory = "1GiB"\n')
    result = run("--runner", "sim", "--config", str(file))
    assert result.stderr.startswith("worker: kv-memory in the configuration file means nothing with --runner sim")


def test_every_term_of_the_cost_model_has_a_flag_with_its_default() -> None:
    options = {option.name: option for option in program.main.params if isinstance(option, click.Option)}
    for name, default in {f"sim_{name}": getattr(CostModel(), name) for name in CostModel.__slots__}.items():
        assert options[name].default == default


def test_a_simulated_worker_loads_neither_torch_nor_a_tokenizer_library() -> None:
    heavy = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "safetensors")
    probe = (
        "import sys, worker.__main__ as w; from worker.sim_costs import CostModel; w.SimRunner(costs=CostModel()); "
        f"w.byte_tokenizer_files(); print([name for name in {heavy} if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


def test_the_worker_token_is_a_setting_that_is_never_printed(served: Served) -> None:
    assert run("--runner", "sim").exit_code == 0
    assert served.config.worker_token is None
    environment = {"PREFIXCACHE_WORKER_TOKEN": "the-token-of-this-test"}
    assert run("--runner", "sim", environment=environment).exit_code == 0
    assert served.config.worker_token == b"the-token-of-this-test"
    assert "the-token" not in repr(served.config)
    result = run("--runner", "sim", environment={"PREFIXCACHE_WORKER_TOKEN": "short"})
    assert result.exit_code == 2
    assert result.stderr.startswith("worker: the worker token has 5 bytes; it must have at least 16")


def test_the_order_is_a_setting_with_two_values(served: Served) -> None:
    told: dict[str, str] = {}
    for environment, order in (({}, "mean"), ({"PREFIXCACHE_ORDER": "tail"}, "tail")):
        assert run("--runner", "sim", environment=environment).exit_code == 0
        told[order] = served.config.order
    assert told == {"mean": "mean", "tail": "tail"}
    result = run("--runner", "sim", "--order", "shortest")
    assert result.exit_code == 2
    assert "'shortest' is not one of 'mean', 'tail'" in result.stderr
