"""What other frameworks do otherwise than Plait in the time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """What other frameworks do otherwise than Plait; the defaults are Plait's own runs. Each may be a column.

    fused_attention: one kernel that never writes the scores. attention_work, norm_work: how much longer the
    kernels in use take than those that the cluster's constants are about. recompute_attention: selective
    recomputation repeats attention's core (Korthikanti 2022, arXiv 2205.05198), not norms and activations.
    recompute_collectives: full recomputation repeats the forward's collectives of tensor parallelism.
    sums_late: new parameters that every rank keeps whole are gathered at a step's end, beside nothing; and so
    are gradients summed where optimizer states are not shared out, and within a pipeline (DeepSpeed).
    transfers_hidden: transfers between stages run beside computation; rounds_hide_transfers: those of places
    with several stages do (Megatron-LM's overlap_p2p_comm, which its 1F1B has not). in_lists: stages run
    lists of ops, each begun by the host when it begins, and gradients are summed in those of the last
    backward (``step_end``). gradient_bytes: of a gradient on its way. weight_bytes: of a gathered parameter;
    quantised: of one of a layer's matrices, so many times that. steps_overlap: a place begins the next step
    while others end this one, and repairs what clipping would have changed (Qi 2023, arXiv 2401.10241).
    dispatch_once: a token is sent once to each node and rank with experts of its own (``dispatch_time``).
    exchange_hidden: exchanges of routed tokens run beside another micro-batch's layers: the forward of one
    and the backward of another go together (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). experts_whole:
    tensor parallelism cuts no expert; those who share them out are neighbours of dp x cp x tp (Megatron-LM's
    expert-tensor-parallel-size 1). states_moved: what the optimizer moves of a number, to what it moves of
    one in fp32. states_on_host, kept_on_host: shares of optimizer states, which are updated there, and of
    what layers keep for the backward. ends_shared: embedding and head are cut over all stages (vocabulary
    parallelism; Yeung 2024, arXiv 2411.05288), whose exchanges run beside layers. muon_steps: iterations by
    which Muon orthogonalises layers' matrices, 0 of another optimizer; matrix_itemsize: bytes of their
    numbers.
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


OTHERS = Options(recompute_attention=True, recompute_collectives=True, rounds_hide_transfers=False, in_lists=False)
"""What all other frameworks have in common."""
