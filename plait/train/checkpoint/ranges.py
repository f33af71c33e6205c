"""Ranges of whole tensors, in and out of files: who writes which, and which stored ones meet those wanted.

Every rank holds boxes of logical tensors. What several ranks hold is written by one of them. A rank that
reads takes what its boxes have in common with the stored ones, whoever wrote those, under whatever degrees.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.manifest import Stored, file_of, name_in_file
from plait.train.checkpoint.safetensors_folder import DTYPES, code_of, content, header
from plait.train.model.units import ShardBox

_AROUND = 300  # bytes of a part's entries in its file's header and in the manifest, at most

Tensors = Mapping[str, Mapping[str, Tensor]]
"""What is saved and loaded: kind (``weights``, ``exp_avg``, ...) -> name -> tensor that holds what is said of
that name."""


class Range(NamedTuple):
    """A box of the whole tensor ``key`` (``exp_avg/layers.0.attn.q.weight``), and its numbers."""

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    copy: bool
    """Another stage holds and saves it too: this one is read, not written."""


def ranges_of(tensors: Tensors, held: Mapping[str, Sequence[ShardBox]]) -> list[Range]:
    """What a rank holds that is not empty."""
    return [
        Range(f"{kind}/{one.piece.name}", one.piece.shape, one.box, one.of(tensor), one.piece.copy)
        for kind, by_name in tensors.items()
        for name, tensor in by_name.items()
        for one in held[name]
        if one.box.elements
    ]


class Writing(NamedTuple):
    """How a checkpoint is written. needed: bytes, at most."""

    tensors: dict[str, Stored]
    needed: int


def described(ranges: Sequence[Range]) -> list[Any]:
    """The ranges that a rank can write, as plain values."""
    return [(one.key, code_of(one.tensor.dtype), one.shape, *one.box) for one in ranges if not one.copy]


def assign(by_rank: Sequence[Sequence[Any]]) -> Writing:
    """Give every range to one of the ranks that hold it, as equal shares as can be; the same on all ranks.

    by_rank: what ``described`` gave on each.
    """
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    about: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, ranges in enumerate(by_rank):
        for key, dtype, shape, start, stop in ranges:
            holders[key, Box(tuple(start), tuple(stop))].append(rank)
            about[key] = dtype, tuple(shape)
    shares = [0] * len(by_rank)
    parts: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for (key, box), ranks in holders.items():
        rank = min(ranks, key=lambda rank: (shares[rank], rank))
        shares[rank] += box.elements * DTYPES[about[key][0]].itemsize
        parts[key].append((file_of(rank), box))
    for key, found in parts.items():
        covered = sum(box.elements for _, box in found)
        assert covered == math.prod(about[key][1]), f"{key}: the ranges leave gaps, or overlap"
    tensors = {key: Stored(*about[key], tuple(found)) for key, found in parts.items()}
    return Writing(tensors, sum(shares) + _AROUND * (len(holders) + len(by_rank)))


def write_ranges(folder: Path, rank: int, ranges: Sequence[Range], tensors: Mapping[str, Stored]) -> str | None:
    """Write this rank's share, down to the disk. Returns the file's name, None if there is none."""
    name = file_of(rank)
    mine = {name_in_file(key, box) for key, stored in tensors.items() for file, box in stored.parts if file == name}
    values = {name_in_file(one.key, one.box): one.tensor for one in ranges if not one.copy}
    values = {part: tensor for part, tensor in values.items() if part in mine}
    if not values:
        return None
    with (folder / name).open("xb") as stream:
        stream.write(header({part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in values.items()}))
        for tensor in values.values():
            stream.write(content(tensor))
        stream.flush()
        os.fsync(stream.fileno())
    return name


def read_ranges(folder: Path, ranges: Sequence[Range], tensors: Mapping[str, Stored]) -> None:
    """Fill the ranges from what was stored. Raises CheckpointError for what is not there, or is another
    tensor's."""
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def part(file: str, key: str, stored: Box) -> Any:
            path = folder / file
            try:
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(path, framework="pt"))
                found = opened[file].get_slice(name_in_file(key, stored))
            except SafetensorError as error:
                raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from None
            if tuple(found.get_shape()) != stored.shape or found.get_dtype() != tensors[key].dtype:
                raise CheckpointError(f"{path}: '{name_in_file(key, stored)}' has not the shape and dtype of its entry")
            return found

        for one in ranges:
            entry, filled = _entry(folder, one, tensors), 0
            for file, stored in entry.parts:
                common = one.box.meet(stored)
                if common.elements:
                    found = part(file, one.key, stored)[common.within(stored).slices]
                    one.tensor[common.within(one.box).slices].copy_(found)
                    filled += common.elements
            if filled != one.box.elements:
                raise CheckpointError(f"{folder}: holds '{one.key}' only in part, and {one.box} of it is needed")


def _entry(folder: Path, one: Range, tensors: Mapping[str, Stored]) -> Stored:
    """What is stored of a range's tensor."""
    stored = tensors.get(one.key)
    if stored is None:
        raise CheckpointError(
            f"{folder}: holds no '{one.key}'. It was saved by another model, or with less than is asked for"
        )
    if stored.shape != one.shape or stored.dtype != code_of(one.tensor.dtype):
        found, expected = (
            f"{list(shape)} of {str(DTYPES.get(dtype, dtype)).removeprefix('torch.')}"
            for shape, dtype in ((stored.shape, stored.dtype), (one.shape, code_of(one.tensor.dtype)))
        )
        raise CheckpointError(f"{folder}: '{one.key}' is {found}, expected {expected}")
    return stored
