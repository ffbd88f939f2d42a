"""What `prefixcache up` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixcache.cli.up import _torch_engine, _worker_token, up
from prefixcache.errors import ConfigError
from prefixcache.worker_token import check_token
from tests.support.ports import free_port


@pytest.mark.parametrize("model", ["/models/one", "./one", ""])
def test_a_simulated_model_is_a_name(model: str) -> None:
    flags = ["--runner", "sim", "--model", model, "--port", str(free_port())]
    with pytest.raises(ConfigError, match="it only names the simulated model"):
        CliRunner().invoke(up, flags, catch_exceptions=False)


def test_an_unknown_runner_is_refused() -> None:
    result = CliRunner().invoke(up, ["--runner", "mlx"])
    assert result.exit_code == 2
    assert "'mlx' is not one of 'torch', 'sim'" in result.stderr


def test_its_workers_and_its_proxy_share_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXCACHE_WORKER_TOKEN", raising=False)
    made = [_worker_token(shared=False) for _ in range(2)]
    assert len(set(made)) == 2 and all(check_token(token) for token in made)
    assert _worker_token(shared=True) == "", "others who use that Redis would not know it"
    monkeypatch.setenv("PREFIXCACHE_WORKER_TOKEN", "the-one-of-the-environment")
    assert _worker_token(shared=False) == _worker_token(shared=True) == "the-one-of-the-environment"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(("kv_memory", "told"), [(None, None), ("1GiB", str(2**30)), ("50%", "12.5%")])
def test_workers_divide_a_share_and_each_has_a_size(folder: str, kv_memory: str | None, told: str | None) -> None:
    flags = _torch_engine(folder, kv_memory, 4).flags
    assert dict(zip(flags[::2], flags[1::2], strict=True)).get("--kv-memory") == told


def test_an_amount_of_memory_that_is_none_is_refused_at_once(folder: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory is 'half'"):
        _torch_engine(folder, "half", 2)
    flags = ["--runner", "sim", "--kv-memory", "1GiB", "--port", str(free_port())]
    with pytest.raises(ConfigError, match="--kv-memory means nothing with --runner sim"):
        CliRunner().invoke(up, flags, catch_exceptions=False)
