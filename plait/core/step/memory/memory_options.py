"""Memory options: what a run keeps in memory beyond its strategy. Defaults are Plait's own runs.
Other frameworks have other values, and other functions on rows of sizes
(``plait.formats.base.kept_memory``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import MASTER, master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import OptimizerName
from plait.core.step.columns.points import RECOMPUTES, Ints, StrategyTable, column
from plait.core.step.columns.shapes import Options
from plait.core.step.memory.pipeline_memory import SizeRow
from plait.core.step.stages import Stage, split_layers

Bytes = NDArray[np.float64]
NONE = RECOMPUTES.index("none")


@dataclass(frozen=True)
class MatrixBytes:
    """Bytes per number of a layer's weight matrices on a rank. whole: if the rank keeps the matrix
    whole; share: in a shard of it; gathered: in a matrix gathered from shards."""

    whole: float
    share: float
    gathered: float


@dataclass(frozen=True)
class SizedPoints:
    """Strategies whose sizes are computed. points: one strategy of every kind. sequence: tokens.
    itemsize: bytes of a number."""

    model: ModelSpec
    points: StrategyTable
    sequence: int
    itemsize: int

    @cached_property
    def tokens(self) -> Bytes:
        """Tokens of a micro-batch on a rank."""
        return (self.points.micro * (self.sequence // self.points.cp)).astype(np.float64)

    @cached_property
    def stream(self) -> Bytes:
        """Numbers of the residual stream on a rank."""
        return self.tokens * self.model.hidden / np.where(self.points.sequence_parallel > 0, self.points.tp, 1)

    def quantised(self, input_bytes: float, normed: Bytes) -> Bytes:
        """Return the bytes that a layer saves if inputs of products have ``input_bytes`` bytes
        each. Inputs are the streams of ``normed`` tokens and the input of the MLP's second weight.
        Attention's output is kept twice: its gradient needs the unquantised one."""
        model, tp = self.model, self.points.tp
        streams = (1 if model.parallel_block else 2) * normed * model.hidden
        inputs = streams + self.tokens * model.letters.F / tp
        return (self.itemsize - input_bytes) * inputs - input_bytes * self.tokens * model.letters.Q / tp


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """Memory options of a run; the defaults are Plait's own runs.

    gpu: norms keep only their input, and reductions nothing (torch's norms and gloo keep more on a
    CPU).

    parameter_bytes, main_gradient_bytes, optimizer_bytes: bytes of one number that a rank keeps.
    None is Plait's choice: parameters in the model's compute precision, gradients in fp32, two
    moments and a master copy in fp32. more_alive: micro-batches for which a stage's layers are
    kept, beyond those of the schedule.

    gathered_bytes: bytes of one number of a gathered parameter. matrices: the same for matrices of
    layers if they are quantised, instead of parameter_bytes and gathered_bytes. input_bytes: bytes
    of one number of a product's input, if it is kept quantised; attention's output is then kept in
    addition. update_bytes: while the optimizer runs, bytes of a number whose optimizer state the
    rank owns. fixed_bytes: buffers allocated at the start. sums_in_place: gradients of tied
    embeddings and of parameters replicated over tensor-parallel ranks are reduced in place. defers:
    instruction lists hide collectives behind weight gradients, which keeps these gradients' inputs.

    gathers_stay: if optimizer states are sharded and parameters are not, a rank has its shard of
    the parameters and, gathered, all of them. rounds_reduce: micro-batches of a stage follow each
    other, and its gradients are then reduced to shards, so that only one stage's are whole at a
    time. optimizer: the job's; optimizer_bytes is AdamW's, and other optimizers keep fewer states.
    moment_bytes: bytes of one number of a moment or momentum. reduced_bytes: bytes of a gradient
    that is rounded before it is sent (None for both: as wide as a master). pipeline_doubt: relative
    standard deviation of further tensors of the framework's pipelines.
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
    gathers_stay: bool = False
    rounds_reduce: bool = False
    defers: bool = True
    optimizer: OptimizerName = "adamw"
    moment_bytes: float | None = None
    reduced_bytes: float | None = None
    pipeline_doubt: float = 0.0

    def traced_recompute(self, recompute: Ints) -> Ints:
        """Return the recomputation that the memory trace uses, given the strategies'
        recomputation."""
        return recompute

    def change(self, rows: SizedPoints, sizes: SizeRow) -> None:
        """Adjust, in place, the traced bytes that a micro-batch keeps and works with. rows: the
        strategies; sizes: their bytes by category."""
        if self.input_bytes is None:
            return
        less = rows.quantised(self.input_bytes, rows.tokens) * (rows.points.recompute == NONE)
        sizes.kept_layer[:, 0] -= less
        sizes.held_layer[:, 0] += np.minimum(0, -less) * column("splits", rows.points.schedule)

    def logits(self, itemsize: int, tp: Any = 1) -> Any:
        """Return the bytes of one logit of a rank's shard, with all its copies while the loss is
        computed: one in compute precision, one in fp32. tp: ranks that share the vocabulary, a
        number or an array."""
        return (master_size(itemsize) + (itemsize if itemsize < MASTER else 0)) + 0 * tp

    def stages(self, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
        """Return the stages over which layers are divided."""
        return split_layers(num_layers, num_stages)

    def most_stages(self, num_layers: int) -> int:
        """Return the largest number of stages that are not empty."""
        return num_layers


PLAIT = MemoryOptions()
