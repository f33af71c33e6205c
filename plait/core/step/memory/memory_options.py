"""What other frameworks keep in memory and Plait does not, or the other way round."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from plait.core.model.precision import MASTER, master_size
from plait.core.parallel.optimizers import OptimizerName
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.seconds.options import Options
from plait.core.step.stages import Stage, split_layers

SCORE_BYTES = 5.0
"""Of an attention weight that unfused attention keeps: 2 of scores, 1 of dropout's mask, 2 of their product
(Korthikanti 2022, arXiv 2205.05198)."""


@dataclass(frozen=True)
class MatrixBytes:
    """Bytes of a number of a layer's matrices on a rank: whole, that keeps it whole; share, of a share of it;
    gathered, from such shares."""

    whole: float
    share: float
    gathered: float


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """The defaults are Plait's own runs. Of ``Options``, fused_attention and recompute_attention matter.

    gpu: norms keep only their input, and reductions nothing (torch's norms and gloo keep more on a CPU).

    parameter_bytes, main_gradient_bytes, optimizer_bytes: of one number that a rank keeps; None as in Plait:
    parameters as the model computes, gradients in fp32, two moments and a master copy in fp32.
    more_alive: so many micro-batches more than the schedule has are kept of a stage's layers.

    gathered_bytes: of a number of a gathered parameter. matrices: of those of layers, in place of
    parameter_bytes and gathered_bytes, where they are quantised. input_bytes: of a number of a product's
    input, which is kept quantised then, attention's output beside itself. update_bytes: of a number whose
    optimizer state a rank owns, while the optimizer runs. fixed_bytes: buffers that are there from the start.
    sums_in_place: gradients of tied embeddings and of what tensor-parallel ranks hold alike are summed where
    they are.

    score_bytes: of an attention weight, where attention is not fused. stream_bytes: of masks and the like,
    which a layer keeps for every token and hidden number. fused_gate: a gated MLP does not keep the gate's
    activation. rotary_in_place: queries and keys are kept rotated only. regathers: with sequence parallelism
    no layer keeps what it gathered. whole_layers: full recomputation keeps ``kept_bytes`` for every token and
    hidden number, and repeats a layer (Plait: two streams, and repeats half of one at a time).

    logit_bytes: of a logit, all its copies while the loss is computed (None: as in Plait, one as the model
    computes and one in fp32); shared_logit_bytes: where tensor-parallel ranks share the vocabulary, if it is
    otherwise. loss_chunks: parts of a sequence of which the loss is computed one after the other, head and
    backward with it, while the stream's gradient is collected in fp32.
    defers: Plait's own lists hide collectives behind weight gradients, which keeps what these read.
    logits_whole: every tensor-parallel rank has all logits. ends_count: stages are as equal as can be if
    embedding and head count as a layer each; ends_fill: they do where that makes stages equal, and nothing
    else does. gathers_stay: where optimizer states are sharded and parameters are not, a rank has its shard
    of them and, gathered, all (FSDP2's reshard_after_forward = never). rounds_reduce: micro-batches of a
    stage follow each other, and its gradients are then reduced to shares: one stage's are whole at a time.
    frees_inputs: a stage lets go of what it received once its first norm has read it. optimizer: the job's;
    optimizer_bytes are AdamW's, of which another keeps fewer states. moment_bytes: of a number of a moment or
    momentum; reduced_bytes: of a gradient that is rounded to travel (None: neither is smaller than a master).
    pipeline_doubt: how far tensors of its pipelines may be off besides, one standard deviation as a share.
    """

    gpu: bool = True
    parameter_bytes: float | None = None
    main_gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    more_alive: int = 0
    gathered_bytes: float | None = None
    matrices: MatrixBytes | None = None
    input_bytes: float | None = None
    update_bytes: float = 0.0
    fixed_bytes: float = 0.0
    sums_in_place: bool = False
    score_bytes: float = SCORE_BYTES
    stream_bytes: float = 0.0
    fused_gate: bool = False
    rotary_in_place: bool = False
    regathers: bool = False
    whole_layers: bool = False
    kept_bytes: float = 2.0
    logit_bytes: float | None = None
    shared_logit_bytes: float | None = None
    loss_chunks: int = 1
    logits_whole: bool = False
    ends_count: bool = False
    ends_fill: bool = False
    gathers_stay: bool = False
    rounds_reduce: bool = False
    frees_inputs: bool = False
    defers: bool = True
    optimizer: OptimizerName = "adamw"
    moment_bytes: float | None = None
    reduced_bytes: float | None = None
    pipeline_doubt: float = 0.0

    @staticmethod
    def of(options: Options) -> MemoryOptions:
        """With what options of time say of memory."""
        if isinstance(options, MemoryOptions):
            return options
        told: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Options)}
        return MemoryOptions(**told, whole_layers=bool(options.recompute_collectives))

    def bytes_of_logit(self, itemsize: int, tp: Any = 1) -> Any:
        """Of all copies of a logit. itemsize: of what the model computes. tp: ranks that share the
        vocabulary, a number or a column."""
        own = master_size(itemsize) + (itemsize if itemsize < MASTER else 0)
        alone = own if self.logit_bytes is None else self.logit_bytes
        shared = alone if self.shared_logit_bytes is None else self.shared_logit_bytes
        return (alone + (shared - alone) * (tp > 1)) / self.loss_chunks

    def stages(self, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
        """How layers are shared out."""
        fill = self.ends_fill and num_layers % num_stages and not (num_layers + 2) % num_stages
        if not (self.ends_count or fill) or num_stages == 1:
            return split_layers(num_layers, num_stages)
        sizes = list(slice_sizes(num_layers + 2, num_stages))
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        firsts = accumulate(sizes, initial=0)
        return tuple(
            Stage(i, num_stages, first, size) for i, (first, size) in enumerate(zip(firsts, sizes, strict=False))
        )

    def most_stages(self, num_layers: int) -> int:
        """Of which each has something."""
        return num_layers + 2 * (self.ends_count or self.ends_fill)


PLAIT = MemoryOptions()
