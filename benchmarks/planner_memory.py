"""How well ``step.memory.closed_memory`` predicts published memory: bytes where a row has them, and whether
what ran is said to fit and what ran out of memory is not.

    python benchmarks/planner_memory.py [--json] [--rows FILE ...] [--fit]

Per source: rows with memory and their errors, ``fit_right`` (of rows that ran), ``oom_right`` (of rows that
did not). --fit: the overhead's constants fitted to rows of nvidia-smi, and how far memory may be off
(``Doubt``) to all rows; of all sources, and with each left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planner_row import GIB, Row
from planner_rows import default_files, read_rows

from plait.core.cluster.efficiency import Overhead
from plait.core.step.columns.points import StrategyTable
from plait.core.step.memory.closed_memory import MemoryColumns, communicators, step_memory, usable
from plait.core.step.memory.memory_options import MemoryOptions
from plait.formats.base.frameworks import MEMORY_OPTIONS

MEASURED_BY = (("nvidia-smi", "device"), ("GPU memory", "device"), ("alloc", "tensors"), ("logged", "reserved"),
               ("peak over stages", "tensors"))  # fmt: skip
"""What a row's ``peak_mem_kind`` speaks of. What torchtitan logs is what its allocator has reserved, tensors
or not (max_reserved_gib since commit 9f5a56d67, 2024-03-15), with segments that grow (expandable_segments in
run_llama_train.sh), of which only what is stuck is wasted."""
EAGER = (("", "2024-10-22"), ("2024-12-18", "2025-02-20"))
"""From when to when torchtitan did not compile its loss (commits e10cb9494, e8977b007, d1f62be73); what says
a month alone means its end."""
EAGER_LOGIT_BYTES = 12.0
"""In the loss's backward: fp32 log-probabilities, and two gradients as large."""
EMBEDDING_COUNTS = "type:transformer|embedding"
"""DeepSpeed's partition in which an embedding counts as a layer (--pp-partition-method)."""
FRAMEWORK_OF = (
    ("Megatron-LM (ZB fork)", "zero-bubble"),
    ("Megatron-DeepSpeed", "megatron-deepspeed"),
    ("DeepSpeed", "megatron-deepspeed"),
    ("AA-Scaling", "aleph-alpha"),
    ("InternEvo", "internevo"),
    ("torchtitan", "torchtitan"),
    ("llm-foundry", "llm-foundry"),
    ("PaddleNLP", "paddlenlp"),
    ("NeMo", "nemo"),
    ("fms", "fsdp"),
    ("", "megatron"),
)


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """A row and what is said of it. bytes: of what it measured; needed: of its device. error: relative; None
    where nothing was measured."""

    row: Row
    bytes: float
    needed: float
    fits: bool
    error: float | None


def options_of(row: Row) -> MemoryOptions:
    """What its framework keeps, and its own attention and recomputation."""
    told = row.told
    name = next(name for start, name in FRAMEWORK_OF if told.get("framework", "").startswith(start))
    options = MEMORY_OPTIONS[name]
    if name != "zero-bubble":  # which does not say, and keeps more than fused attention would
        options = replace(options, fused_attention=row.options.fused_attention)
    if name == "aleph-alpha" and "RMS kernel" not in told["attention"]:  # norms in single torch ops, in fp32
        options = replace(options, stream_bytes=16.0)
    if name == "torchtitan" and not compiled_loss(told):
        options = replace(options, logit_bytes=EAGER_LOGIT_BYTES)
    if EMBEDDING_COUNTS in told.get("notes", ""):
        options = replace(options, ends_count=True)
    if "fp32 grad" in told.get("precision", ""):
        options = replace(options, main_gradient_bytes=8.0)  # each micro-batch makes those in bf16 anew: held twice
    if told.get("recompute", "").startswith("selective("):  # every second product's result is kept
        model = row.shapes
        products = 2 + 2 * (model.query + 2 * model.kv) / model.hidden + 2 * (2 * model.ffn_hidden / model.hidden)
        options = replace(options, kept_bytes=4.0 + (products + 2) / 2)
    return options


def compiled_loss(told: Mapping[str, str]) -> bool:
    """Whether a row of torchtitan has one kernel for its loss."""
    date = told["date"] if told["date"].count("-") > 1 else f"{told['date']}-31"
    return "compile" in told.get("notes", "") and not any(first <= date < end for first, end in EAGER)


def measured(row: Row) -> tuple[float, str] | None:
    """Bytes, and of what: ``device``, ``reserved`` by an allocator, or ``tensors``."""
    told = row.told
    kind = told.get("peak_mem_kind", "") + told.get("peak_mem_unit", "")
    what = next((what for words, what in MEASURED_BY if words in kind), "tensors")
    if row.memory is not None:
        return row.memory, what
    if told.get("peak_mem") and told.get("peak_mem_unit", "").startswith("GB"):
        return float(told["peak_mem"]) * (GIB if what == "device" else 1e9), what
    return None


def predict(rows: Sequence[Row], overhead: Overhead | None = None) -> list[MemoryColumns]:
    """One point each; rows that differ in nothing else are asked together."""
    found: list[MemoryColumns | None] = [None] * len(rows)
    together: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        together[row.shapes, row.sequence, row.precision, options_of(row)].append(at)
    for (shapes, sequence, precision, options), which in together.items():
        points = StrategyTable.of([_whole(rows[at].point) for at in which])
        columns = step_memory(
            shapes, points, sequence=sequence, precision=precision, options=options, overhead=overhead
        )
        for number, at in enumerate(which):
            found[at] = MemoryColumns(**{name: value[number : number + 1] for name, value in vars(columns).items()})
    return [one for one in found if one is not None]


def predicted_bytes(found: MemoryColumns, row: Row, what: str) -> float:
    """Of one row, of what it measured: ``device``, ``reserved`` or ``tensors``."""
    if what == "device":
        return float(found.shown[0])
    stuck = row.cluster.overhead.stuck.value if what == "reserved" else 0.0
    return float(found.allocated[0] + stuck * found.moving[0])


def room(row: Row) -> float:
    """Bytes that may be filled of the device that a row names: its size stands in its name."""
    told = re.search(r"-(\d+)GB", row.told.get("gpu", ""))
    device = row.cluster.device
    if told:
        device = device.model_copy(update={"memory": device.memory.model_copy(update={"value": int(told[1]) * GIB})})
    return usable(device, row.cluster.overhead)


def row_memory(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Bytes, of what each row measured, and whether they fit (0 or 1): for ``planner_accuracy``."""
    judged = judge(rows)
    return np.array([one.bytes for one in judged]), np.array([float(one.fits) for one in judged])


def _whole(point: StrategyTable) -> dict[str, int]:
    """The last micro-batch may be smaller; what recomputed layers keep is ``kept_bytes``."""
    values = {name: int(np.ceil(getattr(point, name)[0])) for name in point.row(0)}
    return values | ({"recompute_layers": -1} if values["recompute_layers"] >= 0 else {})


def judge(rows: Sequence[Row]) -> list[Judged]:
    """All of them."""
    judged: list[Judged] = []
    for row, one in zip(rows, predict(rows), strict=True):
        truth, needed = measured(row), float(one.total[0])
        bytes_ = predicted_bytes(one, row, truth[1] if truth else "tensors")
        error = bytes_ / truth[0] - 1 if truth else None
        judged.append(Judged(row, bytes_, needed, needed <= room(row), error))
    return judged


def summary(judged: Iterable[Judged]) -> dict[str, Any]:
    """Of one source, or of all."""
    judged = list(judged)
    errors = [abs(one.error) for one in judged if one.error is not None]
    signed = [one.error for one in judged if one.error is not None]
    ran, oom = [one.fits for one in judged if not one.row.oom], [not one.fits for one in judged if one.row.oom]
    return {
        "rows": len(judged),
        "with_memory": len(errors),
        "median_abs_rel_error": _median(errors),
        "mean_abs_rel_error": round(statistics.fmean(errors), 4) if errors else None,
        "p90_abs_rel_error": round(float(np.quantile(errors, 0.9)), 4) if errors else None,
        "median_rel_error": _median(signed),
        "ran": len(ran),
        "fit_right": round(statistics.fmean(ran), 4) if ran else None,
        "oom": len(oom),
        "oom_right": round(statistics.fmean(oom), 4) if oom else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


# ---- constants ----


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """context, communicator and slack that explain what nvidia-smi shows beyond tensors: least squares of
    relative errors, none negative."""
    matrix, truth = _equations(rows)
    found = nonnegative(matrix, truth)
    return dict(zip(("context", "communicator", "slack"), found.tolist(), strict=True))


def nonnegative(matrix: Floats, truth: Floats) -> Floats:
    """Least squares over every choice of which unknowns are zero."""
    best, least = np.zeros(matrix.shape[1]), float(truth @ truth)
    for chosen in product((False, True), repeat=matrix.shape[1]):
        which = np.flatnonzero(chosen)
        part, *_ = np.linalg.lstsq(matrix[:, which], truth, rcond=None)
        rest = matrix[:, which] @ part - truth
        if (part >= 0).all() and rest @ rest < least:
            best, least = np.zeros(matrix.shape[1]), float(rest @ rest)
            best[which] = part
    return best


def _equations(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    lines: list[list[float]] = []
    truth: list[float] = []
    for row, one in zip(rows, predict(rows), strict=True):
        known = measured(row)
        if known is None or known[1] != "device":
            continue
        point = StrategyTable.of([_whole(row.point)])
        moving = float(one.moving[0])
        lines.append([1 / known[0], float(communicators(point)[0]) / known[0], moving / known[0]])
        truth.append((known[0] - float(one.allocated[0])) / known[0])
    return np.array(lines), np.array(truth)


def left_out(rows: Sequence[Row]) -> dict[str, Any]:
    """Constants from all sources but one, and how the one is then predicted."""
    device = [row for row in rows if (known := measured(row)) and known[1] == "device"]
    found: dict[str, Any] = {}
    for source in sorted({row.source for row in device}):
        constants = fit([row for row in device if row.source != source])
        matrix, truth = _equations([row for row in device if row.source == source])
        errors = np.abs(matrix @ np.array(list(constants.values())) - truth)
        found[source] = {"constants": constants, "rows": len(errors), "median_abs_rel_error": float(np.median(errors))}
    return found


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=Path, nargs="*")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--wrong", action="store_true", help="list rows of which the wrong thing is said")
    given = parser.parse_args()
    rows = read_rows(given.rows or default_files()).rows
    rows = [row for row in rows if row.told.get("outcome")]
    if given.fit:
        from planner_risk import KINDS, Sizes, coverage, doubts_left_out, fit_doubt

        sizes = Sizes.of(rows)
        without = doubts_left_out(sizes)
        named = {name: dict(zip(KINDS, found.tolist(), strict=True)) for name, found in without.items()}
        doubt = {"all": dict(zip(KINDS, fit_doubt(sizes).tolist(), strict=True)), "left_out": named,
                 "rows_and_share_in_the_band": coverage(sizes, without)}  # fmt: skip
        print(json.dumps({"all": fit(rows), "left_out": left_out(rows), "doubt": doubt}, indent=1))
        return
    judged = judge(rows)
    by_source: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_source[one.row.source].append(one)
    found: Mapping[str, Any] = {
        "overall": summary(judged), "sources": {name: summary(some) for name, some in sorted(by_source.items())}
    }  # fmt: skip
    if given.json:
        print(json.dumps(found))
        return
    for name, values in [*found["sources"].items(), ("overall", found["overall"])]:
        print(f"{name:28s}", *(f"{key} {value}" for key, value in values.items() if value not in (None, 0)))
    for one in judged if given.wrong else ():
        if one.fits == one.row.oom:
            point = one.row.point.row(0)
            short = {key: point[key] for key in ("tp", "pp", "dp", "micro", "recompute", "sequence_parallel")}
            print(
                one.row.name,
                "OOM" if one.row.oom else "ran",
                f"{one.needed / GIB:.1f} GiB",
                short,
                one.row.told["attention"],
            )


if __name__ == "__main__":
    main()
