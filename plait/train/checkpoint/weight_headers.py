"""Headers of safetensors files (https://huggingface.co/docs/safetensors): which tensors a file holds, and
where, without reading one.

A file is 8 bytes of header length, a JSON header, the data. The header gives every tensor's dtype, shape and
the range of its bytes. Refused, each with a sentence: a header that is longer than the file or ``LONGEST``,
that is no table, names a tensor twice, or has a shape, dtype or range that cannot be; ranges that overlap,
leave a gap, or do not end where the file ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import CheckpointError
from plait.core.base.files import kind_of, reason_of
from plait.core.base.numbers import shown

LONGEST = 32 << 20
"""Bytes of a header: a tensor takes about a hundred."""
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a number; of other dtypes the size is not checked."""
MOST_DIMS = 64
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorHeader:
    """A tensor of a file: its name there, dtype as safetensors calls it, shape, and the range of its bytes,
    from the start of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Every tensor of a safetensors file, by name. Raises CheckpointError for a file that is not there or is
    damaged."""
    try:
        if (kind := kind_of(file)) != "file":
            raise CheckpointError(f"{file}: {f'is a {kind}, no regular file' if kind else 'missing'}")
        size = file.stat().st_size
        with open(file, "rb") as stream:
            text = _header_of(stream.read(len(_LFS)), size)
            stream.seek(8)
            return _tensors(file, stream.read(text), size - 8 - text)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {reason_of(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: damaged or cut short: {error}. Fetch it again") from None


def _header_of(begin: bytes, size: int) -> int:
    """Bytes of the header of a file that begins so. Raises ValueError for one that cannot be."""
    if begin.startswith(_LFS):
        raise ValueError("it is a pointer of Git LFS in place of the file, which git lfs pull fetches")
    length = int.from_bytes(begin[:8], "little")
    if length > size - 8:
        raise ValueError(f"its header would take {length} bytes, and the file has {size}")
    if length > LONGEST:
        raise ValueError(f"its header would take {length} bytes; at most {LONGEST} are read")
    return length


def _tensors(file: Path, text: bytes, data: int) -> dict[str, TensorHeader]:
    """The header's tensors, checked against ``data``, the bytes behind it."""
    header = parse_table(text, unique=True)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("its __metadata__ is no table")
    first = 8 + len(text)
    found = {name: _stored(file, name, entry, first) for name, entry in header.items()}
    end, before = first, ""
    for one in sorted(found.values(), key=lambda one: (one.start, one.stop)):
        if one.start != end:
            how = "overlaps" if one.start < end else "leaves a gap after"
            raise ValueError(f"tensor {shown(one.name)} {how} {shown(before) if before else 'the header'}")
        end, before = one.stop, one.name
    if end != first + data:
        raise ValueError(f"its tensors end at byte {end}, and the file at {first + data}")
    return found


def _stored(file: Path, name: str, entry: Any, first: int) -> TensorHeader:
    """One entry of a header. first: where the data begin."""
    table = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape, ends = (table.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(ends) or len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(f"tensor {shown(name)} is described wrongly: {shown(entry)}")
    taken, needed = ends[1] - ends[0], math.prod(shape) * ITEMSIZE.get(dtype, 0)
    if dtype in ITEMSIZE and taken != needed:
        raise ValueError(
            f"tensor {shown(name)} of shape {shown(shape)} and dtype {dtype} is said to take {taken} bytes"
        )
    return TensorHeader(file, name, dtype, tuple(shape), first + ends[0], first + ends[1])


def _whole(values: Any) -> TypeGuard[list[int]]:
    """Whether these are numbers from 0 on, none of which is larger than a file."""
    if not isinstance(values, list):
        return False
    numbers = cast("list[Any]", values)
    return len(numbers) <= MOST_DIMS and all(type(one) is int and 0 <= one < 1 << 62 for one in numbers)
