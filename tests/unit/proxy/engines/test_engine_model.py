"""Lists of models, and what is no list of models."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.engine_model import MOST_MODELS, MOST_NAME_CHARS, EngineModel, read_models
from tests.support.engine_answers import LLAMA_CPP_MODELS, VLLM_MODELS


def test_vllm_with_an_adapter() -> None:
    base, adapter = read_models(VLLM_MODELS) or ()
    assert base == EngineModel(
        name="Qwen/Qwen3-8B", max_model_len=40_960, root="/models/qwen3", created=1_764_390_200, owned_by="vllm"
    )
    assert (adapter.name, adapter.parent, adapter.max_model_len) == ("sql-adapter", "Qwen/Qwen3-8B", None)


def test_llama_cpp() -> None:
    assert read_models(LLAMA_CPP_MODELS) == (EngineModel(name="m.gguf", created=1_764_390_200, owned_by="llamacpp"),)


def test_no_models_are_a_list_too() -> None:
    assert read_models(b'{"data": []}') == ()


@pytest.mark.parametrize(
    "body", [b"", b"Not Found", b"[]", b"null", b'{"data": {}}', b'{"models": []}', b"[" * 100_000, b'{"data": "\xff"}']
)
def test_what_is_no_list_of_models(body: bytes) -> None:
    assert read_models(body) is None


@pytest.mark.parametrize(
    "entry", ["m", 1, None, {}, {"id": None}, {"id": ""}, {"id": 5}, {"id": "x" * (MOST_NAME_CHARS + 1)}]
)
def test_entries_without_a_name_are_left_out(entry: object) -> None:
    assert read_models(msgspec.json.encode({"data": [entry, {"id": "m"}]})) == (EngineModel(name="m"),)


@pytest.mark.parametrize("length", [0, -1, 1.5, "4096", True, None, {}, [4096]])
def test_lengths_that_are_no_count(length: object) -> None:
    assert read_models(msgspec.json.encode({"data": [{"id": "m", "max_model_len": length}]})) == (
        EngineModel(name="m"),
    )


def test_a_number_of_any_size_is_no_length() -> None:
    assert read_models(b'{"data": [{"id": "m", "max_model_len": 1' + b"0" * 300 + b"}]}") in (
        (EngineModel(name="m"),),
        None,
    )


def test_the_list_is_bounded_and_a_name_stands_once() -> None:
    many = [{"id": f"m{number}"} for number in range(MOST_MODELS + 5)]
    assert len(read_models(msgspec.json.encode({"data": many})) or ()) == MOST_MODELS
    assert len(read_models(msgspec.json.encode({"data": [{"id": "m"}] * 3})) or ()) == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["id", "data", "max_model_len", "root", "parent", "created", "owned_by"])
            | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(_JSON.map(lambda value: {"data": value}) | _JSON)
def test_any_json_is_models_or_none(value: object) -> None:
    models = read_models(msgspec.json.encode(value))
    assert models is None or all(isinstance(model.name, str) and model.name for model in models)


@given(st.binary(max_size=60))
def test_any_bytes_are_models_or_none(body: bytes) -> None:
    read_models(body)
