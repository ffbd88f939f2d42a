"""`prefixcache plan`: what it reads, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prefixcache.cli import plan as command
from prefixcache.cli.plan import plan
from prefixcache.errors import ConfigError
from tests.support.weight_files import write_weights

GIB = 2**30
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
BYTES_PER_TOKEN = 4 * 2 * 32 * 2
BYTES_PER_BLOCK = 16 * BYTES_PER_TOKEN
NUM_WEIGHTS = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(path / "model.safetensors", {"w": ("BF16", (NUM_WEIGHTS,))})
    return path


def figures(model: Path, *flags: str) -> dict[str, Any]:
    arguments = ["--model", str(model), "--dtype", "bfloat16", "--json", *flags]
    result = CliRunner().invoke(plan, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_a_folder_by_default(folder: Path) -> None:
    found = figures(folder)
    assert found["model"] == "a-model"
    assert (found["kv_bytes_per_token"], found["kv_bytes_per_block"]) == (BYTES_PER_TOKEN, BYTES_PER_BLOCK)
    assert found["num_blocks"] == 2 * GIB // BYTES_PER_BLOCK
    assert found["weights_bytes"] == 2 * NUM_WEIGHTS
    assert (found["memory_bytes"], found["left_bytes"]) == (None, None)
    assert found["context"]["context_tokens"] == 8_192
    assert [row["context_tokens"] for row in found["contexts"]] == [1024 * 2**power for power in range(6)]


def test_a_config_alone_has_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for model in (folder, folder / "config.json"):
        found = figures(model)
        assert (found["model"], found["weights_bytes"]) == ("a-model", None)


def test_a_config_may_have_any_name(folder: Path) -> None:
    found = figures((folder / "config.json").rename(folder / "small.json"))
    assert found["kv_bytes_per_token"] == BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("flags", "num_blocks"),
    [
        (["--num-blocks", "7"], 7),
        (["--kv-memory", "10MB"], 10**7 // BYTES_PER_BLOCK),
        (["--memory", "100MB"], (9 * 10**7 - 2 * NUM_WEIGHTS) // BYTES_PER_BLOCK),
        (["--memory", "100MB", "--kv-memory", "50%"], (10**8 - 2 * NUM_WEIGHTS) // 2 // BYTES_PER_BLOCK),
        (["--kv-memory", "50%"], (10**9 - 2 * NUM_WEIGHTS) // 2 // BYTES_PER_BLOCK),
        (["--kv-memory", "50%", "--workers", "4"], (10**9 - 2 * NUM_WEIGHTS) // 8 // BYTES_PER_BLOCK),
    ],
)
def test_how_large_the_cache_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], num_blocks: int
) -> None:
    monkeypatch.setattr(command, "available_bytes", lambda: 10**9)
    assert figures(folder, *flags)["num_blocks"] == num_blocks


def test_a_wider_type_takes_twice_as_much(folder: Path) -> None:
    found = figures(folder, "--dtype", "float32")
    assert (found["kv_bytes_per_token"], found["weights_bytes"]) == (2 * BYTES_PER_TOKEN, 4 * NUM_WEIGHTS)


def test_a_short_model_is_asked_about_its_longest(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 100}))
    found = figures(folder)
    assert [row["context_tokens"] for row in found["contexts"]] == [100]
    assert found["context"]["context_tokens"] == 100


def test_words_without_json(folder: Path) -> None:
    result = CliRunner().invoke(plan, ["--model", str(folder), "--context", "3000", "--shared-prefix", "2000"])
    assert result.exit_code == 0
    assert "at 3,000 tokens" in result.stdout and "sharing 2,000" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-memory", "much"], "--kv-memory is 'much'; it must be a size such as 2GiB"),
        (["--kv-memory", "100%"], "--kv-memory is '100%'; a share must be more than 0% and at most 95%"),
        (["--memory", "50%"], "--memory is '50%'; it must be a size"),
        (["--kv-memory", "1GiB", "--num-blocks", "3"], "--kv-memory and --num-blocks both say"),
        (["--kv-memory", "1GiB", "--memory", "1GiB"], r"KV cache of 1\.00 GiB does not fit into --memory 1\.00 GiB"),
        (["--context", "32769"], "--context 32,769 is over the 32,768 positions that the model has"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(plan, ["--model", str(folder), *flags], catch_exceptions=False)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a file; name a model folder"):
        CliRunner().invoke(plan, ["--model", str(tmp_path / "none")], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        CliRunner().invoke(plan, ["--model", str(tmp_path)], catch_exceptions=False)


def test_it_needs_no_torch(folder: Path) -> None:
    probe = (
        "import sys; from click.testing import CliRunner; from prefixcache.cli.plan import plan; "
        f"CliRunner().invoke(plan, ['--model', {str(folder)!r}], catch_exceptions=False); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"
