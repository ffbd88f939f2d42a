"""What a model folder says about itself, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files, write_files
from worker.model_folder import ModelFolder

CONFIG = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 512, "eos_token_id": 5}
WEIGHTS = bytes(range(256)) * 2048


def _write_weights(path: Path, data: bytes = WEIGHTS, *, tensor: str = "weight") -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            tensor: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]},
        }
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model"
    path.mkdir()
    write_files(tiny_tokenizer_files(), path)
    _write_json(path / "config.json", CONFIG)
    _write_weights(path / "model.safetensors")
    return path


def test_a_whole_folder(folder: Path) -> None:
    _write_json(folder / "generation_config.json", {"eos_token_id": [7, 5]})
    model = ModelFolder.open(folder)
    assert model.path == folder
    assert model.name == "tiny-model"
    assert model.vocab_size == 300
    assert model.max_position_embeddings == 512
    assert model.tokenizer_files.fingerprint == tiny_tokenizer_files().fingerprint
    assert len(model.revision) == 16
    assert int(model.revision, 16) >= 0


class TestStopTokens:
    def test_every_file_adds_its_own(self, folder: Path) -> None:
        _write_json(folder / "generation_config.json", {"eos_token_id": [7, 5]})
        assert ModelFolder.open(folder).stop_token_ids == (7, 5, TINY_EOS_ID)

    def test_generation_config_may_be_missing_or_silent(self, folder: Path) -> None:
        assert ModelFolder.open(folder).stop_token_ids == (5, TINY_EOS_ID)
        _write_json(folder / "generation_config.json", {"eos_token_id": None})
        assert ModelFolder.open(folder).stop_token_ids == (5, TINY_EOS_ID)

    def test_eos_token_may_be_an_object(self, folder: Path) -> None:
        files = tiny_tokenizer_files(chat_template=None, config={"eos_token": {"content": "<|endoftext|>"}})
        (folder / "chat_template.jinja").unlink()
        write_files(files, folder)
        assert ModelFolder.open(folder).stop_token_ids == (5, 0)

    def test_the_turn_end_of_the_chat_template_stops_too(self, folder: Path) -> None:
        """Fine-tunes on a chat format often keep the base model's eos in every config."""
        write_files(tiny_tokenizer_files(config={"eos_token": "<|endoftext|>"}), folder)
        assert ModelFolder.open(folder).stop_token_ids == (5, 0, TINY_EOS_ID)

    def test_the_template_may_stand_in_the_tokenizer_config(self, folder: Path) -> None:
        settings = {"eos_token": None, "chat_template": "{{ messages[0].content }}<|im_end|>"}
        (folder / "chat_template.jinja").unlink()
        write_files(tiny_tokenizer_files(chat_template=None, config=settings), folder)
        assert ModelFolder.open(folder).stop_token_ids == (5, TINY_EOS_ID)

    def test_no_file_names_one(self, folder: Path) -> None:
        _write_json(folder / "config.json", {**CONFIG, "eos_token_id": None})
        (folder / "tokenizer_config.json").unlink()
        (folder / "chat_template.jinja").unlink()
        assert ModelFolder.open(folder).stop_token_ids == ()

    @pytest.mark.parametrize("declared", ["</s>", [2, "x"], -1, True])
    def test_a_declaration_that_is_no_id_is_refused(self, folder: Path, declared: Any) -> None:
        _write_json(folder / "generation_config.json", {"eos_token_id": declared})
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is"):
            ModelFolder.open(folder)


class TestRevision:
    def test_the_same_content_elsewhere_is_the_same_revision(self, folder: Path, tmp_path: Path) -> None:
        revision = ModelFolder.open(folder).revision
        moved = folder.rename(tmp_path / "another-name")
        assert ModelFolder.open(moved).revision == revision

    def test_config_header_size_and_weights_enter(self, folder: Path) -> None:
        revisions = {ModelFolder.open(folder).revision}
        _write_json(folder / "config.json", {**CONFIG, "rope_theta": 1e6})
        revisions.add(ModelFolder.open(folder).revision)
        _write_weights(folder / "model.safetensors", tensor="other")
        revisions.add(ModelFolder.open(folder).revision)
        _write_weights(folder / "model.safetensors", WEIGHTS + b"\0")
        revisions.add(ModelFolder.open(folder).revision)
        _write_weights(folder / "model.safetensors", WEIGHTS[::-1])
        revisions.add(ModelFolder.open(folder).revision)
        assert len(revisions) == 5

    def test_shards_are_those_the_index_names(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        _write_weights(folder / "part-1.safetensors")
        _write_weights(folder / "part-2.safetensors", WEIGHTS[::-1])
        _write_json(
            folder / "model.safetensors.index.json",
            {"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-1.safetensors"}},
        )
        revision = ModelFolder.open(folder).revision
        _write_weights(folder / "consolidated.safetensors")
        assert ModelFolder.open(folder).revision == revision
        (folder / "part-2.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"lacks part-2\.safetensors"):
            ModelFolder.open(folder)


class TestConfig:
    def test_other_families_names(self, folder: Path) -> None:
        _write_json(folder / "config.json", {"model_type": "gpt2", "vocab_size": 300, "n_positions": 128})
        assert ModelFolder.open(folder).max_position_embeddings == 128

    def test_a_nested_text_config_goes_first(self, folder: Path) -> None:
        nested = {"text_config": {"vocab_size": 310, "max_position_embeddings": 64, "eos_token_id": 9}, "vocab_size": 1}
        _write_json(folder / "config.json", nested)
        model = ModelFolder.open(folder)
        assert (model.vocab_size, model.max_position_embeddings) == (310, 64)
        assert model.stop_token_ids == (9, TINY_EOS_ID)

    @pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
    def test_a_missing_or_wrong_number_is_named(self, folder: Path, key: str) -> None:
        _write_json(folder / "config.json", {name: value for name, value in CONFIG.items() if name != key})
        with pytest.raises(ConfigError, match=f"has none of {key}"):
            ModelFolder.open(folder)
        _write_json(folder / "config.json", {**CONFIG, key: "many"})
        with pytest.raises(ConfigError, match=f"{key} is 'many'"):
            ModelFolder.open(folder)


class TestRefusals:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere does not exist"):
            ModelFolder.open(tmp_path / "nowhere")

    @pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
    def test_a_missing_file_is_named(self, folder: Path, missing: str) -> None:
        (folder / missing).unlink()
        with pytest.raises(ConfigError, match=f"tiny-model has no {missing}"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("content", ["{", "[]", "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000])
    def test_a_broken_config(self, folder: Path, content: str | bytes) -> None:
        (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=r"config\.json"):
            ModelFolder.open(folder)

    def test_weights_in_another_format(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match="must be converted to safetensors"):
            ModelFolder.open(folder)

    def test_weights_cut_short(self, folder: Path) -> None:
        whole = (folder / "model.safetensors").read_bytes()
        for size in (0, 7, 40, len(whole) // 2, len(whole) - 1):
            (folder / "model.safetensors").write_bytes(whole[:size])
            with pytest.raises(ConfigError, match="cut short"):
                ModelFolder.open(folder)

    def test_a_pointer_in_place_of_the_weights(self, folder: Path) -> None:
        """What a clone without git-lfs leaves behind."""
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        (folder / "model.safetensors").write_bytes(pointer)
        with pytest.raises(ConfigError, match="no safetensors file"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
    def test_an_index_without_a_map(self, folder: Path, index: Any) -> None:
        (folder / "model.safetensors").unlink()
        _write_json(folder / "model.safetensors.index.json", index)
        with pytest.raises(ConfigError, match="no usable weight_map"):
            ModelFolder.open(folder)

    def test_a_broken_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_bytes(b"{nothing")
        with pytest.raises(ConfigError, match="tokenizer of model folder"):
            ModelFolder.open(folder)
