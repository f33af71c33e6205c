"""Published measurements, collected in one table (``planner_rows`` says where), as rows. What a row does not
say is settled here, by one rule for all sources."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from planner_row import GIB, VOCAB, Row, Skipped, check_possible, check_seconds, cluster_of, number, whole

from plait.core.cluster.hardware import Cluster
from plait.core.model.precision import Precision
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.formats.base.frameworks import COMMON

COLUMNS = [
    "row_id",
    "source_id",
    "completeness",
    "arch_type",
    "task",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "gated_mlp",
    "vocab",
    "seq_len",
    "gpu",
    "num_gpus",
    "gpus_per_node",
    "inter_node",
    "tp",
    "pp",
    "vpp",
    "dp",
    "sp",
    "cp",
    "ep",
    "zero_stage",
    "fsdp_shard",
    "micro_batch",
    "global_batch",
    "pp_schedule",
    "recompute",
    "precision",
    "attention",
    "comm_overlap",
    "outcome",
    "iter_time_s",
    "peak_mem",
    "peak_mem_unit",
    "peak_mem_gib",
    "peak_mem_kind",
    "derived_iter_time_s",
    "date",
    "optimizer",
]
COUNTS = [
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "num_gpus",
    "gpus_per_node",
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "fsdp_shard",
    "micro_batch",
    "global_batch",
]
ZERO_STAGES = ("", "0", "1", "2", "3")
POSITIVE = ("iter_time_s", "derived_iter_time_s", "peak_mem_gib")
FUSED_SINCE = "2022-06"
"""FlashAttention was published (arXiv 2205.14135); what says nothing of attention is fused from then on."""
HIDDEN_SINCE = "2023"
"""From when on reductions of gradients are taken to run beside the backward where a row says nothing."""
ASYNC_SINCE = "2022-04"
"""From when on Megatron-LM's reductions run beside weight gradients (release 3.0)."""
FLASH_1 = 1.8
FLASH_2_SINCE = "2024"
"""A row that says flash and no more means FlashAttention-1 before; its successor appeared in July 2023."""
KERNELS = ((r"\bte\b|cudnn", 0.6), (r"flash_attentionv?1", FLASH_1), (r"^torch$", 1.7))
"""Of attention, to the one that fused_attention stands for (FlashAttention-2; Megatron-LM's fused softmax
where nothing is fused): cuDNN's and FlashAttention-3's on Hopper (arXiv 2407.08608: 1.5 to 2 times as fast),
FlashAttention-1 (arXiv 2307.08691: half as fast), separate kernels of torch for scale, mask and softmax."""
UNFUSED_NORM = 4.0
"""RMSNorm as written in torch, to one kernel: a copy to fp32, square, mean, two products, a copy back."""


def read_measurement(values: Mapping[str, str], stem: str) -> Row:
    """A dense transformer's row. stem: of its file. Raises Skipped and Bad."""
    numbers: dict[str, Any] = {name: number(values, name) for name in POSITIVE}
    fractions = list[str]()
    for name in COUNTS:
        try:
            numbers[name] = whole(values, name)
        except Skipped as fraction:  # said after what is not about dense models
            numbers[name] = number(values, name)
            fractions += [] if name == "global_batch" else [str(fraction)]
    if values["arch_type"] != "dense":
        raise Skipped("no dense transformer")
    if values["task"] != "pretrain":
        raise Skipped("not pre-training of all weights")
    cluster = _cluster(values, numbers)
    precision = _precision(values["precision"])
    needed = ("layers", "hidden", "heads", "seq_len", "num_gpus", "tp", "pp", "dp", "micro_batch", "global_batch")
    for name in needed:
        if numbers[name] is None:
            raise Skipped(f"no {name}")
    if fractions:
        raise Skipped(fractions[0])
    if not values["recompute"]:
        raise Skipped("no recompute")
    if values["outcome"].lower() not in ("ok", "oom"):
        raise Skipped(f"outcome is '{values['outcome']}'")
    if values["peak_mem_unit"].startswith("GB"):
        number(values, "peak_mem")
    oom = values["outcome"].lower() != "ok"
    seconds = numbers["iter_time_s"] or numbers["derived_iter_time_s"]
    memory = numbers["peak_mem_gib"]
    if seconds is None and memory is None and not oom and not values["peak_mem"]:
        raise Skipped("neither time nor memory")
    for name in ("iter_time_s", "derived_iter_time_s"):
        check_seconds(numbers[name], name)
    if values["zero_stage"] not in ZERO_STAGES:
        raise Skipped(f"zero_stage is '{values['zero_stage']}'")
    shapes = _shapes(values, numbers)
    check_possible(shapes, int(numbers["pp"]), int(numbers["vpp"] or 1))
    point = _point(values, numbers)
    job = tuple(values[name] for name in ("source_id", "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "gpu",
                                          "num_gpus", "global_batch", "precision", "attention"))  # fmt: skip
    return Row(
        name=values["row_id"],
        source=values["source_id"],
        shapes=shapes,
        point=point,
        cluster=cluster,
        sequence=int(numbers["seq_len"] or 0),
        precision=precision,
        options=_options(values),
        seconds=None if oom else seconds,
        memory=memory * GIB if memory else None,
        memory_kind=values["peak_mem_kind"] or values["peak_mem_unit"],
        oom=oom,
        full=values["completeness"] == "full",
        stated=True,
        job=job,
        told=values,
    )


def _shapes(values: Mapping[str, str], numbers: Mapping[str, Any]) -> Shapes:
    hidden, heads = int(numbers["hidden"]), int(numbers["heads"])
    gated = values["gated_mlp"] == "1"
    return Shapes(
        num_layers=int(numbers["layers"]),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=int(numbers["kv_heads"] or heads),
        head_size=hidden / heads,
        ffn_hidden=int(numbers["ffn"] or (256 * math.ceil(8 * hidden / 3 / 256) if gated else 4 * hidden)),
        vocab=int(numbers["vocab"] or VOCAB),
        gated=int(gated),
        tied_embeddings=int(not gated),
        learned_positions=int(not gated),
        max_sequence=int(numbers["seq_len"]),
    )


def _point(values: Mapping[str, str], numbers: Mapping[str, Any]) -> StrategyTable:
    tp, pp, dp, cp = (int(numbers[name] or 1) for name in ("tp", "pp", "dp", "cp"))
    micro, replicas = int(numbers["micro_batch"]), dp * cp
    if tp * pp * replicas != numbers["num_gpus"]:
        raise Skipped("degrees do not multiply to the GPUs")
    count = numbers["global_batch"] / (dp * micro)
    if count < 1:
        raise Skipped("less than one micro-batch a replica")
    schedule, virtual = _schedule(values, numbers, pp)
    kind, layers = _recompute(values["recompute"], int(numbers["layers"]) // (pp * virtual))
    stage = _stage(values["zero_stage"], values["optimizer"])
    shard = min(int(numbers["fsdp_shard"] or replicas), replicas)
    if replicas % shard:
        raise Skipped("shards do not divide the replicas")
    tp_hidden, dp_hidden, _ = _overlaps(values["comm_overlap"])
    hidden = dp_hidden or stage == 3 or values["date"] >= HIDDEN_SINCE
    plain = "async" if values["date"] >= ASYNC_SINCE else "sync"
    point = StrategyTable.of([{
        "tp": tp, "pp": pp, "dp": dp, "cp": cp, "ring": cp, "micro": micro, "num_micro": int(count),
        "schedule": SCHEDULES.index(schedule), "virtual": virtual, "recompute": RECOMPUTES.index(kind),
        "recompute_layers": layers, "sequence_parallel": int(values["sp"] == "1"),
        "params": shard if stage == 3 else 1, "grads": shard if stage >= 2 else 1, "optim": shard if stage else 1,
        "overlap": OVERLAPS.index("domino" if tp_hidden else plain), "p2": tp if tp_hidden else 1,
        "shard_overlap": SHARD_OVERLAPS.index("both" if hidden else "none"),
    }])  # fmt: skip
    if count == int(count):
        return point
    return replace(point, num_micro=np.array([count]))  # the last micro-batch is smaller


def _schedule(values: Mapping[str, str], numbers: Mapping[str, Any], pp: int) -> tuple[str, int]:
    told, virtual = values["pp_schedule"].lower(), int(numbers["vpp"] or 1)
    if pp == 1:
        return "1f1b", 1
    if told == "1f1b-i" and virtual == 1:  # one layer a chunk
        virtual = (int(numbers["layers"]) + 2) // pp
    names = {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-2p": "zb-h2", "zb-h2": "zb-h2", "zb-v": "zb-v", "gpipe": "gpipe"}
    if told in names:
        return names[told], 2 if told == "zb-v" else 1
    return ("interleaved", virtual) if virtual > 1 else ("1f1b", 1)


def _recompute(told: str, layers: int) -> tuple[str, int]:
    if told == "none":
        return "none", -1
    if told.startswith("full"):
        return "full", -1
    if told in ("selective", "selective(attention core)"):
        return "selective", -1
    if told.startswith("selective("):  # saves about every second product
        return "full", (layers + 1) // 2
    raise Skipped(f"recompute is '{told}'")


def _stage(told: str, optimizer: str) -> int:
    """Of ZeRO. What says nothing has a distributed optimizer, as all current frameworks do by default."""
    return int(told) if told else 1


def _overlaps(told: str) -> tuple[bool, bool, bool]:
    """Whether collectives of tensor parallelism, gradients and parameters, and transfers are hidden."""
    parts = [part for part in told.lower().split(";") if not part.strip().endswith(("off", "off in yaml"))]
    text = ";".join(parts)
    tensor = "async tp" in text or "tp-comm-overlap" in text or bool(re.search(r"\btp\+", text))
    return tensor, "grad" in text or bool(re.search(r"\bdp\b", text)), "p2p" in text


def _options(values: Mapping[str, str]) -> Options:
    attention, precision = values["attention"].lower(), values["precision"].lower()
    fused = "flash" in attention and "without" not in attention if attention else values["date"] >= FUSED_SINCE
    hopper = re.match(r"H[12]00|GB|B", values["gpu"]) is not None
    work = 1.0
    for pattern, known in KERNELS if hopper else KERNELS[1:]:
        if re.search(pattern, attention):
            work = known
    if attention == "flash" and values["date"] < FLASH_2_SINCE:
        work = FLASH_1
    # A sheet that names the kernel of attention alone, where others of it name that of norms as well.
    bare = re.fullmatch(r"torch|fused|flash_attention(2|v[\d.]+)", attention) is not None
    return replace(
        COMMON,
        fused_attention=fused,
        attention_work=work,
        norm_work=UNFUSED_NORM if bare and values["gated_mlp"] == "1" else 1.0,
        transfers_hidden=_overlaps(values["comm_overlap"])[2],
        steps_overlap=values["pp_schedule"].lower() in ("zb-2p", "zb-v"),
        gradient_bytes=4.0 if "fp32 grad" in precision else 2.0,
    )


def _precision(told: str) -> Precision:
    text = told.lower()
    if text.startswith(("bf16", "fp16")):
        return "bf16-mixed"
    if text.startswith("nvfp4"):
        return "nvfp4"
    if text.startswith(("mxfp8", "fp8-mx")):
        return "mxfp8"
    if text.startswith("fp8"):
        return "fp8"
    raise Skipped(f"precision is '{told}'")


PRESETS = (
    (r"V100", "v100"), (r"A100-40", "a100-40"), (r"A100", "a100-80"), (r"A800", "a800"), (r"H100-96", "h100-96"),
    (r"H100", "h100"), (r"H200", "h200"), (r"H20\b", "h20"), (r"GB200", "gb200"), (r"GB300", "gb300"),
    (r"B200", "b200"), (r"B300", "b300"), (r"MI300X", "mi300x"), (r"L40S", "l40s"),
)  # fmt: skip


def _cluster(values: Mapping[str, str], numbers: Mapping[str, Any]) -> Cluster:
    name = next((preset for pattern, preset in PRESETS if re.match(pattern, values["gpu"])), None)
    if name is None:
        raise Skipped(f"{values['gpu'] or 'a device without a name'} is not described")
    ranks = int(numbers["gpus_per_node"] or 0)
    return cluster_of(name, 0 if name in ("gb200", "gb300") else ranks, node_gigabits(values["inter_node"], ranks or 8))


def node_gigabits(told: str, ranks: int) -> float:
    """Gbit/s of a node's links to others, as a row says it; 0 where it does not."""
    if match := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", told):
        return float(match[1]) * float(match[2])
    if match := re.search(r"(\d+)\s*Gbps/node", told):
        return float(match[1])
    if match := re.search(r"(\d+)\s*Gb/s.* per GPU", told):
        return float(match[1]) * ranks
    return 400.0 if "Omni-Path" in told else 0.0  # Jean Zay: 4 x 100 Gbit/s a node
