"""Weights from and to Hugging Face folders (``config.json`` and safetensors), piece by piece.

Reading, a rank takes only its own ranges out of the files. Writing, rank 0 puts one tensor after the other
into the file while the other ranks hand it their ranges, so that nobody ever holds more than one whole
tensor. What lies where: ``plait.train.checkpoint.weight_names``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.model.families import HEAD, PREFIX, check_family, huggingface_config
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.safetensors_folder import FolderWriter, code_of
from plait.train.checkpoint.weight_files import check_config, stored_tensors
from plait.train.checkpoint.weight_headers import TensorHeader
from plait.train.checkpoint.weight_names import StoredPiece, place
from plait.train.comm.wire import Wire, empty_like_gathered
from plait.train.model.pieces import Piece, pieces
from plait.train.model.transformer import Share, Transformer

SHARD_BYTES = 5_000_000_000

# ---- reading ----


def load(model: Share, folder: Path) -> None:
    """Fill this rank's weights from a Hugging Face folder; numbers are converted to the model's dtype.

    Raises CheckpointError naming the file or tensor, with the model untouched, if something is missing,
    superfluous, damaged or of another shape, or if ``config.json`` describes another model. Also, then with
    the model partly filled, for a number that is not finite in the model's dtype.
    """
    check_family(model.spec)
    check_config(model.spec, folder)
    dtype = next(iter(model.units.values())).kept.dtype
    tensors = _Tensors(stored_tensors(model.spec, folder))

    def value(piece: Piece) -> Tensor:
        at = place(model.spec, piece)
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
    """Parts of the tensors of a folder, by name without the family's prefix; a file is opened once."""

    def __init__(self, stored: Mapping[str, TensorHeader]) -> None:
        self.stored = stored
        self._files: dict[Path, Any] = {}

    def cut(self, name: str, ranges: tuple[slice, ...]) -> Tensor:
        """A range of a tensor, the only part of it that is read."""
        at = self.stored[name]
        try:
            if at.file not in self._files:
                self._files[at.file] = safe_open(at.file, framework="pt", device="cpu")
            return self._files[at.file].get_slice(at.name)[ranges]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{at.file}: damaged or cut short: {error}. Fetch it again") from None


# ---- writing ----


def save(
    model: Transformer,
    wire: Wire,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model as ``AutoModelForCausalLM.from_pretrained(folder)`` reads it, in the model's dtype.

    Called by every rank of the tensor-parallel group behind ``wire``. extra: further keys of ``config.json``
    (token numbers). files: further files, by name. shard_bytes: size from which on the weights are spread
    over several files. Raises CheckpointError on every rank if rank 0 cannot write, or finds a model in
    ``folder`` already.
    """
    spec, dtype = model.spec, next(iter(model.named.values())).dtype
    assert wire.size == model.strategy.tp, f"a group of {wire.size} ranks for tp = {model.strategy.tp}"
    listed, writer = contents(spec), None
    if wire.rank == 0:
        writer = FolderWriter(
            folder, {name: members[0][1].shape for name, members in listed.items()}, dtype, shard_bytes
        )
        writer.begin(
            lambda: {**huggingface_config(spec, str(dtype).removeprefix("torch.")), **(extra or {})}, files or {}
        )
    _agree(model, wire, writer)
    holders = [{piece.name: piece for piece in pieces(spec, model.strategy, rank)} for rank in range(wire.size)]
    for name, members in listed.items():
        value: Tensor | None = None
        for piece, at in members:
            whole = _gather(model, wire, [held[piece.name] for held in holders])
            if whole is not None:  # rank 0
                value = whole.new_empty(at.shape) if value is None else value
                value[at.ranges(piece)] = whole.t() if at.transposed else whole
        if writer is not None and value is not None:
            writer.add(name, value)
    if writer is not None:
        writer.finish()
    _agree(model, wire, writer)


def contents(spec: ModelSpec) -> dict[str, list[tuple[Piece, StoredPiece]]]:
    """The file's tensors in order, each with the whole pieces it is made of."""
    check_family(spec)
    found: dict[str, list[tuple[Piece, StoredPiece]]] = {}
    for piece in pieces(spec, Strategy(), 0):
        at = place(spec, piece)
        name = at.name if at.name == HEAD else PREFIX[spec.family] + at.name
        found.setdefault(name, []).append((piece, at))
    return found


def _gather(model: Transformer, wire: Wire, held: list[Piece]) -> Tensor | None:
    """The whole tensor, in host memory on rank 0, None elsewhere. held: its piece on every rank.

    Ranges may differ in size (the last of the vocabulary) while a gather's parts may not: they travel padded.
    """
    mine = held[wire.rank]
    local = mine.view(model.named[mine.parameter].detach())
    if mine.dim is None:
        return local.cpu() if wire.rank == 0 else None
    sent = local.new_zeros((1, max(math.prod(piece.local_shape) for piece in held)))
    sent[0, : local.numel()] = local.reshape(-1)
    received = empty_like_gathered(sent, wire.size)
    wire.start("all_gather", received, sent).wait()
    if wire.rank:
        return None
    whole = torch.empty(mine.shape, dtype=local.dtype)
    for piece, part in zip(held, received.cpu(), strict=True):
        piece.cut(whole).copy_(part[: math.prod(piece.local_shape)].view(piece.local_shape))
    return whole


def _agree(model: Transformer, wire: Wire, writer: FolderWriter | None) -> None:
    """Raise on every rank if rank 0 has failed."""
    flag = torch.tensor(
        [float(writer is not None and writer.failure is not None)], device=next(iter(model.named.values())).device
    )
    flags = empty_like_gathered(flag, wire.size)
    wire.start("all_gather", flags, flag).wait()
    if writer is not None and writer.failure is not None:
        raise writer.failure
    if flags.any():
        raise CheckpointError("the model was not exported: rank 0 could not write it")
