"""Weights from and to torchtitan's checkpoints, whose rows of queries and keys are in another order.

torchtitan's Llama rotates neighbouring numbers of a head, as Meta's own code does; here, as in Hugging Face,
a number is rotated with the one half a head further. So rows of queries and keys change places within a head.
Names: ``torchtitan_names``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.dcp import StoredTensor, read_box, write_folder
from plait.train.checkpoint.torchtitan_names import NAMES, ROTATED, check_model, names_of, weights_in
from plait.train.model.pieces import Piece
from plait.train.model.transformer import Share, Transformer


def halves(rows: Tensor, head: int) -> Tensor:
    """Rows of whole heads, from neighbours that rotate together to halves of a head."""
    return rows.view(-1, head // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def neighbours(rows: Tensor, head: int) -> Tensor:
    """The way back.

    >>> rows = torch.arange(8.0)[:, None]
    >>> halves(rows, 4)[:, 0].tolist(), torch.equal(neighbours(halves(rows, 4), 4), rows)
    ([0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0], True)
    """
    return rows.view(-1, 2, head // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def load(model: Share, folder: Path) -> None:
    """Fill this rank's weights from a folder that torchtitan has written.

    Raises CheckpointError naming the tensor, before any weight has changed, for one that is missing,
    superfluous or of another shape; and for numbers that are not finite."""
    spec = model.spec
    found, head = weights_in(spec, folder)
    if head:
        _check_tied(folder, head, found["embedding.weight"])
    dtype = next(iter(model.units.values())).kept.dtype

    def value(piece: Piece) -> Tensor:
        start, stop = [0] * len(piece.shape), list(piece.shape)
        if piece.dim is not None:
            start[piece.dim], stop[piece.dim] = piece.start, piece.stop
        part = read_box(folder, found[piece.name], Box(tuple(start), tuple(stop)))
        if not part.isfinite().all():
            raise CheckpointError(f"{folder}: '{found[piece.name].name}' has numbers that are NaN or infinite")
        return (halves(part, spec.head_size) if piece.name.endswith(ROTATED) else part).to(dtype)

    for store in model.units.values():
        store.fill(value)


def _check_tied(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    rows = max(1, (64 << 20) // (head.shape[1] * 4))
    for first in range(0, head.shape[0], rows):
        box = Box((first, 0), (min(first + rows, head.shape[0]), head.shape[1]))
        if not torch.equal(read_box(folder, head, box), read_box(folder, embedding, box)):
            problem = f"'{head.name}' differs from '{embedding.name}', and the job's model has one for both"
            raise CheckpointError(f"{folder}: {problem}. Set model.tied_embeddings = false")


def save(model: Transformer, folder: Path) -> None:
    """Write a whole model as torchtitan's ``initial_load_path`` reads it. Raises CheckpointError for a model
    that it has not, LaunchError where it cannot be written."""
    check_model(model.spec)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for piece in model.pieces:
            value = piece.view(model.named[piece.parameter].detach())
            rotated = piece.name.endswith(ROTATED)
            yield names_of(piece.name)[0], neighbours(value, model.spec.head_size) if rotated else value
        if model.spec.tied_embeddings:
            (words,) = (piece for piece in model.pieces if piece.name == "embedding.weight" and not piece.copy)
            yield NAMES["head.weight"][0], words.view(model.named[words.parameter].detach())

    write_folder(folder, tensors())
