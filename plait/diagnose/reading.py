"""A run's folder as a recording: the only place that knows which files there are and what they hold.

Parquet files in and below ``timeline`` have spans, as ``plait.core.timeline`` describes them, of any number
of ranks and steps, or, where they have a sum instead of a start and an end, roll-ups, which are kept of all
steps where spans are kept of some. Times are seconds (``start``, ``sum``) or whole nanoseconds (``start_ns``,
``sum_ns``). What cannot be read is left out, and said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from plait.core.clocks import FILE as CLOCKS
from plait.core.clocks import Clocks
from plait.core.errors import DataError, PlaitError
from plait.core.plan import Plan
from plait.core.rank_table import RankTable
from plait.core.ring_calls import RINGS
from plait.core.ring_hosts import host_names, read_headers
from plait.core.rollup import FOLDER as ROLLUPS
from plait.core.timeline import PLANNED
from plait.diagnose.recording import (
    ROLLUP,
    SPANS,
    Recording,
    grid_of,
    meet,
    meetings_of,
    rollup_of,
    seconds_of,
    unknown_grid,
    with_axes,
)  # fmt: skip

VERSIONS = ("1", "2")
"""Of timelines and roll-ups that can be read."""
SPAN_COLUMNS = ("step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes")
ROLLUP_COLUMNS = ("step", "rank", "kind", "site", "direction", "n", "sum")
NO_TIMELINE = "a Parquet file, but no timeline of Plait"
BATCH = 1000
"""Files that are read at once."""
MANY = 12
"""Notes of one kind from which on only their number is said."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """metrics: lines of metrics.jsonl. attempts: times the run was started, as far as its files tell: when
    each ended, and how far it came."""

    folder: Path
    plan: Plan | None
    recording: Recording
    metrics: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_run(folder: Path, *, spans: bool = True) -> Run:
    """spans: False to read the sums of every step alone, which are small, where there are any.

    Raises DataError for a folder that is missing or holds no timeline that can be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    notes: list[str] = []
    plan = _plan(folder / "plan.json", notes)
    timeline = folder / "timeline"
    sums = [] if spans else sorted((timeline / ROLLUPS).rglob("*.parquet"))
    ops, rollups = _tables(sums or _files(timeline), plan.hash if plan else None, notes)
    if ops.is_empty() and rollups.is_empty():
        more = f" ({notes[0]})" if notes else ""
        raise DataError(f"{folder} holds no timeline that can be read{more}; train with run.timeline_steps above 0")
    metrics = tuple(_lines(folder / "metrics.jsonl", notes))
    hosts, agree = _hosts(folder, notes)
    recording = recorded(
        _on_one_clock(ops, folder, notes), rollups, plan, hosts=hosts, clocks_agree=agree, metrics=metrics
    )
    attempts = tuple(_lines(folder / "attempts.jsonl", notes))
    return Run(folder=folder, plan=plan, recording=recording, metrics=metrics, attempts=attempts, notes=tuple(notes))


class Tables(NamedTuple):
    """Spans of the last steps, sampled spans of others, and roll-ups, in the columns of their files with
    times in seconds. plan_hash: of the plan that the last steps obeyed; of others nothing is here."""

    spans: pl.DataFrame
    sampled: pl.DataFrame
    rollups: pl.DataFrame
    plan_hash: str
    notes: tuple[str, ...]


def read_timeline(folder: Path) -> Tables:
    """The timeline of a run's last shape. Raises DataError for a folder that is missing or holds none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    notes: list[str] = []
    spans, rollups = _tables(_files(folder / "timeline"), None, notes)
    if spans.is_empty() and rollups.is_empty():
        raise DataError(f"{folder} holds no timeline; train with run.timeline_steps above 0")
    newest = spans if spans.height else rollups
    plan = str(newest["plan"][int(newest["step"].arg_max() or 0)])
    spans, rollups = (table.filter(pl.col("plan") == plan) for table in (spans, rollups))
    sampled = spans.filter("sampled")
    return Tables(spans.filter(~pl.col("sampled")), sampled, rollups, plan, tuple(notes))


def last_steps(spans: pl.DataFrame, count: int) -> pl.DataFrame:
    """Those of the last steps."""
    steps = spans["step"].unique().sort()
    return spans.filter(pl.col("step") >= steps[-count:][0]) if len(steps) else spans


def planned_kinds(spans: pl.DataFrame) -> pl.DataFrame:
    """Those of kinds that a plan predicts."""
    return spans.filter(pl.col("kind").is_in(PLANNED))


def recorded(
    spans: pl.DataFrame,
    rollups: pl.DataFrame,
    plan: Plan | None,
    *,
    hosts: Mapping[int, str] | None = None,
    clocks_agree: bool | None = None,
    metrics: Iterable[Mapping[str, Any]] = (),
) -> Recording:
    """A recording of tables as they stand in files. Without a plan nobody knows where ranks stand, and all
    count as equals. clocks_agree: None where only the number of hosts tells."""
    ranks = pl.concat([spans["rank"], rollups["rank"]]).unique().sort().to_list()
    named = [(hosts or {}).get(rank) for rank in range(max(ranks) + 1)]
    told = "axis" in spans.columns
    if plan:
        grid = grid_of(plan.layout, named[: plan.layout.world_size])
        ranks = [rank for rank in ranks if rank < plan.layout.world_size]
        stages = {op.stage: place for place, ops in enumerate(plan.schedule.ranks) for op in ops}
    else:
        grid, stages = unknown_grid(ranks, hosts), {}
    spans = spans.filter(pl.col("rank").is_in(ranks))
    whole = meet(spans) if told else with_axes(spans, grid, plan.shardings if plan else (), stages)
    whole = whole.select([pl.col(name).cast(kind) for name, kind in SPANS.items()])
    complete = not told
    own = rollup_of(whole, complete=complete).cast(ROLLUP)  # type: ignore[arg-type]
    if rollups.height:
        own = _together(own, _with_axis(rollups))
    lengths = seconds_of(whole) | {
        int(line["step"]) - 1: float(line["seconds"]) for line in metrics if _is_step(line)
    }  # fmt: skip
    return Recording(
        grid=grid,
        rollup=own,
        meetings=meetings_of(whole),
        spans=whole,
        seconds=lengths,
        clocks_agree=len(set(named) - {None}) < 2 if clocks_agree is None else clocks_agree,
        complete=complete,
    )


def _together(own: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Of a rank's step whose spans are kept, their roll-up, which also knows axes and what passed between
    ops; else what is told."""
    keys = ["step", "rank"]
    whole = own.filter(pl.col("kind") == "compute").select(keys).unique()
    untold = own.join(whole, on=keys, how="anti").join(told.select(keys).unique(), on=keys, how="anti")
    return pl.concat([own.join(whole, on=keys, how="semi"), untold, told.join(whole, on=keys, how="anti")])


def _with_axis(rollups: pl.DataFrame) -> pl.DataFrame:
    units = pl.col("site").is_in(["embedding", "positions", "vectors"])
    axis = (
        pl.when(pl.col("kind").is_in(["idle", "transfer"])).then(pl.lit("pp"))
        .when(pl.col("kind").is_in(["comm", "wait"])).then(pl.when(units).then(pl.lit("dp")).otherwise(pl.lit("tp")))
        .otherwise(pl.lit(""))
    )  # fmt: skip
    found = rollups if "axis" in rollups.columns else rollups.with_columns(axis=axis)
    return found.rename({"sum": "seconds"}).select([pl.col(name).cast(kind) for name, kind in ROLLUP.items()])


def _is_step(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and isinstance(line.get("seconds"), int | float)


# ---- files ----


def _plan(path: Path, notes: list[str]) -> Plan | None:
    if not path.is_file():
        notes.append(f"{path.name} is missing: where ranks stand is not known, and all count as equals")
        return None
    try:
        return Plan.read(path)
    except PlaitError as error:
        notes.append(f"{error} Where ranks stand is not known")
        return None


class _File(NamedTuple):
    """began: when the rank started that wrote it; of what it did twice, the later start counts."""

    began: int
    written: float
    path: Path
    plan: str


def _files(timeline: Path) -> list[Path]:
    return sorted(timeline.rglob("*.parquet"))


def _tables(files: Sequence[Path], plan: str | None, notes: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Spans and roll-ups, with the columns ``plan`` and ``sampled``; of a step that a rank did twice, the
    second time. plan: the hash of the one whose they are; None: all."""
    kinds: dict[tuple[str, str], list[_File]] = {}
    skipped: list[str] = []
    other = 0
    for path in files:
        try:
            metadata = pl.read_parquet_metadata(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            skipped.append(f"{path.name} is truncated or no Parquet file: {_first_line(error)}")
            continue
        noun = "rollup" if "plait.rollup.version" in metadata else "timeline"
        version, belongs = metadata.get(f"plait.{noun}.version", ""), metadata.get("plait.plan", "")
        if version not in VERSIONS:
            none = f"a timeline of version {version}; this Plait reads versions {', '.join(VERSIONS)}"
            skipped.append(f"{path.name}: {none if version else NO_TIMELINE}")
        elif plan and belongs and belongs != plan:
            other += 1
        else:
            began = metadata.get("plait.began", "0")
            file = _File(int(began) if began.isdigit() else 0, _written(path), path, belongs)
            kinds.setdefault((noun, version), []).append(file)
    found: dict[str, list[pl.DataFrame]] = {"timeline": [], "rollup": []}
    order = {file.path: number for number, file in enumerate(sorted(file for own in kinds.values() for file in own))}
    for own in kinds.values():
        for at in range(0, len(own), BATCH):
            for table in _read(own[at : at + BATCH], order, skipped):
                found["timeline" if "start" in table.columns else "rollup"].append(table)
    notes += skipped if len(skipped) < MANY else [f"{len(skipped)} files were left out, such as: {skipped[0]}"]
    if other:
        notes.append(f"{other} files belong to other plans of this run, and were left out")
    whose = {"plan": pl.String, "sampled": pl.Boolean}
    empty = pl.DataFrame(schema={name: SPANS[name] for name in SPAN_COLUMNS} | whose)
    none = pl.DataFrame(schema={name: ROLLUP.get(name, pl.Float64) for name in ROLLUP_COLUMNS} | whose)
    return tuple(
        _newest(found[noun]) if found[noun] else table for noun, table in (("timeline", empty), ("rollup", none))
    )  # type: ignore[return-value]


def _read(files: list[_File], order: Mapping[Path, int], skipped: list[str]) -> list[pl.DataFrame]:
    """Files of one form at once; where that fails, in halves, until those are alone that cannot be read."""
    paths = [file.path for file in files]
    try:
        table = pl.scan_parquet(
            paths, include_file_paths="_path", extra_columns="ignore", missing_columns="raise", glob=False
        ).collect()
        problem = _problem(table := _in_seconds(table))
    except (OSError, pl.exceptions.PolarsError) as error:
        problem = f"it is truncated or no Parquet file: {_first_line(error)}"
        table = pl.DataFrame()
    if problem and len(files) == 1:
        skipped.append(f"{paths[0].name}: {problem}")
        return []
    if problem:
        half = len(files) // 2
        return _read(files[:half], order, skipped) + _read(files[half:], order, skipped)
    numbers = pl.DataFrame(
        {
            "_path": [str(path) for path in paths],
            "_file": [order[path] for path in paths],
            "plan": [file.plan for file in files],
            "sampled": [path.parent.name == "sampled" for path in paths],
        }
    )
    wanted, kinds = (SPAN_COLUMNS, SPANS) if "start" in table.columns else (ROLLUP_COLUMNS, ROLLUP)
    kept = [*wanted, *(name for name in ("axis", "group") if name in table.columns)]
    table = table.select([*(pl.col(name).cast(kinds.get(name, pl.Float64)) for name in kept), "_path"])
    return [table.join(numbers, on="_path", maintain_order="left").drop("_path")]


def _newest(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """All of them; of a rank's step that is in several, the last."""
    whole = pl.concat(parts, how="diagonal_relaxed")
    twice = whole.select("step", "rank", "_file").unique().group_by("step", "rank").agg(pl.len(), pl.col("_file").max())
    if (twice["len"] > 1).any():
        whole = whole.join(twice.select("step", "rank", "_file"), on=["step", "rank", "_file"], how="semi")
    return whole.drop("_file")


def _in_seconds(table: pl.DataFrame) -> pl.DataFrame:
    """Times as seconds, whichever of the two forms a file has."""
    whole = [name for name in ("start", "end", "sum") if f"{name}_ns" in table.columns]
    return table.with_columns(**{name: pl.col(f"{name}_ns") / 1e9 for name in whole})


def _problem(table: pl.DataFrame) -> str:
    """Why a table cannot be used; nothing if it can."""
    wanted = SPAN_COLUMNS if "start" in table.columns else ROLLUP_COLUMNS
    if any(name not in table.columns for name in wanted):
        return NO_TIMELINE
    numbers = [name for name in ("step", "rank", "start", "end", "sum") if name in wanted]
    strange = [name for name in numbers if not table.schema[name].is_numeric()]
    return f"column {strange[0]} holds no numbers" if strange else ""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _hosts(folder: Path, notes: list[str]) -> tuple[dict[int, str], bool | None]:
    """Which host ran which rank, by the rank table and where there is none by the rings; and whether their
    clocks agree, as far as the rings tell: ranks that share a kernel share its clock."""
    headers, problems = read_headers(folder / RINGS)
    notes += problems if len(problems) < MANY else [f"{len(problems)} rings cannot be read: {problems[0]}"]
    agree = len({header.boot or header.host for header in headers.values()}) < 2 if headers else None
    path = folder / "rank_table.json"
    if path.is_file():
        try:
            table = RankTable.read(path)
            return {rank: table.host_of(rank) for rank in range(table.world_size)}, agree
        except PlaitError as error:
            notes.append(str(error))
    return host_names(headers), agree


def _on_one_clock(spans: pl.DataFrame, folder: Path, notes: list[str]) -> pl.DataFrame:
    """Spans by the clock of rank 0's host, if the clocks of all have been compared; how sure that is is
    said."""
    path = folder / "timeline" / CLOCKS
    if not path.is_file() or spans.is_empty():
        return spans
    try:
        clocks = Clocks.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, DataError) as error:
        notes.append(f"{path.name}: {error}")
        return spans
    if clocks.error is None or len(set(clocks.hosts.values())) < 2:
        return spans
    of = {rank: clocks.clocks[host] for rank, host in clocks.hosts.items()}
    fits = pl.DataFrame(
        {
            "rank": list(of),
            "_offset": [clock.offset / 1e9 for clock in of.values()],
            "_drift": [clock.drift for clock in of.values()],
            "_origin": [clock.origin / 1e9 for clock in of.values()],
        },
        schema_overrides={"rank": spans.schema["rank"]},
    )
    led = [
        (pl.col(name) + pl.col("_offset") + pl.col("_drift") * (pl.col(name) - pl.col("_origin"))).alias(name)
        for name in ("start", "end")
    ]
    known = spans.join(fits, on="rank", how="left", maintain_order="left").with_columns(
        pl.col("_offset", "_drift", "_origin").fill_null(0.0)
    )
    notes.append(f"clocks of hosts were compared: times of different hosts may be wrong by {clocks.error / 1e3:.0f} us")
    return known.with_columns(led).drop("_offset", "_drift", "_origin")


def _lines(path: Path, notes: list[str]) -> Iterable[Mapping[str, Any]]:
    """Lines of JSON; a last one that was cut off is nothing to speak of."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    bad = 0
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if isinstance(values, dict):
            yield values
        else:
            bad += 1
    if bad > 1:
        notes.append(f"{path.name}: {bad} lines are no JSON objects, and were left out")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
