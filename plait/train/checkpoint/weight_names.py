"""Where a Hugging Face folder keeps each tensor, of GPT-2 and Llama: names and shapes, without torch.

GPT-2 keeps its linear weights transposed and query, key and value fused; Llama's rotary halves are laid out
as ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.core.model.spec import Family, ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.model.pieces import Piece, pieces

HEAD, EMBEDDING = "lm_head.weight", {"gpt": "wte.weight", "llama": "embed_tokens.weight"}
PREFIX: dict[Family, str] = {"gpt": "transformer.", "llama": "model."}
_LAYER: dict[Family, str] = {"gpt": "h", "llama": "layers"}
_NAMES: dict[Family, dict[str, str]] = {
    "gpt": {
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "head": "lm_head",
        "attn.norm": "ln_1",
        "attn.q": "attn.c_attn",
        "attn.k": "attn.c_attn",
        "attn.v": "attn.c_attn",
        "attn.o": "attn.c_proj",
        "mlp.norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "llama": {
        "embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "attn.norm": "input_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}
_FUSED = ("attn.q", "attn.k", "attn.v")  # in the order in which GPT-2's c_attn holds them
_CONSTANTS: dict[Family, re.Pattern[str]] = {
    "gpt": re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
    "llama": re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
}
"""Constants that older files keep among the weights; transformers computes them anew, too."""


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
    name = _NAMES[spec.family][rest] + "." + tail
    fused = spec.family == "gpt" and rest in _FUSED
    shape = (len(_FUSED) * piece.shape[0], *piece.shape[1:]) if fused else piece.shape
    transposed = spec.family == "gpt" and layer is not None and len(shape) == 2
    return StoredPiece(
        name if layer is None else f"{_LAYER[spec.family]}.{layer}.{name}",
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
    return _CONSTANTS[spec.family].fullmatch(name) is not None
