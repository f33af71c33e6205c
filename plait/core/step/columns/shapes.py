"""Shapes: the sizes of a model that determine time and memory, as numbers or as arrays over many
models.

``Shapes.of`` takes a ``ModelSpec``. Shapes also describe models that Plait does not run
(grouped-query heads without a gate, for example), and arrays of several models, which a calibration
needs. ``Options`` describes how runs of other frameworks differ from Plait's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Dimensions, count, matrices_of

Number = Any
"""A number, or a float array with one number for each model or candidate strategy."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of a decoder-only transformer. gated, learned_positions, tied_embeddings: 0 or 1.
    attention_dropout: above 0, attention is no fused kernel. normed_within: numbers per token that
    norms of heads normalise. window: keys that a query attends to in windowed layers; window_share:
    share of such layers. parallel_block: 0 or 1.

    experts: routed experts of a layer, 0 for a dense model; routed: experts per token, without
    those that drop it; expert_ffn: width of one expert; shared_ffn: width of all shared experts;
    expert_share: share of layers that have experts. q_lora_rank, kv_lora_rank, qk_rope_head_dim:
    sizes of latent attention, 0 without it; dropless: 1 if an expert computes all tokens routed to
    it, else 0.
    """

    num_layers: Number
    hidden: Number
    num_heads: Number
    num_kv_heads: Number
    head_size: Number
    ffn_hidden: Number
    vocab: Number
    gated: Number
    tied_embeddings: Number
    learned_positions: Number = 0
    max_sequence: Number = 0
    attention_dropout: Number = 0
    normed_within: Number = 0
    q_lora_rank: Number = 0
    kv_lora_rank: Number = 0
    qk_rope_head_dim: Number = 0
    window: Number = 0
    window_share: Number = 0
    parallel_block: Number = 0
    experts: Number = 0
    routed: Number = 0
    expert_ffn: Number = 0
    shared_ffn: Number = 0
    expert_share: Number = 0
    dropless: Number = 0

    @staticmethod
    def of(model: ModelSpec | Shapes) -> Shapes:
        """Return the shapes of a model; shapes are returned unchanged."""
        if isinstance(model, Shapes):
            return model
        plain = {field.name: getattr(model, field.name) for field in fields(Shapes) if field.name not in EXPERTS}
        told = model.experts
        if told is None:
            return Shapes(**plain)
        share = model.num_expert_layers / model.num_layers
        known = (told.count, told.load, told.ffn_hidden, told.shared_width, share, int(not told.capacity))
        routed = dict(zip(EXPERTS, known, strict=True))
        return Shapes(**plain, **routed)

    @staticmethod
    def stack(models: Sequence[Shapes]) -> Shapes:
        """Return shapes as arrays over several models."""
        columns = {field.name: [getattr(model, field.name) for model in models] for field in fields(Shapes)}
        return Shapes(**{name: np.array(values, dtype=np.float64) for name, values in columns.items()})

    @property
    def query(self) -> Number:
        """Width of all queries."""
        return self.num_heads * self.head_size

    @property
    def kv(self) -> Number:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_size

    @property
    def core_size(self) -> Number:
        """Mean width of a query and a value in an attention head; queries of latent attention have
        an additional rotary part."""
        return self.head_size + np.asarray(self.qk_rope_head_dim) / 2

    def kv_ranks(self, tp: Number) -> Number:
        """Return how many tensor-parallel ranks divide keys and values; with more ranks than heads,
        several ranks hold the same head."""
        return np.minimum(tp, self.num_kv_heads)

    @property
    def has_experts(self) -> bool:
        """True if any model has experts."""
        return bool(np.any(np.asarray(self.experts) > 0))

    @property
    def whole_ffn(self) -> Number:
        """Width of the MLP that every token passes through, as the mean over all layers."""
        return self.ffn_hidden * (1 - self.expert_share) + self.shared_ffn * self.expert_share

    @property
    def letters(self) -> Dimensions:
        """The model's sizes by dimension letter, for ``core.model.weights``; F is the width of the
        MLP that every token passes through."""
        return Dimensions(
            H=self.hidden, Q=self.query, K=self.kv, F=self.whole_ffn, V=self.vocab, P=self.max_sequence, biased=0,
            gated=self.gated, learned=self.learned_positions, tied=self.tied_embeddings,
            block=self.parallel_block, D=self.head_size,
            A=self.q_lora_rank, B=self.kv_lora_rank, R=self.qk_rope_head_dim,
            latent=1 * (np.asarray(self.kv_lora_rank) > 0),
        )  # fmt: skip

    @property
    def layer_weights(self) -> Number:
        """Parameters of one layer's matrices without routed experts, as the mean over all
        layers."""
        router = self.expert_share * self.experts * self.hidden
        return count(matrices_of("attn", "mlp"), self.letters) + router

    @property
    def mlp_weights(self) -> Number:
        """Parameters of the MLP's matrices within ``layer_weights``."""
        return count(matrices_of("mlp"), self.letters)

    @property
    def mlp_share(self) -> Number:
        """The MLP's share of a layer's parameters."""
        return self.mlp_weights / self.layer_weights

    @property
    def expert_weights(self) -> Number:
        """Parameters of one layer's routed experts, as the mean over all layers."""
        one = count(matrices_of("mlp"), replace(self.letters, F=self.expert_ffn))
        return self.expert_share * self.experts * one

    @property
    def words(self) -> Number:
        """Number of parameters of the embedding, or of the head."""
        return self.vocab * self.hidden


EXPERTS = ("experts", "routed", "expert_ffn", "shared_ffn", "expert_share", "dropless")
"""Fields that a dense model leaves at 0."""


@dataclass(frozen=True, kw_only=True)
class LooseModel(ModelSpec):
    """A model whose shapes may contradict each other. Its gate and its learned positions are
    explicit fields, independent of the family."""

    gated_mlp: bool = False
    trained_positions: bool = False

    def __post_init__(self) -> None:
        """Check nothing: such a model is never run."""

    @property
    def gated(self) -> bool:
        """The value of ``gated_mlp``."""
        return self.gated_mlp

    @property
    def learned_positions(self) -> bool:
        """The value of ``trained_positions``."""
        return self.trained_positions


def model_of(model: ModelSpec | Shapes) -> ModelSpec:
    """Return the model of shapes, which must be numbers, not arrays; a model is returned
    unchanged."""
    if isinstance(model, ModelSpec):
        return model
    sizes: dict[str, Any] = {
        field.name: int(getattr(model, field.name))
        for field in fields(Shapes)
        if field.name not in (*EXPERTS, "normed_within", "window", "window_share", "parallel_block")
    } | {"attention_dropout": float(model.attention_dropout)}
    gated, trained, tied = (bool(sizes.pop(name)) for name in ("gated", "learned_positions", "tied_embeddings"))
    family = "gpt" if trained or not gated else "llama"
    experts = _experts(model, sizes["num_layers"]) if model.has_experts else None
    return LooseModel(
        family=family,
        gated_mlp=gated,
        trained_positions=trained,
        tied_embeddings=tied,
        experts=experts,
        parallel_block=bool(model.parallel_block),
        **sizes,
    )


def _experts(model: Shapes, num_layers: int) -> Experts:
    """Return the experts of shapes. Layers without experts come first, since shapes give only their
    number."""
    count, share, width = int(model.experts), float(model.expert_share), int(model.shared_ffn)
    per_token = max(1, math.ceil(float(model.routed)))
    return Experts(
        count=count, per_token=per_token, ffn_hidden=int(model.expert_ffn), shared=int(width > 0),
        shared_ffn_hidden=width, capacity=0.0 if model.dropless else float(model.routed) / per_token,
        first_dense=num_layers - round(share * num_layers),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Differences of other frameworks from Plait; the defaults describe Plait's own runs. Each may
    be an array.

    fused_attention: one kernel that never writes the scores. attention_work, norm_work: seconds of
    the kernels in use as a multiple of the kernels that the cluster's constants describe.
    recompute_attention: selective recomputation repeats attention's core (Korthikanti 2022, arXiv
    2205.05198), not norms and activations. recompute_collectives: full recomputation repeats the
    forward's tensor-parallel collectives. sums_late: new parameters that every rank keeps whole are
    gathered at a step's end without overlap. Gradients are summed then too, if optimizer states are
    not sharded, and within a pipeline (DeepSpeed). transfers_hidden: transfers between stages
    overlap computation; rounds_hide_transfers: transfers of pp ranks with several stages do
    (Megatron-LM's overlap_p2p_comm, which its 1F1B does not have). in_lists: stages run instruction
    lists, the host launches each op when it begins, and gradients are reduced within the last
    backward (``step_end``). gradient_bytes: bytes per number of a gradient during its reduction.
    weight_bytes: bytes per number of a gathered parameter; quantised: factor on weight_bytes for a
    layer's matrices. steps_overlap: a pp rank begins the next step while others end this one, and
    repairs the effect of gradient clipping afterwards (Qi 2023, arXiv 2401.10241). dispatch_once: a
    token is sent once to each node and rank that holds its experts (``rates.dispatch``).
    exchange_hidden: exchanges of routed tokens overlap another micro-batch's layers: the forward of
    one and the backward of another run together (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).
    experts_whole: tensor parallelism does not split experts; they are divided among neighbours of
    dp x cp x tp (Megatron-LM's expert-tensor-parallel-size 1). states_moved: the optimizer's memory
    traffic per number, relative to fp32. states_on_host: share of optimizer states that are kept
    and updated on the host; kept_on_host: share of the activations that layers keep for the
    backward there. ends_shared: embedding and head are divided among all stages (vocabulary
    parallelism; Yeung 2024, arXiv 2411.05288), and their exchanges overlap layers. muon_steps:
    iterations by which Muon orthogonalises layers' matrices, 0 for another optimizer;
    matrix_itemsize: bytes of their numbers.
    """

    fused_attention: Any = True
    attention_work: Any = 1.0
    norm_work: Any = 1.0
    recompute_attention: Any = False
    recompute_collectives: Any = False
    sums_late: Any = False
    transfers_hidden: Any = False
    rounds_hide_transfers: Any = True
    in_lists: Any = True
    gradient_bytes: Any = 4.0
    weight_bytes: Any = 2.0
    quantised: Any = 1.0
    steps_overlap: Any = False
    dispatch_once: Any = False
    exchange_hidden: Any = False
    experts_whole: Any = False
    states_moved: Any = 1.0
    states_on_host: Any = 0.0
    kept_on_host: Any = 0.0
    ends_shared: Any = False
    muon_steps: Any = 0
    matrix_itemsize: Any = 2
