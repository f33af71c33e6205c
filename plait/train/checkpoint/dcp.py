"""Folders of torch.distributed.checkpoint, read and written without running what lies in them.

| file | what it is |
|---|---|
| ``.metadata`` | a pickle: of each tensor its dtype, shape and chunks, and where each chunk lies |
| ``__RANK_N.distcp`` | one after the other, what ``torch.save`` makes of each chunk: a zip archive |

Of an archive the pickle is read as values too (``symbolic_pickle``): how the numbers lie in ``data/0``.
Format: torch 2.13, torch/distributed/checkpoint/metadata.py and filesystem.py, torch/serialization.py."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.errors import CheckpointError
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.symbolic_pickle import Elsewhere, Named, Pairs, PickledObject, assert_kind, read, write

if TYPE_CHECKING:
    import torch
    from torch import Tensor

METADATA = ".metadata"
LARGEST = 1 << 30
"""Bytes of metadata, at most."""
_KINDS = "torch.distributed.checkpoint.metadata"
_STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16",
             "HalfStorage": "float16"}  # fmt: skip
"""Of torch, and the numbers that are in them."""


class Chunk(NamedTuple):
    """A box of a tensor, and where it lies: ``length`` bytes of a file, from ``offset`` on."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor of a folder. dtype: torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of floating-point numbers, by name. Raises CheckpointError for a folder that cannot be
    read."""
    file = folder / METADATA
    with _explained(file):
        if file.stat().st_size > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        whole = _state(read(file.read_bytes()), "Metadata")
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in assert_kind(whole["storage_data"], Pairs).items:
            at = _state(index, "MetadataIndex")
            if at.get("offset") is not None:
                places[at["fqn"], _size(at["offset"])] = _fields(info)
        found: dict[str, StoredTensor] = {}
        for name, about in assert_kind(whole["state_dict_metadata"], Pairs).named().items():
            if assert_kind(about, PickledObject).of != Named(_KINDS, "TensorStorageMetadata"):
                continue
            fields = _fields(about)
            dtype = assert_kind(fields["properties"], PickledObject).state[0]
            if not isinstance(dtype, Named) or dtype.module != "torch" or dtype.name not in _STORAGES.values():
                continue
            chunks = tuple(_chunk(name, one, places) for one in fields["chunks"])
            found[name] = StoredTensor(name, dtype.name, _size(fields["size"]), chunks)
    return found


def _chunk(name: str, about: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Chunk:
    fields = _fields(about)
    start, sizes = _size(fields["offsets"]), _size(fields["sizes"])
    info = places[name, start]
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
    """A torch.Size."""
    if assert_kind(made, PickledObject).of != Named("torch", "Size"):
        raise ValueError(f"{made.of} in place of a size")
    (sizes,) = made.args
    if not all(isinstance(one, int) and 0 <= one < 1 << 48 for one in assert_kind(sizes, tuple)):
        raise ValueError(f"{sizes} is no size")
    return sizes


# ---- numbers ----


def read_box(folder: Path, stored: StoredTensor, box: Box) -> Tensor:
    """A box of a tensor, in its own dtype. Of a chunk only the rows that are needed are read."""
    import torch  # here, so that a folder is looked at without the seconds this import takes

    dtype: torch.dtype = getattr(torch, stored.dtype)
    found, filled = torch.empty(box.shape, dtype=dtype), 0
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
    """Some rows of a chunk."""
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
    """The name of the storage of a saved tensor whose numbers lie one after the other from its beginning."""
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
    """Some bytes of a file, as a file."""

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


# ---- writing ----

DATA = "__0_0.distcp"


def write_folder(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """A folder of whole tensors, one after the other in one file."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, PickledObject] = {}
    places: list[tuple[PickledObject, PickledObject]] = []
    with (folder / DATA).open("wb") as stream:
        for name, tensor in tensors:
            offset, saved = stream.tell(), io.BytesIO()
            torch.save(tensor.detach().cpu().contiguous().clone(), saved)
            stream.write(saved.getbuffer())
            about[name] = _described(tensor)
            index = {"fqn": name, "offset": _made_size([0] * tensor.ndim), "index": 0}
            place = {"relative_path": DATA, "offset": offset, "length": stream.tell() - offset}
            info = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            places.append((PickledObject(Named(_KINDS, "MetadataIndex"), (), index), PickledObject(info, (), place)))
        stream.flush()
        os.fsync(stream.fileno())
    planned = {name: (name,) for name in about}
    whole = {"state_dict_metadata": about, "planner_data": planned, "storage_data": Pairs([*places]),
             "storage_meta": None, "version": "1.0.0"}  # fmt: skip
    partial = folder / f"{METADATA}.partial"
    partial.write_bytes(write(PickledObject(Named(_KINDS, "Metadata"), (), whole)))
    partial.rename(folder / METADATA)


def _made_size(sizes: Sequence[int]) -> PickledObject:
    return PickledObject(Named("torch", "Size"), (tuple(sizes),))


def _described(tensor: Tensor) -> PickledObject:
    layout = PickledObject(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = PickledObject(Named(_KINDS, "_MEM_FORMAT_ENCODING"), (0,))
    dtype = Named("torch", str(tensor.dtype).removeprefix("torch."))
    properties = PickledObject(Named(_KINDS, "TensorProperties"), (), (dtype, layout, False, memory, False))
    chunk = {"offsets": _made_size([0] * tensor.ndim), "sizes": _made_size(tensor.shape)}
    fields = {"properties": properties, "size": _made_size(tensor.shape),
              "chunks": [PickledObject(Named(_KINDS, "ChunkStorageMetadata"), (), chunk)]}  # fmt: skip
    return PickledObject(Named(_KINDS, "TensorStorageMetadata"), (), fields)
