"""Published measurements as inputs of the planner's models: one CSV row -> shapes, a point of the strategy
space, a cluster, and what was measured.

Two formats: ``../shared/data/measurements`` (its README says what the columns mean) and vTrain's ground truth
(github.com/VIA-Research/vTrain, MIT). Throughput in FLOP/s and MFU are never read: they follow from times by
conventions that differ. What a row does not say is either settled here, by one rule for all sources, or the
row is skipped, with a reason.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from plait.core.cluster import Cluster
from plait.core.errors import JobError
from plait.plan.layer_time import Options
from plait.plan.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, Points
from plait.plan.rates import AnyPrecision
from plait.plan.shapes import Shapes

DATA = Path(__file__).parents[2] / "shared" / "data"
DEFAULT_FILES = ("measurements/measurements.csv", "vtrain/gt_single.csv", "vtrain/gt_multi.csv")
GIB = 2**30

MEASUREMENTS = [
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
VTRAIN = [
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
]  # fmt: skip
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
POSITIVE = ("iter_time_s", "derived_iter_time_s", "peak_mem_gib")
FUSED_SINCE = "2022-06"
"""FlashAttention was published (arXiv 2205.14135); what says nothing of attention is fused from then on."""
HIDDEN_SINCE = "2023"
"""From when on reductions of gradients are taken to run beside the backward where a row says nothing."""
ASYNC_SINCE = "2022-04"
"""From when on Megatron-LM's reductions run beside weight gradients (release 3.0)."""
VOCAB = 51200
"""Where a row gives none: GPT-2's, padded, as in Megatron-LM's examples."""


FLASH_1 = 1.8
FLASH_2_SINCE = "2024"
"""A row that says flash and no more means FlashAttention-1 before; its successor appeared in July 2023."""
KERNELS = ((r"\bte\b|cudnn", 0.6), (r"flash_attentionv?1", FLASH_1), (r"^torch$", 1.7))
"""Of attention, to the one that fused_attention stands for (FlashAttention-2; Megatron-LM's fused softmax
where nothing is fused): cuDNN's and FlashAttention-3's on Hopper (arXiv 2407.08608: 1.5 to 2 times as fast),
FlashAttention-1 (arXiv 2307.08691: half as fast), separate kernels of torch for scale, mask and softmax."""
UNFUSED_NORM = 4.0
"""RMSNorm as written in torch, to one kernel: a copy to fp32, square, mean, two products, a copy back."""


class Skipped(Exception):
    """A row that says too little, or is about something else."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. point: one row of columns. seconds, memory: measured; None where not. memory: bytes,
    ``memory_kind`` says of what. job: what stays the same while layouts differ. stated: nothing that
    time hangs on was inferred; constants are fitted to such rows only. full: the row says
    everything."""

    name: str
    source: str
    shapes: Shapes
    point: Points
    cluster: Cluster
    sequence: int
    precision: AnyPrecision
    options: Options
    seconds: float | None
    memory: float | None
    memory_kind: str
    oom: bool
    full: bool
    stated: bool
    job: tuple[Any, ...]
    told: Mapping[str, str]

    @property
    def device(self) -> str:
        """The preset's name."""
        return self.cluster.name


@dataclass(frozen=True)
class Rows:
    """What files gave. skipped: reason -> how many rows."""

    rows: list[Row]
    skipped: Counter[str]


def read_rows(files: Iterable[Path]) -> Rows:
    """All rows of all files that can be predicted. Raises JobError naming file, line and column of what is
    wrong."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for file in files:
        lines = _lines(file)
        columns = list(lines[0]) if lines else _header(file)
        kind = _format(file, columns)
        for number, values in enumerate(lines, start=2):
            try:
                rows.append(kind(values, file.stem))
            except Skipped as reason:
                skipped[str(reason)] += 1
            except _Bad as bad:
                raise JobError(f"line {number}: {bad}", file=str(file), key=bad.column) from None
    return Rows(rows, skipped)


def default_files() -> list[Path]:
    """The measurements beside the project. Raises JobError where they are not."""
    missing = [name for name in DEFAULT_FILES if not (DATA / name).is_file()]
    if missing:
        raise JobError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there",
            file=str(DATA),
            fix="Give measurements by --rows FILE",
        )
    return [DATA / name for name in DEFAULT_FILES]


class _Bad(Exception):
    def __init__(self, column: str, problem: str) -> None:
        super().__init__(problem)
        self.column = column


def _lines(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            lines = list(csv.DictReader(opened, restkey="more", restval=None))
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}", file=str(file)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"is no CSV file: {error}", file=str(file)) from None
    for number, line in enumerate(lines, start=2):
        if "more" in line or None in line.values():
            raise JobError(f"line {number} has not as many columns as the first", file=str(file))
    return lines


def _header(file: Path) -> list[str]:
    return next(csv.reader(file.read_text(encoding="utf-8-sig").splitlines()), [])


def _format(file: Path, columns: list[str]) -> Callable[[Mapping[str, str], str], Row]:
    needed, read = (VTRAIN, _vtrain) if "# GPUs" in columns else (MEASUREMENTS, _measurement)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise JobError(
            f"has no column {', '.join(missing[:6])}{' and others' if len(missing) > 6 else ''}",
            file=str(file),
            fix="Use the format of shared/data/measurements, or of vTrain's ground truth",
        )
    return read


def _number(values: Mapping[str, str], column: str) -> float | None:
    """None where empty. Times and sizes are positive and finite."""
    text = values[column].strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise _Bad(column, f"'{text}' is not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise _Bad(column, f"{text} is not a positive number")
    return number


# ---- vTrain ----


def _vtrain(values: Mapping[str, str], stem: str) -> Row:
    """The files do not speak of recomputation, nor of what is sharded. On several nodes attention is taken to
    be recomputed and the optimizer to be sharded over dp, as Megatron-LM of the time advises: of what was
    tried that agrees best with the times (median error 3 %; no recomputation 8 %, all layers 25 %), and rows
    that would not fit without then do, but for a quarter. Nothing is fitted to these rows."""
    number = {name: _number(values, name) for name in VTRAIN}
    empty = [name for name, value in number.items() if value is None]
    if empty:
        raise _Bad(empty[0], "is empty")
    get: dict[str, Any] = number
    hidden, heads = int(get["hidden size"]), int(get["attention heads"])
    tp, dp, pp = (int(get[f"{name} parallelism"]) for name in ("tensor", "data", "pipeline"))
    micro, batch = int(get["micro batch"]), int(get["global batch"])
    if tp * dp * pp != get["# GPUs"] or batch % (dp * micro):
        raise Skipped("degrees do not multiply to the GPUs, or micro-batches to the batch")
    shapes = Shapes(num_layers=int(get["# layers"]), hidden=hidden, num_heads=heads, num_kv_heads=heads,
                    head_size=hidden / heads, ffn_hidden=4 * hidden, vocab=VOCAB, gated=0, tied_embeddings=1,
                    learned_positions=1, max_sequence=int(get["sequence length"]))  # fmt: skip
    several = get["# GPUs"] > 8
    point = {"tp": tp, "dp": dp, "pp": pp, "micro": micro, "num_micro": batch // (dp * micro),
             "overlap": OVERLAPS.index("sync"), "shard_overlap": SHARD_OVERLAPS.index("none"),
             "recompute": RECOMPUTES.index("selective" if several else "none"),
             "optim": dp if several else 1}  # fmt: skip
    job = (stem, hidden, heads, shapes.num_layers, shapes.max_sequence, int(get["# GPUs"]), batch)
    return Row(
        name=f"{stem}:{','.join(values[name] for name in VTRAIN[:-1])}",
        source=f"vtrain-{stem.removeprefix('gt_')}",
        shapes=shapes,
        point=Points.of([point]),
        cluster=cluster_of("a100-80", 8, 800),  # vTrain (arXiv 2312.12391): 4 x 200 Gbit/s HDR a node
        sequence=int(get["sequence length"]),
        precision="bf16-mixed",
        options=Options(
            fused_attention=False, recompute_attention=True, recompute_collectives=True, gradient_bytes=2.0
        ),
        stated=not several,
        seconds=get["iteration time (ms)"] / 1e3,
        memory=None,
        memory_kind="",
        oom=False,
        full=True,
        job=job,
        told=values,
    )


# ---- the collection ----


def _measurement(values: Mapping[str, str], stem: str) -> Row:
    numbers = {name: _number(values, name) for name in (*COUNTS, *POSITIVE)}
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
    if not values["recompute"]:
        raise Skipped("no recompute")
    oom = values["outcome"] != "ok"
    seconds = numbers["iter_time_s"] or numbers["derived_iter_time_s"]
    memory = numbers["peak_mem_gib"]
    if seconds is None and memory is None and not oom and not values["peak_mem"]:
        raise Skipped("neither time nor memory")
    shapes, point = _shapes(values, numbers), _point(values, numbers)
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


def _point(values: Mapping[str, str], numbers: Mapping[str, Any]) -> Points:
    tp, pp, dp, cp = (int(numbers[name] or 1) for name in ("tp", "pp", "dp", "cp"))
    micro, replicas = int(numbers["micro_batch"]), dp * cp
    if tp * pp * replicas != numbers["num_gpus"]:
        raise Skipped("degrees do not multiply to the GPUs")
    count = numbers["global_batch"] / (dp * micro)
    if count < 1:
        raise Skipped("less than one micro-batch a replica")
    schedule, virtual = _schedule(values, numbers, pp)
    kind, layers = _recompute(values["recompute"], int(numbers["layers"]) // pp)
    stage = _stage(values["zero_stage"], values["optimizer"])
    shard = min(int(numbers["fsdp_shard"] or replicas), replicas)
    if replicas % shard:
        raise Skipped("shards do not divide the replicas")
    tp_hidden, dp_hidden, _ = _overlaps(values["comm_overlap"])
    hidden = dp_hidden or stage == 3 or values["date"] >= HIDDEN_SINCE
    plain = "async" if values["date"] >= ASYNC_SINCE else "sync"
    point = Points.of([{
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
    return int(told) if told in ("0", "1", "2", "3") else 1


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
    return Options(
        fused_attention=fused,
        attention_work=work,
        norm_work=UNFUSED_NORM if bare and values["gated_mlp"] == "1" else 1.0,
        recompute_attention=True,
        recompute_collectives=True,
        transfers_hidden=_overlaps(values["comm_overlap"])[2],
        steps_overlap=values["pp_schedule"].lower() in ("zb-2p", "zb-v"),
        gradient_bytes=4.0 if "fp32 grad" in precision else 2.0,
    )


def _precision(told: str) -> AnyPrecision:
    text = told.lower()
    if text.startswith(("bf16", "fp16")):
        return "bf16-mixed"
    if text.startswith(("fp8", "mxfp8")):
        return "fp8"
    raise Skipped(f"precision is '{told}'")


PRESETS = (
    (r"V100", "v100"), (r"A100-40", "a100-40"), (r"A100", "a100-80"), (r"A800", "a800"), (r"H100-96", "h100-96"),
    (r"H100", "h100"), (r"H200", "h200"), (r"GB200", "gb200"),
)  # fmt: skip


def _cluster(values: Mapping[str, str], numbers: Mapping[str, Any]) -> Cluster:
    name = next((preset for pattern, preset in PRESETS if re.match(pattern, values["gpu"])), None)
    if name is None:
        raise Skipped(f"{values['gpu'] or 'a device without a name'} is not described")
    ranks = int(numbers["gpus_per_node"] or 0)
    return cluster_of(name, 0 if name == "gb200" else ranks, node_gigabits(values["inter_node"], ranks or 8))


def node_gigabits(told: str, ranks: int) -> float:
    """Gbit/s of a node's links to others, as a row says it; 0 where it does not."""
    if match := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", told):
        return float(match[1]) * float(match[2])
    if match := re.search(r"(\d+)\s*Gbps/node", told):
        return float(match[1])
    if match := re.search(r"(\d+)\s*Gb/s.* per GPU", told):
        return float(match[1]) * ranks
    return 400.0 if "Omni-Path" in told else 0.0  # Jean Zay: 4 x 100 Gbit/s a node


@cache
def cluster_of(name: str, ranks_per_node: int, gigabits: float) -> Cluster:
    """A preset with other nodes. 0: the preset's."""
    cluster = Cluster.preset(name)
    ranks = ranks_per_node or cluster.ranks_per_node
    inner, outer = cluster.tiers[0], cluster.tiers[-1]
    if ranks_per_node:
        inner = inner.model_copy(update={"ranks": ranks})
    if gigabits:
        rate = outer.rate.model_copy(update={"value": gigabits * 1e9 / 8 / ranks, "source": "the row"})
        outer = outer.model_copy(update={"rate": rate})
    return cluster.model_copy(update={"ranks_per_node": ranks, "tiers": (inner, outer)})
