"""Weights from and to Hugging Face folders (``config.json`` and safetensors), GPT-2 and Llama, piece by
piece.

Reading, a rank takes only its own ranges out of the files. Writing, rank 0 puts one tensor after the other
into the file while the other ranks hand it their ranges, so that nobody ever holds more than one whole
tensor. GPT-2 keeps its linear weights transposed and query, key and value fused; Llama's rotary halves are
laid out as ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.core.errors import CheckpointError
from plait.core.model import Family, ModelSpec
from plait.core.strategy import Strategy
from plait.train.checkpoint.huggingface_config import check_family, huggingface_config
from plait.train.checkpoint.safetensors_folder import DTYPES, FolderWriter, code_of
from plait.train.checkpoint.weight_files import check_config, weight_files
from plait.train.comm.wire import Wire, empty_like_gathered
from plait.train.model.pieces import Piece, pieces
from plait.train.model.transformer import Share, Transformer

SHARD_BYTES = 5_000_000_000

_PREFIX: dict[Family, str] = {"gpt": "transformer.", "llama": "model."}
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
_IGNORED = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)  # constants that older files keep among the weights


@dataclass(frozen=True)
class Place:
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


def place(spec: ModelSpec, piece: Piece) -> Place:
    """Where Hugging Face keeps ``piece``."""
    head, _, tail = piece.name.rpartition(".")
    layer, rest = None, head
    if head.startswith("layers."):
        _, layer, rest = head.split(".", 2)
    name = _NAMES[spec.family][rest] + "." + tail
    fused = spec.family == "gpt" and rest in _FUSED
    shape = (len(_FUSED) * piece.shape[0], *piece.shape[1:]) if fused else piece.shape
    transposed = spec.family == "gpt" and layer is not None and len(shape) == 2
    return Place(
        name if layer is None else f"{_LAYER[spec.family]}.{layer}.{name}",
        tuple(reversed(shape)) if transposed else shape,
        transposed,
        _FUSED.index(rest) * piece.shape[0] if fused else 0,
    )


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
    with _opened(folder, model.spec) as tensors:
        for piece in model.pieces:
            _check(tensors, place(model.spec, piece), folder)
        everything = pieces(model.spec, Strategy(), 0)  # this rank may hold a pipeline stage only
        _check_nothing_else(model.spec, tensors, {place(model.spec, piece).name for piece in everything}, folder)

        def value(piece: Piece) -> Tensor:
            at = place(model.spec, piece)
            if not math.prod(piece.local_shape):
                return torch.empty(piece.local_shape)
            stored = tensors[at.name]
            found = stored.values[at.ranges(piece)].to(dtype)
            if not found.isfinite().all():
                problem = f"tensor '{stored.name}' has numbers that are NaN or infinite"
                if stored.values.get_dtype() != code_of(dtype):
                    problem += f", as {stored.values.get_dtype()} or once converted to {code_of(dtype)}"
                raise CheckpointError(f"{stored.file}: {problem}. Training from it could give nothing but NaN")
            return found.t() if at.transposed else found

        for store in model.units.values():
            store.fill(value)


class _Stored(NamedTuple):
    """A tensor of a file: its name there, and its values, of which only what is cut out is read."""

    file: Path
    name: str
    values: Any


@contextmanager
def _opened(folder: Path, spec: ModelSpec) -> Iterator[dict[str, _Stored]]:
    """Every tensor in the folder, by name without the family's prefix."""
    tensors: dict[str, _Stored] = {}
    for file in weight_files(folder):
        try:
            handle = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            problem = "missing" if isinstance(error, FileNotFoundError) else f"damaged or cut short: {error}"
            raise CheckpointError(f"{file}: {problem}") from None
        for name in handle.keys():  # noqa: SIM118  (not a mapping)
            tensors[name.removeprefix(_PREFIX[spec.family])] = _Stored(file, name, handle.get_slice(name))
    yield tensors


def _check(tensors: Mapping[str, _Stored], at: Place, folder: Path) -> None:
    if at.name not in tensors:
        fix = ". A model without a head of its own needs tied_embeddings = true" if at.name == "lm_head.weight" else ""
        raise CheckpointError(f"{folder}: tensor '{at.name}' is missing{fix}")
    shape, dtype = tuple(tensors[at.name].values.get_shape()), tensors[at.name].values.get_dtype()
    if shape != at.shape:
        raise CheckpointError(f"{folder}: tensor '{at.name}' has shape {list(shape)}, expected {list(at.shape)}")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{folder}: tensor '{at.name}' holds {dtype}, expected one of {', '.join(DTYPES)} (not quantised)"
        )


def _check_nothing_else(spec: ModelSpec, tensors: Mapping[str, Any], known: set[str], folder: Path) -> None:
    """A tensor without a place (a bias, one more layer) would be left out in silence, and the numbers be
    wrong."""
    ignored = (*_IGNORED, "lm_head.weight") if spec.tied_embeddings else _IGNORED
    for name in tensors:
        if name not in known and not name.endswith(ignored):
            raise CheckpointError(
                f"{folder}: tensor '{name}' has no place in this model ({spec.family}, {spec.num_layers} layers)"
            )


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
    contents, writer = _contents(spec), None
    if wire.rank == 0:
        writer = FolderWriter(
            folder, {name: members[0][1].shape for name, members in contents.items()}, dtype, shard_bytes
        )
        writer.begin(lambda: {**huggingface_config(spec, dtype), **(extra or {})}, files or {})
    _agree(model, wire, writer)
    holders = [{piece.name: piece for piece in pieces(spec, model.strategy, rank)} for rank in range(wire.size)]
    for name, members in contents.items():
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


def _contents(spec: ModelSpec) -> dict[str, list[tuple[Piece, Place]]]:
    """The file's tensors in order, each with the whole pieces it is made of."""
    check_family(spec)
    contents: dict[str, list[tuple[Piece, Place]]] = {}
    for piece in pieces(spec, Strategy(), 0):
        at = place(spec, piece)
        name = at.name if at.name.startswith("lm_head.") else _PREFIX[spec.family] + at.name
        contents.setdefault(name, []).append((piece, at))
    return contents


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
