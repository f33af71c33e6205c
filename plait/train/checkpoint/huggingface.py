"""Read and write weights of Hugging Face folders (``config.json`` and safetensors), piece by piece.

When reading, a rank takes only its own ranges from the files. When writing, one process writes the
tensors of a whole model one after the other. ``plait.train.checkpoint.weight_files`` describes the
layout of the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.base.files import write_synced
from plait.core.model.families import HEAD, PREFIX, check_family, file_name, huggingface_config, model_type
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.dcp import StoredTensor, read_box
from plait.train.checkpoint.ranges import code_of, content, header
from plait.train.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    Stored,
    StoredPiece,
    check_config,
    stored_piece,
    stored_tensors,
)
from plait.train.model.pieces import Piece, pieces
from plait.train.model.transformer import Share, Transformer

SHARD_BYTES = 5_000_000_000

# ---- reading ----


def load(model: Share, folder: Path) -> None:
    """Fill this rank's weights from a Hugging Face folder; values are converted to the model's
    dtype.

    Raises CheckpointError naming the file or tensor, with the model untouched, if something is
    missing, superfluous, damaged or of another shape, or if ``config.json`` describes another
    model. Also, then with the model partly filled, for a value that is not finite in the model's
    dtype.
    """
    check_family(model.spec)
    check_config(model.spec, folder)
    dtype = next(iter(model.units.values())).kept.dtype
    tensors = _Tensors(stored_tensors(model.spec, folder))

    def value(piece: Piece) -> Tensor:
        at = stored_piece(model.spec, piece)
        if not math.prod(piece.local_shape):
            return torch.empty(piece.local_shape)
        found = tensors.cut(at.name, at.ranges(piece)).to(dtype)
        if not found.isfinite().all():
            stored = tensors.stored[at.name]
            problem = f"tensor '{stored.name}' has numbers that are NaN or infinite"
            if stored.dtype != code_of(dtype):
                problem += f", as {stored.dtype} or once converted to {code_of(dtype)}"
            raise CheckpointError(f"{stored.file}: {problem}. Training from it could give nothing but NaN")
        return found.t() if at.transposed else found

    for store in model.units.values():
        store.fill(value)


class _Tensors:
    """Readers of a folder's tensors, range by range, by name without the family's prefix; each file
    is opened once."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self._files: dict[Path, Any] = {}

    def cut(self, name: str, ranges: tuple[slice, ...]) -> Tensor:
        """Return a range of a tensor; only this range is read."""
        at = self.stored[name]
        if isinstance(at, StoredTensor):
            return read_box(at, Box(tuple(one.start for one in ranges), tuple(one.stop for one in ranges)))
        try:
            if at.file not in self._files:
                self._files[at.file] = safe_open(at.file, framework="pt", device="cpu")
            return self._files[at.file].get_slice(at.name)[ranges]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{at.file}: damaged or cut short: {error}. Fetch it again") from None


# ---- writing ----


def check_no_model(folder: Path) -> None:
    """Raise CheckpointError if the folder already holds a model."""
    if found := next((file for file in folder.glob("model*.safetensors*") if file.suffix != ".partial"), None):
        raise CheckpointError(f"{found}: this folder holds a model already. Choose another folder, or remove it first")


def save(
    model: Transformer,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a whole model as ``AutoModelForCausalLM.from_pretrained(folder)`` reads it, in the
    model's dtype. extra: further keys of ``config.json`` (token ids). files: further files, by
    name. shard_bytes: bytes of a file, at most; larger models are split into several files. Files
    get their names at the end, the configuration last. Raises CheckpointError for a folder that
    cannot be written, or already holds a model."""
    check_no_model(folder)
    spec, dtype = model.spec, next(iter(model.named.values())).dtype
    config = {**huggingface_config(spec, str(dtype).removeprefix("torch.")), **(extra or {})}
    texts = {"config.json": config_text(config), **(files or {})}
    listed = contents(spec)
    shapes = {name: members[0][1].shape for name, members in listed.items()}
    shards = _shards({name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}, shard_bytes)
    if len(shards) > 1:
        where = {name: file for file, names in shards.items() for name in names}
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        texts[INDEX] = config_text({"metadata": {"total_size": total}, "weight_map": where})
    partial = {name: folder / f"{name}.partial" for name in (*texts, *shards)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_synced(partial[name], [text])
        for file, names in shards.items():
            values = (content(_tensor(model, listed[name])) for name in names)
            write_synced(partial[file], (header({name: (dtype, shapes[name]) for name in names}), *values))
        for name in reversed(partial):
            partial[name].rename(folder / name)
    except OSError as error:
        for path in partial.values():
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None


def config_text(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n"


def contents(spec: ModelSpec) -> dict[str, list[tuple[Piece, StoredPiece]]]:
    """Return the tensors of a Hugging Face folder in order, by name, each with the whole pieces
    that it consists of."""
    check_family(spec)
    found: dict[str, list[tuple[Piece, StoredPiece]]] = {}
    for piece in pieces(spec, Strategy(), 0):
        at = stored_piece(spec, piece)
        name = at.name if at.name == HEAD else PREFIX[spec.family] + file_name(at.name, model_type(spec))
        found.setdefault(name, []).append((piece, at))
    return found


def _tensor(model: Transformer, members: list[tuple[Piece, StoredPiece]]) -> Tensor:
    """Return one tensor as Hugging Face stores it, assembled from its pieces (logical tensors such
    as ``q.weight``)."""
    value = torch.empty(members[0][1].shape, dtype=next(iter(model.named.values())).dtype)
    for piece, at in members:
        whole = piece.view(model.named[piece.parameter].detach())
        value[at.ranges(piece)] = whole.t() if at.transposed else whole
    return value


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return, for each file to write, its name and the names of its tensors. sizes: bytes of each
    tensor. shard_bytes: bytes of a file, at most."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{at:05d}-of-{len(shards):05d}.safetensors": shard for at, shard in enumerate(shards, start=1)}
