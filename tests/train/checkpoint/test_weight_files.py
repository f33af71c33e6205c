"""What is wrong with the weights of a folder is said before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint.weight_files import check_weights
from tests.train.checkpoint.weights import (
    EMBEDDING,
    GPT,
    HEAD,
    LLAMA,
    TIED,
    Q,
    numbers,
    refused,
    write,
    write_index,
    write_shards,
)

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11,
    "max_position_embeddings": 8, "intermediate_size": 12, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("spec", [LLAMA, TIED, GPT], ids=["llama", "tied", "gpt"])
def test_whole_folders_are_taken(tmp_path: Path, spec: ModelSpec) -> None:
    write_shards(tmp_path, numbers(spec))
    assert not check_weights(tmp_path, spec)
    write(tmp_path / "model.safetensors", numbers(spec))
    assert check_weights(tmp_path, spec).lines() == [
        "passed over 1 indexes of shards, since model.safetensors stands beside them (the first: "
        f"{tmp_path / 'model.safetensors.index.json'})"
    ]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = numbers(LLAMA)
    where = write_shards(tmp_path, tensors)
    other = next(file for file in sorted(set(where.values()), reverse=True) if file != where[Q])
    part = {name: tensors[name] for name, file in where.items() if file == other}
    write(tmp_path / other, part | {Q: tensors[Q] + 1})
    assert f"{other}: holds tensor '{Q}', and model.safetensors.index.json says it is in {where[Q]}" in refused(
        tmp_path
    )


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = numbers(LLAMA)
    write(tmp_path / "model.safetensors", tensors | {Q.removeprefix("model."): tensors[Q]})
    assert "occurs twice" in refused(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    where = write_shards(tmp_path, numbers(LLAMA))
    write_index(tmp_path, {name: file for name, file in where.items() if name != Q})
    assert f"holds tensor '{Q}', and model.safetensors.index.json does not name it" in refused(tmp_path)


def test_a_tensor_that_an_index_promises_and_no_shard_has(tmp_path: Path) -> None:
    where = write_shards(tmp_path, numbers(LLAMA))
    write_index(tmp_path, where | {"more": where[Q]})
    assert f"{where[Q]}: has no tensor 'more', which model.safetensors.index.json says it has" in refused(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "null", "[]", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "{}",
     '{"weight_map": {"a": "model.safetensors", "b": 3}}',
     '{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}', '{"weight_map": {"a": ".."}}',
     '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": NaN}}'],
)  # fmt: skip
def test_an_index_that_cannot_be(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(tmp_path)


@pytest.mark.parametrize(("name", "says"), [
    ("", "is empty"), ("x" * 256, "has a name of 256 bytes"), ("a\0b", "holds a zero byte"), ("\ud800", "is not UTF-8"),
    ("a/b", "no name of a file beside it"), ("..", "no name of a file beside it"), (".", "no name of a file beside it"),
])  # fmt: skip
def test_an_index_whose_names_are_none(tmp_path: Path, name: str, says: str) -> None:
    where = write_shards(tmp_path, numbers(LLAMA))
    write_index(tmp_path, where | {Q: name})
    told = refused(tmp_path)
    assert "model.safetensors.index.json: " in told and says in told
    assert len(told) < 400 + len(str(tmp_path))


def test_a_head_equal_to_the_embedding_is_passed_over(tmp_path: Path) -> None:
    tensors = numbers(TIED)
    write(tmp_path / "model.safetensors", tensors | {HEAD: tensors[EMBEDDING]})
    over = check_weights(tmp_path, TIED)
    assert over.counts == {"heads equal to the word embedding, with which they are tied": 1}


def test_a_head_equal_to_the_embedding_in_another_dtype_is_passed_over(tmp_path: Path) -> None:
    tensors = numbers(TIED)
    upper = tensors[EMBEDDING].view("<u4") >> 16
    tensors[EMBEDDING] = (upper << 16).astype("<u4").view("<f4")  # what bf16 can say
    write(tmp_path / "model.safetensors", tensors | {HEAD: upper.astype("<u2")}, {HEAD: "BF16"})
    assert check_weights(tmp_path, TIED)


@pytest.mark.parametrize("at", [0, -1])
def test_a_head_that_differs_from_the_embedding_is_refused_and_the_advice_works(tmp_path: Path, at: int) -> None:
    tensors = numbers(TIED)
    head = tensors[EMBEDDING].copy()
    head.flat[at] += 1
    write(tmp_path / "model.safetensors", tensors | {HEAD: head})
    assert "Set model.tied_embeddings = false" in refused(tmp_path, TIED)
    check_weights(tmp_path, LLAMA)


def test_without_a_head_the_advice_works(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", numbers(TIED))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "needs model.tied_embeddings = true" in refused(tmp_path, LLAMA)
    check_weights(tmp_path, TIED)


def test_constants_of_older_files_are_counted(tmp_path: Path) -> None:
    more = {"transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), "<f4")}
    write(tmp_path / "model.safetensors", numbers(GPT) | more)
    assert check_weights(tmp_path, GPT).counts == {"tensors that layers compute themselves": 1}


@pytest.mark.parametrize("name", ["model.layers.0.attn.bias", "model.layers.0.self_attn.q_proj.bias", "score.weight"])
def test_what_has_no_place_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "model.safetensors", numbers(LLAMA) | {name: np.ones(8, "<f4")})
    assert f"'{name}' has no place in this model" in refused(tmp_path)


def test_what_is_no_folder_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path, says in (
        (tmp_path / "none", "none: no such folder"),
        (tmp_path / "file", "file is a file, and a folder is needed"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(JobError, match=says) as caught:
            check_weights(path, LLAMA)
        assert str(caught.value).startswith("train.init_from: ")
    assert "holds neither model.safetensors nor model.safetensors.index.json. Other formats can be" in refused(tmp_path)


@pytest.mark.parametrize(("dtype", "taken"), [("F64", True), ("F16", True), ("BF16", True), ("I64", False)])
def test_weights_are_floating_point_numbers(tmp_path: Path, dtype: str, taken: bool) -> None:
    tensors = numbers(LLAMA)
    as_written = {"F64": "<f8", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}[dtype]
    write(tmp_path / "model.safetensors", tensors | {Q: tensors[Q].astype(as_written)}, {Q: dtype})
    if taken:
        check_weights(tmp_path, LLAMA)
    else:
        assert f"tensor '{Q}' holds {dtype}, expected one of F64, F32, F16, BF16 (not quantised)" in refused(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = numbers(LLAMA)
    write(tmp_path / "model.safetensors", tensors | {Q: tensors[Q][:4]})
    assert f"tensor '{Q}' has shape [4, 8], expected [8, 8]" in refused(tmp_path)


@pytest.mark.parametrize("dtype", ["F64", "F16"])
def test_heads_are_compared_as_numbers_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Parts of three numbers, of 88; NaN is equal to NaN."""
    monkeypatch.setattr("plait.train.checkpoint.weight_files._AT_ONCE", 3)
    kind = {"F64": "<f8", "F16": "<f2"}[dtype]
    tensors = numbers(TIED)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype("<f2").astype("<f4")
    tensors[EMBEDDING].flat[5] = np.nan
    for at in (None, 0, 2, 3, 44, 87):
        head = tensors[EMBEDDING].astype(kind)
        if at is not None:
            head.flat[at] += 1
        write(tmp_path / "model.safetensors", tensors | {HEAD: head}, {HEAD: dtype})
        if at is None:
            check_weights(tmp_path, TIED)
        else:
            assert "differs from" in refused(tmp_path, TIED), at


def test_a_head_of_another_shape_or_of_whole_numbers_differs_from_the_embedding(tmp_path: Path) -> None:
    tensors = numbers(TIED)
    tensors[EMBEDDING] = np.zeros_like(tensors[EMBEDDING])
    write(tmp_path / "model.safetensors", tensors | {HEAD: tensors[EMBEDDING].T.copy()})
    assert "differs from" in refused(tmp_path, TIED)
    write(tmp_path / "model.safetensors", tensors | {HEAD: tensors[EMBEDDING].astype("<i4")}, {HEAD: "I32"})
    assert "differs from" in refused(tmp_path, TIED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 3}, "num_layers is 3 there and 2 in the job. Set model.num_layers=3, or name another"),
        ({"vocab_size": 12, "intermediate_size": 16},
         "vocab is 12 there and 11 in the job, ffn_hidden is 16 there and 12 in the job. "
         "Set model.vocab=12 and model.ffn_hidden=16, or"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 there and 10000.0 in the job"),
        ({"max_position_embeddings": 4096}, ""),  # nothing is learned of positions
        ({"tie_word_embeddings": True}, ""),  # the tensors tell
    ],
)  # fmt: skip
def test_a_config_of_another_model_says_what_to_set(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write(tmp_path / "model.safetensors", numbers(LLAMA))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    if says:
        assert says in refused(tmp_path)
    else:
        check_weights(tmp_path, LLAMA)


def test_positions_that_are_learned_have_a_length(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", numbers(GPT))
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16,
    }))  # fmt: skip
    assert "max_sequence is 16 there and 8 in the job. Set model.max_sequence=16" in refused(tmp_path, GPT)
