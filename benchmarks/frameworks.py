"""What other frameworks keep in memory, as their published memory tells it (docs/adr/0014)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.core.step.memory.memory_options import PLAIT, MemoryOptions

_OTHER = MemoryOptions(
    recompute_attention=True, whole_layers=True, sums_in_place=True, rotary_in_place=True, regathers=True,
    logit_bytes=10.0, defers=False,
)  # fmt: skip
"""What all others have in common. Logits: in bf16, in fp32, and what the softmax keeps."""
_FSDP = replace(
    _OTHER, parameter_bytes=4.0, gathered_bytes=2.0, main_gradient_bytes=4.0, optimizer_bytes=8.0
)  # fmt: skip
FRAMEWORKS: Mapping[str, MemoryOptions] = {
    "plait": PLAIT,
    "megatron": replace(_OTHER, fused_gate=True),
    "nemo": replace(_OTHER, fused_gate=True, main_gradient_bytes=2.0),  # distributed_fused_adam, grad_sync_dtype bf16
    "megatron-deepspeed": replace(
        _OTHER, main_gradient_bytes=2.0, optimizer_bytes=18.0, stream_bytes=2.0, fixed_bytes=2e9, logit_bytes=8.0
    ),
    "zero-bubble": replace(_OTHER, main_gradient_bytes=2.0, stream_bytes=2.0, ends_count=True, fused_attention=False),
    "aleph-alpha": replace(
        _OTHER, main_gradient_bytes=2.0, score_bytes=8.0, logit_bytes=22.0, logits_whole=True, regathers=False
    ),
    "internevo": replace(_OTHER, main_gradient_bytes=2.0, update_bytes=14.0),
    "paddlenlp": replace(_OTHER, logit_bytes=22.0),
    "fsdp": _FSDP,
    "torchtitan": replace(_FSDP, logit_bytes=4.0),  # torch.compile makes one kernel of the loss
    "llm-foundry": replace(_FSDP, logit_bytes=4.0),  # fused_crossentropy: logits and their gradient in one place
}  # fmt: skip
