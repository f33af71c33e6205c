"""Headers of files of weights: what cannot be is refused, and no damage is a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import CheckpointError, PlaitError
from plait.train.checkpoint.weight_files import TensorHeader, read_header
from tests.train.checkpoint.weights import refused


def damaged(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A file of two tensors of eight bytes, with another header."""
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("a", 0), ("b", 8))}
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h["b"].update(data_offsets=[4, 12]), "'b' overlaps 'a'"),
        (lambda h: h["b"].update(data_offsets=[9, 17]), "'b' leaves a gap after 'a'"),
        (lambda h: h.pop("b"), "its tensors end at byte"),
        (lambda h: h["b"].update(data_offsets=[8, 1 << 40], shape=[1 << 38]), "to take"),
        (lambda h: h["b"].update(data_offsets=[8, 4]), "described wrongly"),
        (lambda h: h["b"].update(data_offsets=[-8, 0]), "described wrongly"),
        (lambda h: h["b"].update(shape=[-2]), "described wrongly"),
        (lambda h: h["b"].update(shape=[2.0]), "described wrongly"),
        (lambda h: h["b"].update(shape=[True, 2]), "described wrongly"),
        (lambda h: h["b"].update(shape=[1] * 100_000), "described wrongly"),
        (lambda h: h["b"].update(shape=[3]), "is said to take 8 bytes"),
        (lambda h: h["b"].update(dtype=7), "described wrongly"),
        (lambda h: h.update(b=None), "described wrongly"),
        (lambda h: h.update(__metadata__=[]), "__metadata__"),
        (lambda h: h["a"].update(data_offsets=[1, 9]), "tensor 'a' leaves a gap after the header"),
        (lambda h: (h.clear(), h.update(__metadata__={})), "its tensors end at byte"),
        (lambda h: h["b"].update(data_offsets=[8]), "described wrongly"),
        (lambda h: h["b"].update(data_offsets=[8, 12, 16]), "described wrongly"),
        (lambda h: h["b"].update(data_offsets=[1 << 62, 1 << 62]), "described wrongly"),
        (lambda h: h["b"].pop("dtype"), "described wrongly"),
    ],
)
def test_a_header_that_cannot_be(tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(change))
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert says in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 300


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged or cut short"),
        (b"\0\0\0", "its header would take 0 bytes, and the file has 3"),
        (b"\xff" * 64, "its header would take"),
        ((1 << 27).to_bytes(8, "little") + b"{}", "its header would take"),
        ((2).to_bytes(8, "little") + b"{", "its header would take"),
        ((2).to_bytes(8, "little") + b"[]", "no table"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4988030368\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert says in refused(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("C64", 8),
     ("I64", 8), ("I32", 4), ("I16", 2), ("I8", 1), ("U64", 8), ("U32", 4), ("U16", 2), ("U8", 1), ("BOOL", 1)],
)  # fmt: skip
def test_numbers_take_the_bytes_of_their_dtype(tmp_path: Path, dtype: str, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(lambda h: h["b"].update(dtype=dtype, shape=[8 // size])))
    first = file.stat().st_size - 16
    assert read_header(file)["b"] == TensorHeader(file, "b", dtype, (8 // size,), first + 8, first + 16)
    for wrong in (8 // size + 1, 8 // size - 1):
        file.write_bytes(damaged(lambda h, wrong=wrong: h["b"].update(dtype=dtype, shape=[wrong])))
        with pytest.raises(CheckpointError, match=f"of shape .* and dtype {dtype} is said to take 8 bytes"):
            read_header(file)


def test_of_a_dtype_that_is_not_known_no_size_is(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(lambda h: h["b"].update(dtype="F4", shape=[16])))
    assert read_header(file)["b"].shape == (16,)


@pytest.mark.parametrize(
    ("shape", "taken"), [([1] * 63 + [2], True), ([1] * 64 + [2], False), ([0], False), ([2, 1], True)]
)
def test_a_shape_has_a_few_dimensions(tmp_path: Path, shape: list[int], taken: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(lambda h: h["b"].update(shape=shape)))
    if taken:
        assert read_header(file)["b"].shape == tuple(shape)
    else:
        with pytest.raises(CheckpointError, match="tensor 'b'"):
            read_header(file)


def test_empty_tensors_and_metadata_stand_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    nothing = {"dtype": "F32", "shape": [0, 4], "data_offsets": [8, 8]}
    file.write_bytes(damaged(lambda h: h.update(c=nothing, __metadata__={"format": "pt"})))
    found = read_header(file)
    assert list(found) == ["a", "b", "c"] and found["c"].start == found["c"].stop == found["b"].start


@pytest.mark.parametrize(("length", "says"), [(64, "nested|JSON|no table"), (65, "65 bytes; at most 64 are read")])
def test_a_header_is_read_up_to_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, says: str
) -> None:
    monkeypatch.setattr("plait.train.checkpoint.weight_files.LONGEST", 64)
    file = tmp_path / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(length))
    if length == 64:
        assert read_header(file) == {}
    else:
        with pytest.raises(CheckpointError, match=says):
            read_header(file)


def test_what_is_no_file_is_said_to_be_that(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("none", "missing"), (".", "is a folder, no regular file"), ("pipe", "is a pipe, no regular")):
        with pytest.raises(CheckpointError, match=says):
            read_header(tmp_path / name)


def test_a_name_that_stands_twice_in_a_header(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "the key 'a' occurs twice" in refused(tmp_path)


WHOLE = damaged(lambda header: None)


@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), kept=st.integers(0, len(WHOLE)))
@settings(max_examples=300, deadline=None)
def test_no_damage_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, kept: int) -> None:
    file = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    content = bytearray(WHOLE)
    content[at] = byte
    file.write_bytes(content[:kept])
    try:
        found = read_header(file)
    except PlaitError:
        return
    assert kept == len(WHOLE)
    assert all(8 <= one.start <= one.stop <= kept for one in found.values())
