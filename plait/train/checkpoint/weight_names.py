"""Where a Hugging Face folder keeps each tensor: names (``core.model.families``) and shapes, without torch.

GPT-2 keeps its linear weights transposed and query, key and value fused; Llama's rotary halves are laid out
as ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.model.families import CONSTANTS, LAYER, NAMES
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.pieces import Piece, pieces

_FUSED = ("attn.q", "attn.k", "attn.v")  # in the order in which GPT-2's c_attn holds them


@dataclass(frozen=True)
class StoredPiece:
    """Where a whole piece lies in a file: tensor name (without the family's prefix) and shape; first row of
    the piece there.

    transposed: the file's dims are the piece's dims the other way round; ``first`` counts along the piece's
    dim 0.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    first: int

    def ranges(self, piece: Piece) -> tuple[slice, ...]:
        """The part of the file's tensor that is ``piece``'s local range."""
        bounds = [(0, size) for size in piece.shape]
        if piece.dim is not None:
            bounds[piece.dim] = (piece.start, piece.stop)
        bounds[0] = (bounds[0][0] + self.first, bounds[0][1] + self.first)
        return tuple(slice(*b) for b in (reversed(bounds) if self.transposed else bounds))


def place(spec: ModelSpec, piece: Piece) -> StoredPiece:
    """Where Hugging Face keeps ``piece``."""
    head, _, tail = piece.name.rpartition(".")
    layer, rest = None, head
    if head.startswith("layers."):
        _, layer, rest = head.split(".", 2)
    name = NAMES[spec.family][rest] + "." + tail
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
    """Name, without the family's prefix, and shape of every tensor that a folder of this model has."""
    places = (place(spec, piece) for piece in pieces(spec, Strategy(), 0))
    return {at.name: at.shape for at in places}


def is_constant(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor, named without the family's prefix, is one that no layer takes from the file."""
    return CONSTANTS[spec.family].fullmatch(name) is not None
