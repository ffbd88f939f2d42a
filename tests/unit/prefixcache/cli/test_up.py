"""What `prefixcache up` refuses before it starts anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from prefixcache.cli.up import up
from prefixcache.errors import ConfigError
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
