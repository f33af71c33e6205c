"""A folder of safetensors files written one tensor at a time, so that nobody needs the memory of a whole
model.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header that says where
every tensor lies, the tensors. Shapes are known before any value, so the header can be written first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.train.checkpoint.weight_files import INDEX, SINGLE

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def code_of(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype."""
    return next(code for code, known in DTYPES.items() if known == dtype)


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """What a file begins with: where each tensor (dtype, shape) lies, one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code_of(dtype), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data begin aligned
    return len(text).to_bytes(8, "little") + text


def content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def check_no_model(folder: Path) -> None:
    """Raise CheckpointError if the folder holds a model already."""
    if found := next((file for file in folder.glob("model*.safetensors*") if file.suffix != ".partial"), None):
        raise CheckpointError(f"{found}: this folder holds a model already. Choose another folder, or remove it first")


class FolderWriter:
    """``config.json``, the weights in one file or several, their index. Files get their names at the end.

    shapes: tensor name -> shape, in the order of the later ``add`` calls. An error is kept in ``failure`` and
    makes everything after it a no-op, so that a rank that writes can go on taking part in what the others do.
    """

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int
    ) -> None:
        self.folder, self.dtype = folder, dtype
        self.failure: CheckpointError | None = None
        self._shards = _split(
            {name: (shape, math.prod(shape) * dtype.itemsize) for name, shape in shapes.items()}, shard_bytes
        )
        self._file: BinaryIO | None = None
        self._left: list[str] = []  # tensors that the open file still expects
        self._made: list[str] = []

    def begin(self, config: Callable[[], Mapping[str, Any]], files: Mapping[str, bytes]) -> None:
        """Make the folder, ``config.json``, ``files`` by name and, for several files of weights, the index.
        Fails if the folder holds a model already."""
        self._attempt(lambda: self._begin(config(), files))

    def add(self, name: str, value: Tensor) -> None:
        """The next tensor, in host memory."""
        self._attempt(lambda: self._add(name, value))

    def finish(self) -> None:
        """Give the files their names, the configuration last."""
        self._attempt(self._finish)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            work()
        except (OSError, CheckpointError) as error:
            self.failure = (
                error
                if isinstance(error, CheckpointError)
                else CheckpointError(f"{self.folder}: cannot be written: {error}")
            )
            if self._file is not None:
                self._file.close()
            for name in self._made:
                self._partial(name).unlink(missing_ok=True)

    def _begin(self, config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        check_no_model(self.folder)
        self._write("config.json", json.dumps(config, indent=2).encode() + b"\n")
        for name, data in files.items():
            self._write(name, data)
        if len(self._shards) > 1:
            total = sum(size for shard in self._shards.values() for _, size in shard.values())
            where = {name: file for file, shard in self._shards.items() for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            self._write(INDEX, json.dumps(index, indent=2).encode() + b"\n")

    def _add(self, name: str, value: Tensor) -> None:
        if self._file is None:
            self._open(next(file for file, shard in self._shards.items() if name in shard))
        assert self._file is not None
        assert self._left[0] == name, f"{name} added where {self._left[0]} was announced"
        self._file.write(content(value))
        self._left.pop(0)
        if not self._left:
            _close(self._file)
            self._file = None

    def _finish(self) -> None:
        assert not self._left, f"never added: {self._left}"
        for name in reversed(self._made):
            self._partial(name).rename(self.folder / name)

    def _open(self, file: str) -> None:
        self._file, self._left = self._create(file), list(self._shards[file])
        self._file.write(header({name: (self.dtype, shape) for name, (shape, _) in self._shards[file].items()}))

    def _write(self, name: str, data: bytes) -> None:
        file = self._create(name)
        file.write(data)
        _close(file)

    def _create(self, name: str) -> BinaryIO:
        self._made.append(name)
        return self._partial(name).open("wb")

    def _partial(self, name: str) -> Path:
        return self.folder / f"{name}.partial"


def _split(
    tensors: Mapping[str, tuple[tuple[int, ...], int]], shard_bytes: int
) -> dict[str, dict[str, tuple[tuple[int, ...], int]]]:
    """File name -> tensor name -> (shape, bytes)."""
    shards: list[dict[str, tuple[tuple[int, ...], int]]] = [{}]
    filled = 0
    for name, (shape, size) in tensors.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (shape, size)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _close(file: BinaryIO) -> None:
    """Close once the contents have reached the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
