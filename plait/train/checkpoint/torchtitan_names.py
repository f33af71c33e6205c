"""torchtitan's names of weights: 0.3.0's (models/llama3/state_dict_adapter.py), and those before it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.dcp import StoredTensor, tensors_in
from plait.train.model.pieces import pieces

NAMES = {
    "embedding.weight": ("tok_embeddings.weight",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("lm_head.weight", "output.weight"),
    "attn.norm.weight": ("attention_norm.weight",),
    "attn.q.weight": ("attention.qkv_linear.wq.weight", "attention.wq.weight"),
    "attn.k.weight": ("attention.qkv_linear.wk.weight", "attention.wk.weight"),
    "attn.v.weight": ("attention.qkv_linear.wv.weight", "attention.wv.weight"),
    "attn.o.weight": ("attention.wo.weight",),
    "mlp.norm.weight": ("ffn_norm.weight",),
    "mlp.gate.weight": ("feed_forward.w1.weight",),
    "mlp.up.weight": ("feed_forward.w3.weight",),
    "mlp.down.weight": ("feed_forward.w2.weight",),
}
"""Our names within the model or a layer: torchtitan's, that of 0.3.0 first."""
ROTATED = ("attn.q.weight", "attn.k.weight")
BESIDE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "freqs_cis", "rope.")
"""How the names of tensors begin that are no weights: states of a run."""


def names_of(piece: str) -> tuple[str, ...]:
    """What a tensor may be called there.

    >>> names_of("layers.3.attn.q.weight")[0]
    'layers.3.attention.qkv_linear.wq.weight'
    """
    if not piece.startswith("layers."):
        return NAMES[piece]
    _, layer, rest = piece.split(".", 2)
    return tuple(f"layers.{layer}.{name}" for name in NAMES[rest])


def check_model(spec: ModelSpec) -> None:
    """Raise CheckpointError for a model that torchtitan's llama3 is not."""
    others = {
        "of another family": spec.family != "llama", "with query and key norms": spec.qk_norm,
        "with a parallel block": spec.parallel_block, "with experts": spec.experts is not None,
    }  # fmt: skip
    for what, is_so in others.items():
        if is_so:
            raise CheckpointError(
                f"a model {what} has no names in torchtitan's llama3, the one that is read and written"
            )


class Weights(NamedTuple):
    """Of a folder, by our names. head: the tied head beside its embedding, which has to be its equal."""

    stored: dict[str, StoredTensor]
    head: StoredTensor | None


def weights_in(spec: ModelSpec, folder: Path) -> Weights:
    """The model's weights in a folder, all of them, and no other. Raises CheckpointError naming the tensor
    that is missing, superfluous or of another shape."""
    check_model(spec)
    left, found, head = tensors_in(folder), dict[str, StoredTensor](), None
    for piece in pieces(spec, Strategy(), 0):
        if piece.name in found:
            continue  # tied
        names = [name for name in names_of(piece.name) if name in left]
        if not names:
            raise CheckpointError(f"{folder}: holds no '{names_of(piece.name)[0]}', which the job's model has")
        one = left.pop(names[0])
        if one.shape != piece.shape:
            problem = f"'{one.name}' is {list(one.shape)}, and the job's model has {list(piece.shape)}"
            raise CheckpointError(f"{folder}: {problem}")
        found[piece.name] = one
    for name in NAMES["head.weight"] if spec.tied_embeddings else ():  # torchtitan keeps it under both names
        if name in left and left[name].shape == found["embedding.weight"].shape:
            head = left.pop(name)
    if over := sorted(name for name in left if not name.startswith(BESIDE)):
        more = f" and {len(over) - 1} more" if len(over) > 1 else ""
        raise CheckpointError(f"{folder}: '{over[0]}'{more} is no weight of the job's model")
    return Weights(found, head)
