"""Operation traces as StragglerAnalysis publishes them (ByteDance; Apache-2.0), diagnosed.

    python -m benchmarks.published_trace TRACE.parquet META.yaml [--json]

One Parquet file has a job's operations on one rank of every tensor-parallel group; a meta file has the
degrees of parallelism, as lines of ``key: value``. Columns: dp_rank, stage, rank, step, optype, start_ts,
duration (seconds), seq_id, mc (chunk of an interleaved pipeline), mb_id, gmc. Ranks communicate in the middle
of their program, one operation after the other; the waiting is inside of sends, receives and collectives, and
not all of it is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl

from plait.core.base.errors import DataError
from plait.core.base.numbers import counted
from plait.diagnose.measured.recording import GRID, ROLLUP, SPANS, Recording, meetings_of, rollup_of, seconds_of
from plait.diagnose.report import explain

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
COLLECTIVES = {
    "params-all-gather": ("dp", "params", "forward"),
    "grads-reduce-scatter": ("dp", "grads", "backward"),
    "grads-all-reduce": ("dp", "grads", "backward"),
}
"""That all data-parallel ranks of a stage begin together: axis, site and direction."""
ENDS = ("embedding-grads-all-reduce", "layernorm-grads-all-reduce")
"""Collectives of groups that the trace does not tell."""
DEGREES = ("dp_size", "pp_size", "tp_size")


def read_meta(path: Path) -> dict[str, int]:
    """The degrees. Raises DataError for a file that has not all of them."""
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    degrees = {key: counted(values.get(key, "").strip(" '\"")) for key in DEGREES}
    if missing := [key for key, degree in degrees.items() if not degree]:
        raise DataError(f"{path}: no number for {', '.join(missing)}. A meta file has lines like 'dp_size: 4'")
    return {key: degree for key, degree in degrees.items() if degree}


def read_operations(path: Path, meta: dict[str, int]) -> Recording:
    """Raises DataError for a file that is no such trace, or is not of these degrees."""
    trace = pl.read_parquet(path)
    if missing := [name for name in COLUMNS if name not in trace.columns]:
        raise DataError(f"{path} is no operation trace: no column {', '.join(missing)}")
    whole = [name for name in COLUMNS if name not in ("optype", "start_ts", "duration")]
    trace = trace.with_columns(
        pl.col(whole).cast(pl.Int64), pl.col("start_ts", "duration").cast(pl.Float64), pl.col("optype").cast(pl.String)
    )
    stages, replicas = meta["pp_size"], meta["dp_size"]
    if trace["stage"].n_unique() > stages or trace["dp_rank"].n_unique() > replicas:
        raise DataError(f"{path} has more than {stages} stages or {replicas} data-parallel ranks: give its meta file")
    spans = _spans(trace, stages)
    places = trace.select("rank", pp="stage", dp="dp_rank", cp=pl.lit(0), tp=pl.lit(0), host=pl.lit(None)).unique()
    return Recording(
        grid=places.sort("rank").cast(GRID),  # type: ignore[arg-type]
        rollup=rollup_of(spans, complete=False).cast(ROLLUP),  # type: ignore[arg-type]
        meetings=meetings_of(spans),
        spans=spans,
        seconds=seconds_of(spans),
        complete=False,
        blocking=True,
    )


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


if __name__ == "__main__":
    found = explain(read_operations(Path(sys.argv[1]), read_meta(Path(sys.argv[2]))), sys.argv[1])
    print(json.dumps(found.to_dict()) if "--json" in sys.argv else found.text())
