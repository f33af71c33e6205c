"""vTrain's ground truth (github.com/VIA-Research/vTrain, MIT) as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_row import VOCAB, Bad, Row, Skipped, check_possible, check_seconds, cluster_of, number, whole

from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SHARD_OVERLAPS, StrategyTable
from plait.core.step.columns.shapes import Shapes
from plait.formats.base.frameworks import COMMON

TIME = "iteration time (ms)"
VTRAIN_COLUMNS = [
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", TIME,
]  # fmt: skip


def read_vtrain(values: Mapping[str, str], stem: str) -> Row:
    """The files do not speak of recomputation, nor of what is sharded. On several nodes attention is taken to
    be recomputed and the optimizer to be sharded over dp, as Megatron-LM of the time advises: of what was
    tried that agrees best with the times (median error 3 %; no recomputation 8 %, all layers 25 %), and rows
    that would not fit without then do, but for a quarter. Nothing is fitted to these rows."""
    counts = {name: whole(values, name) for name in VTRAIN_COLUMNS[:-1]}
    numbers: dict[str, float | None] = {**counts, TIME: number(values, TIME)}
    empty = [name for name, value in numbers.items() if value is None]
    if empty:
        raise Bad(empty[0], "is empty")
    get: dict[str, Any] = numbers
    hidden, heads = int(get["hidden size"]), int(get["attention heads"])
    tp, dp, pp = (int(get[f"{name} parallelism"]) for name in ("tensor", "data", "pipeline"))
    micro, batch = int(get["micro batch"]), int(get["global batch"])
    if tp * dp * pp != get["# GPUs"] or batch % (dp * micro):
        raise Skipped("degrees do not multiply to the GPUs, or micro-batches to the batch")
    shapes = Shapes(num_layers=int(get["# layers"]), hidden=hidden, num_heads=heads, num_kv_heads=heads,
                    head_size=hidden / heads, ffn_hidden=4 * hidden, vocab=VOCAB, gated=0, tied_embeddings=1,
                    learned_positions=1, max_sequence=int(get["sequence length"]))  # fmt: skip
    check_possible(shapes, pp, 1)
    check_seconds(get[TIME] / 1e3, TIME)
    several = get["# GPUs"] > 8
    point = {"tp": tp, "dp": dp, "pp": pp, "micro": micro, "num_micro": batch // (dp * micro),
             "overlap": OVERLAPS.index("sync"), "shard_overlap": SHARD_OVERLAPS.index("none"),
             "recompute": RECOMPUTES.index("selective" if several else "none"),
             "optim": dp if several else 1}  # fmt: skip
    job = (stem, hidden, heads, shapes.num_layers, shapes.max_sequence, int(get["# GPUs"]), batch)
    return Row(
        name=f"{stem}:{','.join(values[name] for name in VTRAIN_COLUMNS[:-1])}",
        source=f"vtrain-{stem.removeprefix('gt_')}",
        shapes=shapes,
        point=StrategyTable.of([point]),
        cluster=cluster_of("a100-80", 8, 800),  # vTrain (arXiv 2312.12391): 4 x 200 Gbit/s HDR a node
        sequence=int(get["sequence length"]),
        precision="bf16-mixed",
        options=replace(COMMON, fused_attention=False, gradient_bytes=2.0),
        stated=not several,
        seconds=get["iteration time (ms)"] / 1e3,
        memory=None,
        memory_kind="",
        oom=False,
        full=True,
        job=job,
        told=values,
    )
