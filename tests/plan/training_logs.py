"""Training logs as frameworks print them, of steps that take as long as they are told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ARGUMENTS: dict[str, Any] = {
    "accumulate_allreduce_grads_in_fp32": True, "add_bias_linear": False, "add_position_embedding": True,
    "align_grad_reduce": True, "apply_rope_fusion": True, "async_tensor_model_parallel_allreduce": False,
    "attention_backend": "AttnBackend.auto", "attention_dropout": 0.0, "barrier_with_L1_time": True, "bf16": True,
    "bias_gelu_fusion": False, "bias_swiglu_fusion": True, "context_parallel_size": 1, "cp_comm_type": ["p2p"],
    "expert_tensor_parallel_size": 2, "ffn_hidden_size": 14336, "fp8": None, "fp8_margin": 0, "fp8_wgrad": True,
    "global_batch_size": 64, "group_query_attention": True, "hidden_dropout": 0.0, "hidden_size": 4096,
    "kv_channels": 128, "kv_lora_rank": 32, "make_vocab_size_divisible_by": 128, "max_position_embeddings": 8192,
    "micro_batch_size": 1, "moe_router_topk": 2, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
    "num_attention_heads": 32, "num_experts": None, "num_layers": 32, "num_layers_per_virtual_pipeline_stage": None,
    "num_query_groups": 8, "overlap_grad_reduce": True, "overlap_p2p_comm": False, "overlap_param_gather": True,
    "params_dtype": "torch.bfloat16", "pipeline_model_parallel_size": 2, "position_embedding_type": "rope",
    "recompute_granularity": None, "recompute_modules": None, "rotary_base": 500000, "seq_length": 8192,
    "sequence_parallel": True, "swiglu": True, "tensor_model_parallel_size": 2, "tokenizer_type": "HuggingFace",
    "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True, "vocab_size": None,
    "virtual_pipeline_model_parallel_size": None, "world_size": 16,
}  # fmt: skip
"""Of a model of 8 billion parameters on 16 ranks."""
SCATTER = 0.003


def arguments_block(values: dict[str, Any]) -> list[str]:
    """As printed at start: names, dots up to 48 characters, values."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    return [f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}"]


def iteration(step: int, seconds: float, batch: int) -> str:
    """One line."""
    return (
        f" [2026-01-01 00:00:00] iteration {step:8d}/    1000 | consumed samples: {step * batch:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.000000E-04 | "
        f"global batch size: {batch:5d} | lm loss: 5.000000E+00 | grad norm: 1.000 |"
    )


def seconds_of(steps: Iterable[int], seconds: float) -> list[float]:
    """Scattered, with a slow first step and one outlier."""
    draw = random.Random(1)
    odd = {1: 4.0, 20: 2.0}
    return [seconds * odd.get(step, 1.0) * (1 + draw.gauss(0, SCATTER)) for step in steps]


def megatron_log(file: Path, seconds: float, *, steps: Sequence[int] = range(1, 41), **changed: Any) -> Path:
    """A log of Megatron-LM. changed: its arguments."""
    values = ARGUMENTS | changed
    lines = [
        *arguments_block(values),
        " > padded vocab (size: 128256) with 0 dummy tokens (new size: 128256)",
        *(
            iteration(step, took, values["global_batch_size"])
            for step, took in zip(steps, seconds_of(steps, seconds), strict=True)
        ),
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def torchtitan_log(
    file: Path, seconds: float, *, ranks: int = 8, tp: int = 1, steps: Sequence[int] = (1, *range(10, 130, 10)),
    more: Sequence[str] = (),
) -> Path:  # fmt: skip
    """A log of torchtitan, in colours and with a launcher's prefix. more: lines at its start."""
    sequence, batch = 8192, ranks // tp
    lines = [
        *more,
        f"Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={batch}, cp=1, tp={tp}, ep=1",
        "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory",
        "\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m",
        "Applied full activation checkpointing to the model",
        f"Trainer is initialized with local batch size 1, global batch size {batch}, gradient accumulation steps 1, "
        f"sequence length {sequence}, total steps 1000 (warmup 200)",
    ]
    for step, took in zip(steps, seconds_of(steps, seconds), strict=True):
        rate = round(batch * sequence / (took * ranks))
        lines.append(
            f"\x1b[31mstep: {step:2}  \x1b[32mloss:  8.0277  grad_norm:  1.4604  \x1b[34mmemory:  1.21GiB(0.86%)  "
            f"tps: {rate:,}  tflops: 0.41  mfu: 0.04%\x1b[39m"
        )
    lines.append("validate step: 110  loss:  8.0277  memory:  1.21GiB(0.86%)  tps: 1")
    named = [line if line.startswith((" ", "}")) else f"[titan] 2026-01-01 00:00:00,000 - root - INFO - {line}"
             for line in lines]  # fmt: skip
    file.write_text("".join(f"[rank0]:{line}\n" for line in named))
    return file
