"""A run's folder as a recording: the only place that knows which files there are.

In and below ``timeline`` are spans, of some steps, and roll-ups, which are kept of all
(``plait.diagnose.tables``).

    known          timelines, plan.json, metrics.jsonl, attempts.jsonl, rank_table.json, clocks.json, rings
    passed over    those that are damaged, pipes or devices; lines that are no objects of JSON, numbers that
                   cannot be, lines beyond those that are read (all counted)
    refused        a folder that is none, or holds no timeline
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError, PlaitError
from plait.core.base.numbers import is_number
from plait.core.base.passed_over import PassedOver
from plait.core.job.plan import Plan
from plait.core.record.clocks import FILE as CLOCKS
from plait.core.record.clocks import Clocks
from plait.core.record.ring_hosts import host_names, read_headers
from plait.core.record.rollup import EXPOSED, PROCESSOR, STEP
from plait.core.record.timeline import PLANNED
from plait.core.runs.attempts import FILE as ATTEMPTS
from plait.core.runs.ring_calls import RINGS
from plait.core.topology.rank_table import RankTable
from plait.diagnose.alike import Alike, alike, one_size
from plait.diagnose.imported import Said, imported_notes
from plait.diagnose.json_lines import UNREAD, lines_of
from plait.diagnose.notes import Notes
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
from plait.diagnose.tables import Glance, read_tables, read_totals, rollup_files, timeline_files

METRICS = "metrics.jsonl"
SOON = 60.0
"""Seconds within which a launcher writes down that its ranks have done a step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedRun:
    """metrics: lines of metrics.jsonl. attempts: times the run was started, as far as its files tell: when
    each ended, and how far it came. notes: what has to be said of its files. passed_over: what of them was
    not taken. alive: when its metrics were last written, in seconds since 1970, if that is known. said: what
    was to be said of recordings of others when they were imported."""

    folder: Path
    plan: Plan | None
    recording: Recording
    metrics: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())
    passed_over: PassedOver = field(default_factory=PassedOver)
    alive: float | None = None
    said: Said | None = None

    @cached_property
    def alike(self) -> Alike:
        """Its steps with batches of one size."""
        return alike(self.recording, self.metrics)


def read_run(folder: Path, *, spans: bool = True) -> RecordedRun:
    """spans: False to read the sums of every step alone, which are small, where there are any.

    Raises DataError for a folder that is missing or holds no timeline that can be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    timeline = folder / "timeline"
    sums = [] if spans else rollup_files(timeline)
    ops, rollups = read_tables(sums or timeline_files(timeline), plan.key if plan else None, notes)
    if ops.is_empty() and rollups.is_empty():
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(timeline)  # raises PermissionError, which says more than that there is nothing
        raise DataError(_nothing(folder, plan, notes.lines))
    metrics = tuple(lines_of(folder / METRICS, notes))
    hosts, agree = _hosts(folder, notes)
    recording = recorded(
        _on_one_clock(ops, folder, notes), rollups, plan, hosts=hosts, clocks_agree=agree, metrics=metrics
    )
    attempts = tuple(lines_of(folder / ATTEMPTS, notes))
    if said := imported_notes(folder):
        said.add_to(notes)
    return RecordedRun(
        folder=folder, plan=plan, recording=recording, metrics=metrics, attempts=attempts, notes=tuple(notes.lines),
        passed_over=notes.over, alive=_alive(folder, attempts), said=said,
    )  # fmt: skip


def _nothing(folder: Path, plan: Plan | None, notes: Sequence[str]) -> str:
    """Why there is no timeline, as far as that can be told."""
    if notes or plan is None or plan.job is None:
        return f"{folder} holds no timeline that can be read{f' ({notes[0]})' if notes else ''}"
    if plan.job.run.timeline_steps == 0:
        return f"{folder} holds no timeline: it was to keep none; train with run.timeline_steps above 0"
    return f"{folder} holds no timeline: no step of it was recorded, or not yet"


def glance(folder: Path) -> tuple[Glance, pl.DataFrame] | None:
    """What totals tell of a run, and where its ranks stand: soon there, however many steps it has had. None
    where it has none, as runs of earlier versions."""
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    found = read_totals(folder / "timeline", plan.key if plan else None)
    if found is None:
        return None
    ranks = found.segments["rank"].unique().sort().to_list()
    return found, grid_of(plan.layout) if plan else unknown_grid(ranks)


class Tables(NamedTuple):
    """Spans of the last steps, sampled spans of others, and roll-ups, in the columns of their files with
    times in seconds. plan_hash: of the plan that the last steps obeyed; of others nothing is here."""

    spans: pl.DataFrame
    sampled: pl.DataFrame
    rollups: pl.DataFrame
    plan_hash: str
    notes: tuple[str, ...]
    passed_over: PassedOver


def read_timeline(folder: Path) -> Tables:
    """The timeline of a run's last shape. Raises DataError for a folder that is missing or holds none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    notes = Notes()
    spans, rollups = read_tables(timeline_files(folder / "timeline"), None, notes)
    if spans.is_empty() and rollups.is_empty():
        raise DataError(f"{folder} holds no timeline; train with run.timeline_steps above 0")
    if said := imported_notes(folder):
        said.add_to(notes)
    newest = spans if spans.height else rollups
    plan = str(newest["plan"][int(newest["step"].arg_max() or 0)])
    spans, rollups = (table.filter(pl.col("plan") == plan) for table in (spans, rollups))
    sampled = spans.filter("sampled")
    return Tables(spans.filter(~pl.col("sampled")), sampled, rollups, plan, tuple(notes.lines), notes.over)


def of_one_size(tables: Tables, folder: Path) -> Tables:
    """Its steps with batches of one size, and a note where others were left out."""
    notes = Notes()
    known, drawn = ({*chain.from_iterable(one["step"].unique() for one in some)} for some in (tables[:3], tables[:2]))
    one = one_size(lines_of(folder / METRICS, notes), known, drawn)
    tables.passed_over.add(notes.over)
    if not one.note:
        return tables._replace(notes=(*tables.notes, *notes.lines))
    spans, sampled, rollups = (table.filter(pl.col("step").is_in(one.steps)) for table in tables[:3])
    return tables._replace(spans=spans, sampled=sampled, rollups=rollups, notes=(*tables.notes, *notes.lines, one.note))


def placed(tables: Tables, folder: Path, steps: int) -> Recording:
    """The spans of the last ``steps`` of a folder's timeline as a recording, on one clock and by the run's
    plan, if that is the one that they obeyed. Raises DataError where no spans were kept."""
    spans = last_steps(tables.spans, steps)
    if spans.is_empty():
        raise DataError(f"{folder} holds the sums of its steps and no spans that could be drawn")
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    hosts, agree = _hosts(folder, notes)
    obeyed = plan if plan and plan.key == tables.plan_hash else None
    spans = _on_one_clock(spans, folder, notes)
    return recorded(spans, tables.rollups.clear(), obeyed, hosts=hosts, clocks_agree=agree)


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
    count as peers. clocks_agree: None where only the number of hosts tells."""
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
        own = _together(own, _with_axis(rollups, alone=_cp_alone(grid)))
    steps = rollups.filter(pl.col("kind") == STEP).group_by("step").agg(pl.col("sum").max()) if rollups.height else None
    lengths = seconds_of(whole) | dict(steps.iter_rows() if steps is not None else ()) | {
        int(line["step"]) - 1: float(line["seconds"]) for line in metrics if _is_step(line)
    }  # fmt: skip
    sampled = spans.filter("sampled")["step"].unique().to_list() if "sampled" in spans.columns else ()
    return Recording(
        grid=grid,
        rollup=own,
        meetings=meetings_of(whole),
        spans=whole,
        seconds=lengths,
        clocks_agree=len(set(named) - {None}) < 2 if clocks_agree is None else clocks_agree,
        complete=complete,
        sampled=frozenset(sampled),
    )


def _together(own: pl.DataFrame, told: pl.DataFrame) -> pl.DataFrame:
    """Of a rank's step whose spans are kept, their roll-up, which also knows axes; else what is told. No span
    tells how long a step took, and how much of a processor it had."""
    keys = ["step", "rank"]
    alone = pl.col("kind").is_in([STEP, PROCESSOR])
    beside, told = told.filter(alone), told.filter(~alone)
    whole = own.filter(pl.col("kind") == "compute").select(keys).unique()
    untold = own.join(whole, on=keys, how="anti").join(told.select(keys).unique(), on=keys, how="anti")
    return pl.concat([own.join(whole, on=keys, how="semi"), untold, told.join(whole, on=keys, how="anti"), beside])


def _with_axis(rollups: pl.DataFrame, *, alone: bool) -> pl.DataFrame:
    """Sums tell sites and no names: attention's are of context parallelism where there is no other."""
    units = pl.col("site").is_in(["embedding", "positions", "vectors"])
    shared = pl.col("site").is_in(["attn", "block"]) & alone
    communicates = pl.when(units).then(pl.lit("dp")).when(shared).then(pl.lit("cp")).otherwise(pl.lit("tp"))
    axis = (
        pl.when(pl.col("kind").is_in(["idle", "transfer"])).then(pl.lit("pp"))
        .when(pl.col("kind").is_in(["comm", "wait"])).then(communicates)
        .when(pl.col("kind") == EXPOSED).then(pl.col("site"))
        .otherwise(pl.lit(""))
    )  # fmt: skip
    found = rollups if "axis" in rollups.columns else rollups.with_columns(axis=axis)
    return found.rename({"sum": "seconds"}).select([pl.col(name).cast(kind) for name, kind in ROLLUP.items()])


def _cp_alone(grid: pl.DataFrame) -> bool:
    """Whether sequences are shared, and layers are not."""
    return bool((grid["cp"] > 0).any()) and not (grid["tp"] > 0).any()


def _is_step(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and is_number(line.get("seconds"))


# ---- files ----


def _plan(path: Path, notes: Notes) -> Plan | None:
    if not path.exists():
        notes.say(f"{path.name} is missing: where ranks stand is not known, and all count as peers")
        return None
    try:
        return Plan.read(path)
    except PlaitError as error:
        notes.count(f"{error} Where ranks stand is not known", UNREAD, 1, path.name)
        return None


def _hosts(folder: Path, notes: Notes) -> tuple[dict[int, str], bool | None]:
    """Which host ran which rank, by the rank table and where there is none by the rings; and whether their
    clocks agree, as far as the rings tell: ranks that share a kernel share its clock."""
    headers, problems = read_headers(folder / RINGS)
    notes.left_out("rings that cannot be read", problems)
    agree = len({header.boot or header.host for header in headers.values()}) < 2 if headers else None
    path = folder / "rank_table.json"
    if path.exists():
        try:
            table = RankTable.read(path)
            return {rank: table.host_of(rank) for rank in range(table.world_size)}, agree
        except PlaitError as error:
            notes.count(str(error), UNREAD, 1, path.name)
    return host_names(headers), agree


def _on_one_clock(spans: pl.DataFrame, folder: Path, notes: Notes) -> pl.DataFrame:
    """Spans by the clock of rank 0's host, if the clocks of all have been compared; how sure that is is
    said."""
    path = folder / "timeline" / CLOCKS
    if not path.exists() or spans.is_empty():
        return spans
    try:
        clocks = Clocks.from_dict(read_table(path))
    except (OSError, ValueError, DataError) as error:
        notes.count(f"{path.name}: {error}", UNREAD, 1, path.name)
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
    notes.say(f"clocks of hosts were compared: times of different hosts may be wrong by {clocks.error / 1e3:.0f} us")
    return known.with_columns(led).drop("_offset", "_drift", "_origin")


def _alive(folder: Path, attempts: Sequence[Mapping[str, Any]]) -> float | None:
    """When metrics were last written. None in a copy whose files have its time: the history of a run that
    goes on was written when its last attempt had done a step, which its line tells."""
    last = attempts[-1] if attempts else {}
    keys = ("started", "restart_seconds", "first_step_seconds")
    told = sum(float(value) for key in keys if is_number(value := last.get(key)))
    try:
        if (folder / ATTEMPTS).stat().st_mtime > told + SOON:
            return None
        return (folder / METRICS).stat().st_mtime
    except OSError:
        return None
