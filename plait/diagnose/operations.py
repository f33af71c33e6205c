"""Operation traces as StragglerAnalysis publishes them (ByteDance; Apache-2.0): one Parquet file of a job's
operations on one rank of every tensor-parallel group, and a meta file with the degrees of parallelism.

Columns: dp_rank, stage, rank, step, optype, start_ts, duration (seconds), seq_id, mc (chunk of an interleaved
pipeline), mb_id, gmc. Ranks communicate in the middle of their program, one operation after the other; the
waiting is inside of sends, receives and collectives, and not all of it is there.

    known          the columns above
    passed over    other columns; rows without rank, step, type or times, or of impossible ones (counted)
    refused        a file without these columns or of other types, of other degrees than its meta file,
                   or that holds far more than its size
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from plait.core.base.codec.json_text import SIDE_FILE
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, reason_of
from plait.core.base.numbers import LARGEST, MOST_RANKS, counted
from plait.core.base.passed_over import PassedOver
from plait.core.record.columns import Unpacked, first_line
from plait.diagnose.recording import GRID, ROLLUP, SPANS, Recording, meetings_of, rollup_of, seconds_of
from plait.diagnose.tables import LONGEST, LONGEST_TEXT

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
"""Columns of whole numbers."""
LATEST = 2.0**32
"""Seconds, from the begin of a step or since 1970."""
COLLECTIVES = {
    "params-all-gather": ("dp", "params", "forward"),
    "grads-reduce-scatter": ("dp", "grads", "backward"),
    "grads-all-reduce": ("dp", "grads", "backward"),
}
"""That all data-parallel ranks of a stage begin together: axis, site and direction."""
ENDS = ("embedding-grads-all-reduce", "layernorm-grads-all-reduce")
"""Collectives of groups that the trace does not tell."""
DEGREES = ("dp_size", "pp_size", "tp_size")


def read_meta(path: Path) -> dict[str, int | str]:
    """The degrees: lines of ``key: value``. Raises DataError for a file that has not all of them."""
    try:
        text = contents_within(path, SIDE_FILE).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a trace's meta file: {reason_of(error)}") from None
    lines = [line.partition(":") for line in text.splitlines() if line.strip()]
    values = {key.strip(): value.strip().strip("'\"") for key, colon, value in lines if colon}
    degrees = {key: counted(values.get(key, "")) for key in DEGREES}
    missing = [key for key, degree in degrees.items() if not degree]
    if missing:
        raise DataError(f"{path}: no number for {', '.join(missing)}. A meta file has lines like 'dp_size: 4'")
    return values | {key: degree for key, degree in degrees.items() if degree}


def read_operations(path: Path, meta: dict[str, int | str]) -> Recording:
    """Raises DataError for a file that is missing, truncated, or no such trace, or is not of these
    degrees."""
    try:
        Unpacked().metadata(path)
        trace = pl.read_parquet(path, use_pyarrow=False)
    except (OSError, DataError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} is no Parquet file that can be read: {first_line(error)}") from None
    missing = [name for name in COLUMNS if name not in trace.columns]
    if missing or trace.is_empty():
        lack = f"no column {', '.join(missing)}" if missing else "it has no rows"
        raise DataError(f"{path} is no operation trace: {lack}")
    if wrong := [name for name in COLUMNS if not _fits(name, trace.schema[name])]:
        raise DataError(f"{path} is no operation trace: column {wrong[0]} holds {trace.schema[wrong[0]]}")
    stages, replicas = int(meta["pp_size"]), int(meta["dp_size"])
    seen = int(trace["stage"].n_unique()), int(trace["dp_rank"].n_unique())
    if seen[0] > stages or seen[1] > replicas:
        raise DataError(
            f"{path} has {seen[0]} stages and {seen[1]} data-parallel ranks, and the meta file says {stages} and "
            f"{replicas}: give the meta file that belongs to it"
        )
    rows, trace = trace.height, _possible(trace, stages, replicas)
    if trace.is_empty():
        raise DataError(f"{path} is no operation trace: none of its {rows} rows can be")
    over = PassedOver()
    over.note(f"rows of {path.name} that cannot be", count=rows - trace.height)
    spans = _spans(trace, stages)
    grid = (
        trace.select("rank", pp="stage", dp="dp_rank", cp=pl.lit(0), tp=pl.lit(0), host=pl.lit(None))
        .unique()
        .sort("rank")
        .cast(GRID)  # type: ignore[arg-type]
    )
    return Recording(
        grid=grid,
        rollup=rollup_of(spans, complete=False).cast(ROLLUP),  # type: ignore[arg-type]
        meetings=meetings_of(spans),
        spans=spans,
        seconds=seconds_of(spans),
        complete=False,
        blocking=True,
        notes=tuple(over.lines()),
        passed_over=over,
    )


def _fits(name: str, kind: pl.DataType) -> bool:
    return kind in (pl.String, pl.Categorical, pl.Enum) if name == "optype" else kind.is_numeric() or kind == pl.Null


def _possible(trace: pl.DataFrame, stages: int, replicas: int) -> pl.DataFrame:
    """Rows that say who did what and when, in numbers of their own kinds."""
    numbers = [pl.col(name).cast(pl.Int64, strict=False) for name in WHOLE]
    times = [pl.col(name).cast(pl.Float64, strict=False) for name in ("start_ts", "duration")]
    told = trace.with_columns(*numbers, *times, pl.col("optype").cast(pl.String))
    return told.filter(
        pl.col("rank").is_between(0, MOST_RANKS - 1), pl.col("stage").is_between(0, stages - 1),
        pl.col("dp_rank").is_between(0, replicas - 1), pl.col("step").is_between(0, LARGEST),
        pl.col("start_ts").abs() <= LATEST, pl.col("duration").is_between(0, LONGEST),
        pl.col("optype").str.len_bytes() <= LONGEST_TEXT,
    )  # fmt: skip


def _spans(trace: pl.DataFrame, stages: int) -> pl.DataFrame:
    """As spans of a timeline."""
    kind = pl.col("optype")
    ops = trace.with_columns(start=pl.col("start_ts"), end=pl.col("start_ts") + pl.col("duration"))
    computes = pl.col("optype").str.ends_with("-compute")
    crosses = pl.col("optype").is_in([f"{way}-{end}" for way in ("forward", "backward") for end in ("send", "recv")])
    meets = pl.col("optype").is_in(list(COLLECTIVES))
    ahead = pl.when(pl.col("optype").str.starts_with("forward")).then(1).otherwise(-1)
    target = pl.when(pl.col("optype").str.ends_with("send")).then((pl.col("stage") + ahead) % stages)
    way = pl.col("optype").str.extract(r"^(forward|backward)")
    direction = pl.coalesce(way, pl.col("optype").replace_strict({k: v[2] for k, v in COLLECTIVES.items()}, default=""))
    chunk = pl.when(pl.col("mc") > 0).then(pl.format("chunk {}", "mc")).otherwise(pl.lit("stage"))
    site = (
        pl.when(computes).then(chunk).when(crosses).then(pl.lit("transfer"))
        .otherwise(pl.col("optype").replace_strict({k: v[1] for k, v in COLLECTIVES.items()}, default=kind))
    )  # fmt: skip
    group = (
        pl.when(crosses).then(pl.format("{}>{}", "dp_rank", target.fill_null(pl.col("stage"))))
        .when(meets).then(pl.format("stage {}", "stage"))
    )  # fmt: skip
    spans = ops.with_columns(
        kind=pl.when(computes).then(pl.lit("compute")).when(crosses).then(pl.lit("transfer"))
        .when(meets | pl.col("optype").is_in(ENDS)).then(pl.lit("comm"))
        .when(pl.col("optype") == "gc").then(pl.lit("host")).otherwise(pl.lit("optimizer")),
        axis=pl.when(crosses).then(pl.lit("pp")).when(meets).then(pl.lit("dp"))
        .when(pl.col("optype").is_in(ENDS)).then(pl.lit("other")).otherwise(pl.lit("")),
        name=pl.col("optype"), seq=pl.col("seq_id"), site=site, layer=pl.col("stage"), slice=pl.col("mb_id"),
        direction=direction.fill_null(""), bytes=pl.lit(0), group=group, lane=pl.lit("processor"),
    )  # fmt: skip
    together = pl.struct("step", "axis", "site", "direction", "group", "seq", "mc").hash()
    # The two ends of a transfer are told by where it goes; mc is not told for them.
    return (
        spans.with_columns(mc=pl.when(crosses).then(-1).otherwise("mc"))
        .with_columns(meeting=pl.when(crosses | meets).then(together))
        .select([pl.col(name).cast(kind) for name, kind in SPANS.items()])
    )
