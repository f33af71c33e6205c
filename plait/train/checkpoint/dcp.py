"""Read folders of torch.distributed.checkpoint without executing their contents.

| file | content |
|---|---|
| ``.metadata`` | a pickle: each tensor's dtype, shape and chunks, and the position of each chunk |
| ``__RANK_N.distcp`` | the chunks, one after the other, each saved by ``torch.save``: a zip archive |

An archive's pickle, too, is read as plain values (``core.base.codec.pickles``); it describes the
layout of the numbers in ``data/0``. Format: torch 2.13, torch/distributed/checkpoint/metadata.py
and filesystem.py, torch/serialization.py.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.codec.pickles import Elsewhere, Named, Pairs, PickledObject, assert_kind, read
from plait.core.base.errors import CheckpointError
from plait.core.reshard.layouts import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

METADATA = ".metadata"
LARGEST = 1 << 30
"""Bytes of metadata, at most."""
_KINDS = "torch.distributed.checkpoint.metadata"
_STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16",
             "HalfStorage": "float16"}  # fmt: skip
"""torch's storage classes, and the dtypes of their numbers."""
_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""safetensors' codes of these dtypes."""


class Chunk(NamedTuple):
    """A box of a tensor, and its position: ``length`` bytes of a file, from ``offset`` on."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor in the folder ``file``. dtype: its code in safetensors."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the floating-point tensors of a folder, by name. Raises CheckpointError for a folder
    that cannot be read."""
    file = folder / METADATA
    with _explained(file):
        if file.stat().st_size > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        whole = _state(read(file.read_bytes()), "Metadata")
        storage: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in assert_kind(whole["storage_data"], Pairs).items:
            at = _state(index, "MetadataIndex")
            if at.get("offset") is not None:
                storage[at["fqn"], _size(at["offset"])] = _fields(info)
        found: dict[str, StoredTensor] = {}
        for name, about in assert_kind(whole["state_dict_metadata"], Pairs).named().items():
            if assert_kind(about, PickledObject).of != Named(_KINDS, "TensorStorageMetadata"):
                continue
            fields = _fields(about)
            dtype = assert_kind(fields["properties"], PickledObject).state[0]
            if not isinstance(dtype, Named) or dtype.module != "torch" or dtype.name not in _CODES:
                continue
            chunks = tuple(_chunk(name, one, storage) for one in fields["chunks"])
            found[name] = StoredTensor(folder, name, _CODES[dtype.name], _size(fields["size"]), chunks)
    return found


def _chunk(name: str, about: Any, storage: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    fields = _fields(about)
    start, sizes = _size(fields["offsets"]), _size(fields["sizes"])
    info = storage[name, start]
    if info.get("transform_descriptors") is not None:
        raise ValueError(f"'{name}' is compressed or encrypted ({info['transform_descriptors']}), which is not read")
    file = assert_kind(info["relative_path"], str)
    if os.path.basename(file) != file:
        raise ValueError(f"'{name}' lies in {file!r}, out of the folder")
    stop = tuple(a + b for a, b in zip(start, sizes, strict=True))
    return Chunk(Box(start, stop), file, assert_kind(info["offset"], int), assert_kind(info["length"], int))


def _fields(made: Any) -> dict[str, Any]:
    return assert_kind(assert_kind(made, PickledObject).state, Pairs).named()


def _state(made: Any, name: str) -> dict[str, Any]:
    if assert_kind(made, PickledObject).of != Named(_KINDS, name):
        raise ValueError(f"{made.of} in place of {name}")
    return _fields(made)


def _size(made: Any) -> tuple[int, ...]:
    """Return the shape in an unpickled torch.Size. Raises ValueError if it is none."""
    if assert_kind(made, PickledObject).of != Named("torch", "Size"):
        raise ValueError(f"{made.of} in place of a size")
    (sizes,) = made.args
    if not all(isinstance(one, int) and 0 <= one < 1 << 48 for one in assert_kind(sizes, tuple)):
        raise ValueError(f"{sizes} is no size")
    return sizes


# ---- numbers ----


def read_box(stored: StoredTensor, box: Box) -> Tensor:
    """Return a box of a tensor, in the stored dtype. Only the needed rows of each chunk are read.
    Raises CheckpointError for files that are damaged, or do not contain the box."""
    import torch  # here, since importing torch takes seconds, which checking a folder need not spend

    dtype: torch.dtype = getattr(torch, next(name for name, code in _CODES.items() if code == stored.dtype))
    folder, found, filled = stored.file, torch.empty(box.shape, dtype=dtype), 0
    for chunk in stored.chunks:
        common = box.meet(chunk.box)
        if not common.elements:
            continue
        with _explained(folder / chunk.file):
            inside = common.within(chunk.box)
            rows = range(inside.start[0], inside.stop[0]) if inside.start else range(1)
            part = _rows(folder / chunk.file, chunk, dtype, rows)
        found[common.within(box).slices] = part[(slice(None), *inside.slices[1:])] if inside.start else part
        filled += common.elements
    if filled != box.elements:
        raise CheckpointError(f"{folder}: holds '{stored.name}' only in part, and {box} of it is needed")
    return found


def _rows(file: Path, chunk: Chunk, dtype: torch.dtype, rows: range) -> Tensor:
    """Return some rows (dim 0) of a chunk as a tensor. Raises ValueError for an archive that is not
    as described."""
    import torch

    shape = chunk.box.shape
    row = math.prod(shape[1:]) * dtype.itemsize
    with file.open("rb") as stream:
        with zipfile.ZipFile(_Region(stream, chunk.offset, chunk.length)) as archive:
            members = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
            if members["data.pkl"].file_size > 1 << 16 or order != b"little":
                raise ValueError("no tensor as torch.save makes it on a little-endian machine")
            key = _numbers(read(archive.read(members["data.pkl"])), str(dtype).removeprefix("torch."), shape)
            data = members[f"data/{key}"]
        if data.compress_type != zipfile.ZIP_STORED or data.file_size < math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{data.file_size} bytes, and its metadata has more")
        stream.seek(chunk.offset + data.header_offset + 26)
        lengths = stream.read(4)
        skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        stream.seek(skip + rows.start * row, os.SEEK_CUR)
        numbers = bytearray(stream.read(len(rows) * row))
    if len(numbers) != len(rows) * row:
        raise ValueError("cut short")
    whole = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return whole.view(len(rows), *shape[1:]) if shape else whole.view(())


def _numbers(made: Any, dtype: str, shape: tuple[int, ...]) -> str:
    """Return the name of a saved tensor's storage. Raises ValueError unless the tensor is
    contiguous and starts at its storage's beginning."""
    if assert_kind(made, PickledObject).of != Named("torch._utils", "_rebuild_tensor_v2"):
        raise ValueError(f"{made.of} in place of a plain tensor")
    storage, offset, sizes, strides = made.args[:4]
    kind, typed, key, _, _ = assert_kind(storage, Elsewhere).what
    wanted = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    flat = all(a == b or size <= 1 for a, b, size in zip(strides, wanted, shape, strict=True))
    if kind != "storage" or _STORAGES.get(typed.name) != dtype or sizes != shape or offset or not flat:
        raise ValueError(f"a tensor of {typed.name} {sizes}, strides {strides}, from {offset} on; its metadata has "
                         f"{dtype} {shape}")  # fmt: skip
    return assert_kind(key, str)


class _Region(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._stream.seek(self._start + self._at)
        found = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"{file}: cannot be read as a checkpoint of torch.distributed.checkpoint: {said}"
        ) from None
