"""Recordings of other tools, made into a run's folder that ``plait diagnose`` and ``plait timeline`` read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.errors import DataError, JobError
from plait.core.files import replacing
from plait.core.timeline import SCHEMA_VERSION

NS = 1e9
FOREIGN = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
    "start": pl.Float64, "end": pl.Float64, "bytes": pl.Int64, "axis": pl.String, "group": pl.String,
}  # fmt: skip
"""What readers of other formats make. seq: -1 where the format does not count."""
AXES = (
    ("tp", r"tensor|(^|[^a-z])tp"), ("cp", r"context|(^|[^a-z])cp($|[^a-z])"), ("pp", r"pipeline|(^|[^a-z])pp"),
    ("dp", r"data|fsdp|shard|replicate|(^|[^a-z])dp|default_pg"),
)  # fmt: skip
BACKWARD = r"reduce_?scatter|backward|grad"


def axis_of(label: str) -> str:
    """The axis of a process group by its description: ``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp_shard``.

    >>> axis_of("mesh_dp_shard"), axis_of("TENSOR_MODEL_PARALLEL_GROUP"), axis_of("undefined")
    ('dp', 'tp', 'other')
    """
    return next((axis for axis, words in AXES if re.search(words, label.lower())), "other")


def members_of(ranks: Any) -> str | None:
    """``0,4,8`` of a list of ranks, or of its text; None where it is cut off or none.

    >>> members_of("[4, 0]"), members_of([1, 2]), members_of("[0, 1, ...]")
    ('0,4', '1,2', None)
    """
    text = ",".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks or "")
    inside = text.strip().strip("[]")
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", inside):
        return None
    return ",".join(map(str, sorted(map(int, inside.split(",")))))


def rank_in(name: str) -> int | None:
    """The rank that a file's name tells: ``rank-00003.json``, ``trace_rank_3``, ``rank3_trace.json``,
    ``nccl_trace_3``.

    >>> [rank_in(name) for name in ("rank-00003.json.gz", "rank3_trace.json", "nccl_trace_7", "trace.json")]
    [3, 3, 7, None]
    """
    found = re.search(r"rank[-_]?(\d+)", name) or re.search(r"_(\d+)(?=$|\.)", name)
    return int(found[1]) if found else None


def import_traces(files: Sequence[Path], out: Path, told: Callable[[str], None] = lambda _: None) -> tuple[int, int]:
    """Ranks and spans that were written to ``out``; files that cannot be used are skipped, and ``told``.

    Raises JobError for a folder that holds something else, DataError where no file could be used.
    """
    from plait.diagnose.flight_recorder import dump_spans, is_dump
    from plait.diagnose.kineto import is_kineto, kineto_spans, read_json

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists and is not empty", key="--out", fix="Name a new folder")
    parts: list[pl.DataFrame] = []
    for file in files:
        try:
            content = read_json(file)
            if is_kineto(content):
                parts.append(kineto_spans(content, rank_in(file.name)))
            elif is_dump(content):
                found, unfinished = dump_spans(content, rank_in(file.name))
                parts.append(found)
                if unfinished:
                    told(f"{file}: {unfinished} operations had not ended, and were left out")
            else:
                raise DataError("neither a PyTorch profiler trace nor a flight recorder's dump")
        except DataError as error:
            message = str(error)
            told(message if message.startswith(str(file)) else f"{file} was skipped: {message}")
    if not parts:
        raise DataError(f"none of {len(files)} files could be used")
    spans = _finished(pl.concat([part.select(list(FOREIGN)).cast(FOREIGN) for part in parts]))  # type: ignore[arg-type]
    for (rank,), own in spans.group_by(["rank"], maintain_order=True):
        last = int(own["step"].max() or 0)  # type: ignore[arg-type]
        target = out / "timeline" / f"rank-{int(rank):05d}-step-{last + 1:08d}.parquet"  # type: ignore[arg-type]
        with replacing(target) as partial:
            own.write_parquet(partial, metadata={"plait.timeline.version": SCHEMA_VERSION, "plait.plan": ""})
    return spans["rank"].n_unique(), spans.height


def _finished(spans: pl.DataFrame) -> pl.DataFrame:
    """With the rest of a timeline's columns, and times from the first of them. Occurrences that were not
    counted are, in each group in the order of their starts."""
    keys = ["step", "rank", "kind", "name", "group"]
    backward = pl.col("name").str.to_lowercase().str.contains(BACKWARD)
    spans = spans.unique(maintain_order=True).sort("rank", "start")
    return spans.with_columns(
        seq=pl.when(pl.col("seq") >= 0).then("seq").otherwise(pl.int_range(pl.len()).over(keys)),
        layer=pl.lit(0, pl.Int64),
        slice=pl.lit(-1, pl.Int64),
        direction=pl.when(backward).then(pl.lit("backward")).otherwise(pl.lit("forward")),
        start=pl.col("start") - pl.col("start").min(),
        end=pl.col("end") - pl.col("start").min(),
    ).with_columns(
        start_ns=(pl.col("start") * NS).round().cast(pl.Int64), end_ns=(pl.col("end") * NS).round().cast(pl.Int64)
    ).select(  # seconds, and the same in whole nanoseconds: whoever reads takes what it knows

        "step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes", "axis",
        "group", "start_ns", "end_ns",
    )  # fmt: skip
