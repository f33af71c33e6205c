"""What other frameworks keep in memory and Plait does not, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from plait.core.stages import Stage, split_layers
from plait.core.strategy import slice_sizes
from plait.plan.layer_time import Options

SCORE_BYTES = 5.0
"""Of an attention weight that unfused attention keeps: 2 of scores, 1 of dropout's mask, 2 of their product
(Korthikanti 2022, arXiv 2205.05198)."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """The defaults are Plait's own runs. Of ``Options``, fused_attention and recompute_attention matter.

    gpu: norms keep only their input, and reductions nothing (torch's norms and gloo keep more on a CPU).

    parameter_bytes, main_gradient_bytes, optimizer_bytes: of one number that a rank keeps; None as in Plait:
    parameters as the model computes, gradients in fp32, two moments and a master copy in fp32. gathered_bytes:
    of a number of a gathered parameter.

    score_bytes: of an attention weight, where attention is not fused. stream_bytes, sharded_bytes: what a layer
    keeps beyond Plait's, by token and hidden size: of what every tensor-parallel rank has, and of what each has
    a part of. whole_layers: full recomputation keeps one stream a layer and repeats a whole layer (Plait: two,
    and repeats half of one).

    logit_bytes: of a logit, all its copies while the loss is computed (None: one in fp32, as in Plait).
    logits_whole: every tensor-parallel rank has all logits. ends_count: stages are as equal as can be if embedding
    and head count as a layer each.
    """

    gpu: bool = True
    parameter_bytes: float | None = None
    main_gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    gathered_bytes: float | None = None
    score_bytes: float = SCORE_BYTES
    stream_bytes: float = 0.0
    sharded_bytes: float = 0.0
    whole_layers: bool = False
    logit_bytes: float | None = None
    logits_whole: bool = False
    ends_count: bool = False

    @staticmethod
    def of(options: Options) -> MemoryOptions:
        """With what options of time say of memory."""
        if isinstance(options, MemoryOptions):
            return options
        told: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Options)}
        return MemoryOptions(**told, whole_layers=bool(options.recompute_collectives))

    def stages(self, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
        """How layers are shared out."""
        sizes = slice_sizes(num_layers + 2, num_stages)
        if not self.ends_count or num_stages < 3 or min(sizes) < 2:
            return split_layers(num_layers, num_stages)
        return split_layers(num_layers, num_stages, (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1))


PLAIT = MemoryOptions()

_MEGATRON = MemoryOptions(
    recompute_attention=True, whole_layers=True, stream_bytes=2.0, main_gradient_bytes=4.0, logit_bytes=10.0
)
FRAMEWORKS: Mapping[str, MemoryOptions] = {
    "plait": PLAIT,
    "megatron": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, main_gradient_bytes=2.0, logit_bytes=12.0),
    "zero-bubble": replace(_MEGATRON, main_gradient_bytes=2.0, ends_count=True),
    "aleph-alpha": replace(_MEGATRON, main_gradient_bytes=2.0, logit_bytes=20.0, logits_whole=True, stream_bytes=0.0),
    "internevo": replace(_MEGATRON, main_gradient_bytes=2.0, stream_bytes=0.0),
    "paddlenlp": replace(_MEGATRON, stream_bytes=0.0),
    "fsdp": replace(
        _MEGATRON, parameter_bytes=4.0, gathered_bytes=2.0, main_gradient_bytes=4.0, optimizer_bytes=8.0,
        stream_bytes=0.0,
    ),
}  # fmt: skip
"""What is known of each, or follows from its published memory (docs/adr/0014)."""
