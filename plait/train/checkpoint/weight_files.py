"""Find and check the weight files of a Hugging Face folder against the job's model, without torch
and before a rank starts.

| a folder's content | treatment |
|---|---|
| ``config.json`` (may be missing) | its keys as ``core.model.huggingface`` says; shapes equal to the job's |
| ``.metadata`` | torch.distributed.checkpoint's: the state of a model of transformers, alone or below a key |
| ``model.safetensors``, else the index and its shards | headers checked, names and shapes compared |
| an index beside ``model.safetensors``; constants of older files | passed over, counted |
| a head beside tied embeddings | passed over if equal to the word embedding, else refused |
| a tensor that is missing, of another shape, in two files, or without a place | refused by name |
| other formats (``pytorch_model.bin``), files that the index does not name | ignored |

GPT-2 stores its linear weights transposed, and query, key and value fused; Llama's rotary halves
are laid out as ours. A safetensors file (https://huggingface.co/docs/safetensors) is 8 bytes of
header length, a JSON header with every tensor's dtype, shape and byte range, and the data. A header
is refused if it is longer than the file or ``LONGEST``, is no table, names a tensor twice, or has
an impossible shape, dtype or range. So are ranges that overlap, leave a gap, or do not end where
the file ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from plait.core.base.codec.json_text import parse_table, read_table
from plait.core.base.errors import CheckpointError, JobError, written
from plait.core.base.files import check_path, kind_of, reason_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.core.model.families import CONSTANTS, EMBEDDING, HEAD, LAYER, NAMES, PREFIX, differences, usual_name
from plait.core.model.huggingface import read_config
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.dcp import METADATA, StoredTensor, read_box, tensors_in
from plait.train.model.pieces import Piece, pieces

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may have."""
_AT_ONCE = 4 << 20
"""Number of values of two matrices that are compared at once."""
LONGEST = 32 << 20
"""Bytes of a header, at most: a tensor takes about a hundred."""
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a number, by dtype; sizes of tensors with other dtypes are not checked."""
MOST_DIMS = 64
_LFS = b"version https://git-lfs"
_FUSED = ("attn.q", "attn.k", "attn.v")  # in the order in which GPT-2's c_attn holds them


@dataclass(frozen=True)
class TensorHeader:
    """A tensor of a file: its name there, safetensors' code of its dtype, its shape, and its byte
    range, from the start of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


Stored = TensorHeader | StoredTensor


def check_weights(folder: Path, spec: ModelSpec) -> IgnoredInput:
    """Check a folder of weights before ranks start, as the ranks would; return what is passed over.

    Raises JobError for a folder that does not exist, CheckpointError for one without weights or
    with those of another model. No weights are read, except a head beside tied embeddings.
    """
    over = IgnoredInput()
    try:
        if (kind := kind_of(folder)) != "folder":
            problem = f"{folder} is a {kind}, and a folder is needed" if kind else f"{folder}: no such folder"
            fix = "Name a Hugging Face folder with config.json and safetensors (nothing is downloaded), or leave it out"
            raise JobError(problem, key="train.init_from", fix=fix)
        check_config(spec, folder, over)
        stored_tensors(spec, folder, over)
    except OSError as error:
        raise JobError(f"{folder} cannot be read: {error.strerror}", key="train.init_from",
                       fix="Check its permissions, or leave it out") from None  # fmt: skip
    return over


def check_config(spec: ModelSpec, folder: Path, over: IgnoredInput | None = None) -> None:
    """Raise CheckpointError if ``config.json`` describes another model. The file may be missing."""
    if not (folder / "config.json").is_file():
        return
    others = differences(read_config(folder, over), spec)
    if not others:
        return
    told = ", ".join(f"{name} is {found} there and {ours} in the job" for name, (found, ours) in others.items())
    changes = " and ".join(f"model.{name}={written(found)}" for name, (found, _) in others.items() if found is not None)
    raise CheckpointError(
        f"{folder / 'config.json'}: describes another model: {told}. Set {changes or 'the same'}, or name another "
        "folder"
    )


def stored_tensors(spec: ModelSpec, folder: Path, over: IgnoredInput | None = None) -> dict[str, Stored]:
    """Return every tensor of the model, by name without the family's prefix. Raises
    CheckpointError, naming the file or tensor, for tensors that are missing, superfluous, damaged,
    ambiguous or of another shape."""
    over = over if over is not None else IgnoredInput()
    tensors = dict[str, Stored]()
    for one in _stored(folder, spec, over):
        name = usual_name(one.name.removeprefix(PREFIX[spec.family]))
        if other := tensors.get(name):
            raise CheckpointError(
                f"{folder}: tensor '{one.name}' occurs twice, in {one.file.name} and, as '{other.name}', in "
                f"{other.file.name}. Keep one of the two"
            )
        tensors[name] = one
    wanted = shapes(spec)
    for name, shape in wanted.items():
        _check(tensors, name, shape, folder)
    for name in sorted(set(tensors) - set(wanted)):
        one = tensors.pop(name)
        if CONSTANTS[spec.family].fullmatch(name):
            over.note("tensors that layers compute themselves", one.name)
        elif name == HEAD:  # beside tied embeddings
            _check_head(one, tensors[EMBEDDING["llama" if spec.family == "llama" else "gpt"]])
            over.note("heads equal to the word embedding, with which they are tied", one.name)
        else:
            raise CheckpointError(
                f"{one.file}: tensor '{one.name}' has no place in this model ({spec.family}, {spec.num_layers} layers)"
            )
    return tensors


def _stored(folder: Path, spec: ModelSpec, over: IgnoredInput) -> Iterator[Stored]:
    """Yield the tensors of a folder. If the folder has an index of shards, each tensor is read from
    the shard that the index names."""
    if (folder / METADATA).is_file():
        yield from _distributed(folder, PREFIX[spec.family] + EMBEDDING["llama" if spec.family == "llama" else "gpt"])
        return
    if (folder / SINGLE).is_file():
        if (folder / INDEX).exists():
            over.note(f"indexes of shards, since {SINGLE} stands beside them", str(folder / INDEX))
        yield from read_header(folder / SINGLE).values()
        return
    where = _index(folder)
    for file in sorted(set(where.values())):
        found = read_header(folder / file)
        if absent := next((name for name, named in where.items() if named == file and name not in found), None):
            raise CheckpointError(f"{folder / file}: has no tensor {absent!r}, which {INDEX} says it has")
        for one in found.values():
            if (named := where.get(one.name)) != file:
                told = f"says it is in {named}" if named else "does not name it"
                raise CheckpointError(
                    f"{folder / file}: holds tensor '{one.name}', and {INDEX} {told}. It is unclear which is meant: "
                    "take it out of one of the two, or fetch the folder again"
                )
            yield one


def _distributed(folder: Path, embedding: str) -> Iterator[Stored]:
    """Yield the model's tensors of a torch.distributed.checkpoint. They may lie below a key, such
    as ``model.``; tensors elsewhere belong to the optimizer or another state."""
    found = tensors_in(folder)
    key = next((name.removesuffix(embedding) for name in found if name.endswith(embedding)), None)
    if key is None:
        raise CheckpointError(
            f"{folder}: holds no '{embedding}', but {', '.join(map(shown, sorted(found)[:3])) or 'no tensor'}: names "
            "are to be those of transformers. torchtitan writes a Hugging Face folder with "
            "checkpoint.last_save_in_hf, or later with scripts/checkpoint_conversion/convert_to_hf.py"
        )
    yield from (one._replace(name=name.removeprefix(key)) for name, one in found.items() if name.startswith(key))


def _index(folder: Path) -> dict[str, str]:
    """Return the index: tensor -> name of its file. Raises CheckpointError if there is no usable
    index."""
    file = folder / INDEX
    try:
        named = read_table(file, unique=True).get("weight_map")
    except FileNotFoundError:
        fix = "Other formats can be converted with save_pretrained of transformers"
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}. {fix}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {reason_of(error)}. Fetch it again") from None
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{file}: its weight_map is no table of tensors and their files. Fetch it again")
    for name in set(named.values()):
        try:
            check_path(name, "weight_map")
        except JobError as error:
            raise CheckpointError(f"{file}: {error}") from None
        if Path(name).name != name or name in (".", ".."):
            raise CheckpointError(f"{file}: {shown(name)} is no name of a file beside it")
    return named


def _check(tensors: dict[str, Stored], name: str, shape: tuple[int, ...], folder: Path) -> None:
    """Raise CheckpointError if a tensor is missing, of another shape, or not of a floating-point
    dtype."""
    if name not in tensors:
        fix = ". A model without a head of its own needs model.tied_embeddings = true" if name == HEAD else ""
        raise CheckpointError(f"{folder}: tensor '{name}' is missing{fix}")
    found = tensors[name]
    if found.shape != shape:
        raise CheckpointError(
            f"{found.file}: tensor '{found.name}' has shape {shown(list(found.shape))}, expected {list(shape)}"
        )
    if found.dtype not in FLOATS:
        raise CheckpointError(
            f"{found.file}: tensor '{found.name}' holds {found.dtype}, expected one of {', '.join(FLOATS)} "
            "(not quantised)"
        )


def _check_head(head: Stored, embedding: Stored) -> None:
    """Raise CheckpointError if a head differs from the word embedding with which it is tied."""
    if head.shape == embedding.shape and head.dtype in FLOATS and _equal(head, embedding):
        return
    raise CheckpointError(
        f"{head.file}: tensor '{head.name}' differs from '{embedding.name}', and the model ties the two. Set "
        "model.tied_embeddings = false to train both, or take the tensor out to train the embedding alone"
    )


def _equal(one: Stored, other: Stored) -> bool:
    """Return True if two matrices of one shape hold the same numbers; reads some rows at a time."""
    rows, columns = one.shape
    step = max(1, _AT_ONCE // max(1, columns))
    return all(
        np.array_equal(*(_rows(each, begin, min(begin + step, rows)) for each in (one, other)), equal_nan=True)
        for begin in range(0, rows, step)
    )


def _rows(stored: Stored, begin: int, end: int) -> np.ndarray:
    """Return rows of a matrix, as fp64 [rows, columns]."""
    columns = stored.shape[1]
    if isinstance(stored, StoredTensor):
        return read_box(stored, Box((begin, 0), (end, columns))).double().numpy()
    kind = np.dtype({"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[stored.dtype])
    with open(stored.file, "rb") as file:
        file.seek(stored.start + begin * columns * kind.itemsize)
        values = np.frombuffer(file.read((end - begin) * columns * kind.itemsize), kind)
    if stored.dtype == "BF16":  # the upper half of an fp32
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64).reshape(end - begin, columns)


# ---- positions of tensors ----


@dataclass(frozen=True)
class StoredPiece:
    """The position of a whole piece in a file: the tensor's name (without the family's prefix) and
    shape, and the piece's first row there.

    transposed: the file's dims are the piece's dims in reverse order; ``first`` counts along the
    piece's dim
    0.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    first: int

    def ranges(self, piece: Piece) -> tuple[slice, ...]:
        """Return the part of the file's tensor that is ``piece``'s local range."""
        bounds = [(0, size) for size in piece.shape]
        if piece.dim is not None:
            bounds[piece.dim] = (piece.start, piece.stop)
        bounds[0] = (bounds[0][0] + self.first, bounds[0][1] + self.first)
        return tuple(slice(*b) for b in (reversed(bounds) if self.transposed else bounds))


def stored_piece(spec: ModelSpec, piece: Piece) -> StoredPiece:
    """Return the position of ``piece`` (a logical tensor) in Hugging Face's files."""
    head, _, tail = piece.name.rpartition(".")
    layer, rest = None, head
    if head.startswith("layers."):
        _, layer, rest = head.split(".", 2)
    expert = next(filter(str.isdigit, rest.split(".")), "")
    name = NAMES[spec.family][rest.replace(expert, "{}") if expert else rest].format(expert) + "." + tail
    fused = spec.family == "gpt" and rest in _FUSED
    shape = (len(_FUSED) * piece.shape[0], *piece.shape[1:]) if fused else piece.shape
    transposed = spec.family == "gpt" and layer is not None and len(shape) == 2
    return StoredPiece(
        name if layer is None else f"{LAYER[spec.family]}.{layer}.{name}",
        tuple(reversed(shape)) if transposed else shape,
        transposed,
        _FUSED.index(rest) * piece.shape[0] if fused else 0,
    )


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name, without the family's prefix, and shape of every tensor in a folder of this
    model."""
    stored = (stored_piece(spec, piece) for piece in pieces(spec, Strategy(), 0))
    return {at.name: at.shape for at in stored}


# ---- headers of safetensors files ----


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return every tensor of a safetensors file, by name. Raises CheckpointError for a file that is
    missing or damaged."""
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
    """Return the bytes of a file's header, from the file's beginning. Raises ValueError for an
    impossible length."""
    if begin.startswith(_LFS):
        raise ValueError("it is a pointer of Git LFS in place of the file, which git lfs pull fetches")
    length = int.from_bytes(begin[:8], "little")
    if length > size - 8:
        raise ValueError(f"its header would take {length} bytes, and the file has {size}")
    if length > LONGEST:
        raise ValueError(f"its header would take {length} bytes; at most {LONGEST} are read")
    return length


def _tensors(file: Path, text: bytes, data: int) -> dict[str, TensorHeader]:
    """Return the header's tensors, checked against ``data``, the number of bytes after the header.
    Raises ValueError."""
    header = parse_table(text, unique=True)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("its __metadata__ is no table")
    first = 8 + len(text)
    found = {name: _entry(file, name, entry, first) for name, entry in header.items()}
    end, before = first, ""
    for one in sorted(found.values(), key=lambda one: (one.start, one.stop)):
        if one.start != end:
            how = "overlaps" if one.start < end else "leaves a gap after"
            raise ValueError(f"tensor {shown(one.name)} {how} {shown(before) if before else 'the header'}")
        end, before = one.stop, one.name
    if end != first + data:
        raise ValueError(f"its tensors end at byte {end}, and the file at {first + data}")
    return found


def _entry(file: Path, name: str, entry: Any, first: int) -> TensorHeader:
    """Return one entry of a header, checked. first: the position of the data. Raises ValueError."""
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
    """Return True for a list of at most ``MOST_DIMS`` integers from 0 up to the largest file
    size."""
    if not isinstance(values, list):
        return False
    numbers = cast("list[Any]", values)
    return len(numbers) <= MOST_DIMS and all(type(one) is int and 0 <= one < 1 << 62 for one in numbers)
