"""What `prefixcache up` refuses before it starts anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from prefixcache.cli.up import _worker_token, up
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
