"""Write ranges of whole tensors to files and read them back: assign writers and readers, and match
stored ranges with wanted ranges.

Every rank holds boxes of logical tensors. A box that several ranks hold is written by one of them.
A rank that reads takes the overlaps of its boxes with the stored boxes, whichever rank wrote them
under whatever parallel degrees. If several ranks need the same ranges, one reads them and sends
them to the other ranks. Otherwise a job with many data-parallel replicas would read the same bytes
once per replica from the shared file system (MegaScale, arXiv 2402.15627, 4.4: one worker reads and
broadcasts).
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.folder import Stored, file_of, name_in_file
from plait.train.model.units import ShardBox

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes by their codes in safetensors (https://huggingface.co/docs/safetensors)."""
_AROUND = 300  # upper bound in bytes of a part's entries in its file's header and in the manifest

Tensors = Mapping[str, Mapping[str, Tensor]]
"""The tensors to save or load: kind (``weights``, ``exp_avg``, ...) -> parameter name -> tensor."""


class Range(NamedTuple):
    """A box of the whole tensor ``key`` (``exp_avg/layers.0.attn.q.weight``), and its values."""

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    copy: bool
    """True if another stage holds and saves the box too: this one is read, not written."""


def code_of(dtype: torch.dtype) -> str:
    """Return safetensors' code of a dtype."""
    return next(code for code, known in DTYPES.items() if known == dtype)


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file with these tensors (dtype, shape), one after the
    other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code_of(dtype), "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # align the data
    return len(text).to_bytes(8, "little") + text


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def ranges_of(tensors: Tensors, held: Mapping[str, Sequence[ShardBox]]) -> list[Range]:
    """Return the non-empty ranges that a rank holds."""
    return [
        Range(f"{kind}/{one.piece.name}", one.piece.shape, one.box, one.of(tensor), one.piece.copy)
        for kind, by_name in tensors.items()
        for name, tensor in by_name.items()
        for one in held[name]
        if one.box.elements
    ]


class Writing(NamedTuple):
    """The tensors and parts of a checkpoint to write. needed: bytes on disk, at most."""

    tensors: dict[str, Stored]
    needed: int


def describe_held(ranges: Sequence[Range]) -> list[Any]:
    """Return the ranges that a rank can write, as plain values."""
    return [(one.key, code_of(one.tensor.dtype), one.shape, *one.box) for one in ranges if not one.copy]


def assign_writers(by_rank: Sequence[Sequence[Any]]) -> Writing:
    """Assign every range to one of the ranks that hold it, balancing bytes; the same result on all
    ranks.

    by_rank: the return values of ``describe_held``, by rank.
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
    """Write this rank's share to its file, and sync it to disk. Return the file's name; None if the
    share is empty."""
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
    """Fill the ranges from stored parts. Raises CheckpointError for a part that is missing, or has
    another shape or dtype."""
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
    """Return the tensor of a checkpoint's manifest that a range is part of. Raises CheckpointError
    if it is missing, or has another shape or dtype."""
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


# ---- one reader for all ranks that need a range ----

CHUNK = 64 << 20
"""Bytes of one message between ranks, at most, unless a tensor is larger."""

Part = tuple[str, Box]
"""A range of a stored tensor: (the tensor's key, the box)."""


class ReadGroup(NamedTuple):
    """Ranks that need the same ranges. ranks: the ranks, the one that reads the files first. parts:
    the ranges."""

    ranks: tuple[int, ...]
    parts: tuple[Part, ...]


def describe_wanted(ranges: Sequence[Range]) -> list[Any]:
    """Return the ranges that a rank needs, as plain values."""
    found = {(one.key, one.box): one.tensor.element_size() for one in ranges}
    return [(key, *box, size) for (key, box), size in found.items()]


def assign_readers(by_rank: Sequence[Sequence[Any]]) -> list[ReadGroup]:
    """Return every range once, grouped by the ranks that hold it. The reader of a group is the
    holder with the fewest bytes so far. The result is the same on all ranks.

    by_rank: the return values of ``describe_wanted``, by rank.
    """
    holders: dict[Part, list[int]] = defaultdict(list)
    sizes: dict[Part, int] = {}
    for rank, wanted in enumerate(by_rank):
        for key, start, stop, size in wanted:
            part = key, Box(tuple(start), tuple(stop))
            holders[part].append(rank)
            sizes[part] = part[1].elements * size
    together: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for part, ranks in holders.items():
        together[tuple(ranks)].append(part)
    read = [0] * len(by_rank)
    found: list[ReadGroup] = []
    for ranks, parts in together.items():
        reader = min(ranks, key=lambda rank: (read[rank], rank))
        read[reader] += sum(sizes[part] for part in parts)
        found.append(ReadGroup((reader, *(rank for rank in ranks if rank != reader)), tuple(parts)))
    return found


def distribute(groups: Sequence[ReadGroup], ranges: Sequence[Range], me: int, group: dist.ProcessGroup | None) -> None:
    """Send each share from its reader, which has read its parts, to the other ranks of the share;
    fill ``ranges``. Called by all ranks of ``group`` with the same shares."""
    own: dict[Part, list[Tensor]] = defaultdict(list)
    for one in ranges:
        own[one.key, one.box].append(one.tensor)
    for share in groups:
        if me not in share.ranks:
            continue
        for chunk in _chunks([own[part][0] for part in share.parts] if len(share.ranks) > 1 else []):
            _spread(chunk, share.ranks, me, group)
        for part in share.parts:
            for copy in own[part][1:]:
                copy.copy_(own[part][0])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of consecutive tensors of at most ``CHUNK`` bytes together (more if one tensor is
    larger), each list to be sent in one message."""
    chunk: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if chunk and filled + tensor.nbytes > CHUNK:
            yield chunk
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += tensor.nbytes
    if chunk:
        yield chunk


def _spread(tensors: Sequence[Tensor], ranks: Sequence[int], me: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors from the first of ``ranks`` to all others, along a binomial tree, in
    ceil(log2 n) rounds."""
    position, step = ranks.index(me), 1
    buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    views = list(zip(tensors, buffer.split([tensor.nbytes for tensor in tensors]), strict=True))
    if position == 0:
        for tensor, view in views:
            view.copy_(tensor.reshape(-1).view(torch.uint8))
    while step < len(ranks):
        if position < step and position + step < len(ranks):
            dist.send(buffer, group=group, group_dst=ranks[position + step])
        elif step <= position < 2 * step:
            dist.recv(buffer, group=group, group_src=ranks[position - step])
        step *= 2
    if position:
        for tensor, view in views:
            tensor.copy_(view.clone().view(tensor.dtype).view(tensor.shape))  # a view needs its dtype's alignment
