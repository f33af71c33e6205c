"""Read a run's folder as a recording. This module alone knows which files a folder has.

Spans of some steps, and roll-ups of all steps, are in and below ``timeline``
(``plait.diagnose.measured.tables``).

    known          timelines, plan.json, metrics.jsonl, attempts.jsonl, rank_table.json, clocks.json, rings
    passed over    files that are damaged, pipes or devices; lines that are no JSON objects, impossible
                   numbers, lines beyond the limit (all counted)
    refused        a path that is no folder, or a folder without a timeline
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
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import is_number
from plait.core.job.plan import Plan
from plait.core.record.clocks import FILE as CLOCKS
from plait.core.record.clocks import Clocks
from plait.core.record.ring_progress import host_names, read_headers
from plait.core.record.rollup import EXPOSED, PROCESSOR, STEP
from plait.core.record.timeline import PLANNED, Notes
from plait.core.runs.attempts import FILE as ATTEMPTS
from plait.core.runs.evidence import RINGS
from plait.core.runs.folder import check_run_folder
from plait.core.topology.rank_table import RankTable
from plait.diagnose.measured.recording import (
    ROLLUP,
    SPANS,
    Recording,
    grid_of,
    meetings_of,
    rollup_of,
    seconds_of,
    unknown_grid,
    with_axes,
    with_meetings,
)  # fmt: skip
from plait.diagnose.measured.run_files import (
    UNREAD,
    ImportRemarks,
    UniformRun,
    imported_notes,
    lines_of,
    uniform_run,
    uniform_steps,
)
from plait.diagnose.measured.tables import RunTotals, read_tables, read_totals, rollup_files, timeline_files

METRICS = "metrics.jsonl"
HISTORY_DELAY = 60.0
"""Seconds: a launcher records that its ranks have done a step at most so much later."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedRun:
    """A run's folder, read. metrics: lines of metrics.jsonl. attempts: lines of attempts.jsonl,
    with end and last step of each start of the run, as far as known. notes: remarks on the folder's
    files. passed_over: counts of skipped content. last_written: when metrics were last written, in
    seconds since 1970; None if unknown. import_remarks: remarks of the import, if another tool
    recorded the run."""

    folder: Path
    plan: Plan | None
    recording: Recording
    metrics: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())
    passed_over: IgnoredInput = field(default_factory=IgnoredInput)
    last_written: float | None = None
    import_remarks: ImportRemarks | None = None

    @cached_property
    def uniform(self) -> UniformRun:
        """The recording, restricted to steps with batches of one size."""
        return uniform_run(self.recording, self.metrics)


def read_run(folder: Path, *, spans: bool = True) -> RecordedRun:
    """Read a run's folder. spans: False to read only the roll-ups of every step, which are small,
    if there are any.

    Raises DataError if the folder is missing or holds no readable timeline.
    """
    check_run_folder(folder)
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    timeline = folder / "timeline"
    sums = [] if spans else rollup_files(timeline)
    ops, rollups = read_tables(sums or timeline_files(timeline), plan.key if plan else None, notes)
    if ops.is_empty() and rollups.is_empty():
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(timeline)  # raises PermissionError, which explains more than an empty folder would
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
        passed_over=notes.over, last_written=_alive(folder, attempts), import_remarks=said,
    )  # fmt: skip


def _nothing(folder: Path, plan: Plan | None, notes: Sequence[str]) -> str:
    """Return the message for a folder without a readable timeline, with the reason as far as it is
    known."""
    if notes or plan is None or plan.settings is None:
        why = f" ({notes[0]})" if notes else ""
        return f"{folder} holds no timeline that can be read{why}. Name a run's folder: plait runs lists them."
    if plan.settings.run.timeline_steps == 0:
        return f"{folder} holds no timeline: run.timeline_steps is 0; train with a value above 0"
    return f"{folder} holds no timeline: no step of it was recorded, or not yet"


def glance(folder: Path) -> tuple[RunTotals, pl.DataFrame] | None:
    """Return (a run's totals by rank and kind of op, coordinates and host of every rank), fast for
    any number of steps. Returns None for runs without totals, written by earlier versions."""
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    found = read_totals(folder / "timeline", plan.key if plan else None)
    if found is None:
        return None
    ranks = found.segments["rank"].unique().sort().to_list()
    return found, grid_of(plan.layout) if plan else unknown_grid(ranks)


class Tables(NamedTuple):
    """Spans of the last steps, sampled spans of older steps, and roll-ups, in the columns of their
    files, with times in seconds. plan_hash: of the last steps' plan; steps of other plans are left
    out."""

    spans: pl.DataFrame
    sampled: pl.DataFrame
    rollups: pl.DataFrame
    plan_hash: str
    notes: tuple[str, ...]
    passed_over: IgnoredInput


def read_timeline(folder: Path) -> Tables:
    """Return the timeline of a run's newest plan. Raises DataError if the folder is missing or
    holds no timeline."""
    check_run_folder(folder)
    notes = Notes()
    spans, rollups = read_tables(timeline_files(folder / "timeline"), None, notes)
    if spans.is_empty() and rollups.is_empty():
        raise DataError(f"{folder} holds no timeline; train with run.timeline_steps above 0")
    if said := imported_notes(folder):
        said.add_to(notes)
    newest = spans if spans.height else rollups
    plan = str(newest["plan"][int(newest["step"].arg_max() or 0)])
    spans, rollups = (table.filter(plan=plan) for table in (spans, rollups))
    sampled = spans.filter("sampled")
    return Tables(spans.filter(~pl.col("sampled")), sampled, rollups, plan, tuple(notes.lines), notes.over)


def uniform_batches(tables: Tables, folder: Path) -> Tables:
    """Return the tables of the steps with batches of one size, with a note if other steps were left
    out."""
    notes = Notes()
    known, drawn = ({*chain.from_iterable(one["step"].unique() for one in some)} for some in (tables[:3], tables[:2]))
    one = uniform_steps(lines_of(folder / METRICS, notes), known, drawn)
    tables.passed_over.add(notes.over)
    if not one.note:
        return tables._replace(notes=(*tables.notes, *notes.lines))
    spans, sampled, rollups = (table.filter(pl.col("step").is_in(one.steps)) for table in tables[:3])
    return tables._replace(spans=spans, sampled=sampled, rollups=rollups, notes=(*tables.notes, *notes.lines, one.note))


def drawable_recording(tables: Tables, folder: Path, steps: int) -> Recording:
    """Return the spans of the last ``steps`` steps as a recording, with aligned clocks. Coordinates
    follow the run's plan, if the spans belong to it. Raises DataError if no spans were kept."""
    spans = last_steps(tables.spans, steps)
    if spans.is_empty():
        raise DataError(f"{folder} holds no spans that could be drawn; train with run.timeline_steps above 0")
    notes = Notes()
    plan = _plan(folder / "plan.json", notes)
    hosts, agree = _hosts(folder, notes)
    obeyed = plan if plan and plan.key == tables.plan_hash else None
    spans = _on_one_clock(spans, folder, notes)
    return recorded(spans, tables.rollups.clear(), obeyed, hosts=hosts, clocks_agree=agree)


def last_steps(spans: pl.DataFrame, count: int) -> pl.DataFrame:
    """Return the spans of the last ``count`` steps."""
    steps = spans["step"].unique().sort()
    return spans.filter(pl.col("step") >= steps[-count:][0]) if len(steps) else spans


def planned_kinds(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans of the kinds that a plan predicts."""
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
    """Return a recording of tables as read from files. Without a plan, coordinates are unknown and
    all ranks count as peers. clocks_agree: None to derive it from the number of hosts."""
    ranks = pl.concat([spans["rank"], rollups["rank"]]).unique().sort().to_list()
    named = [(hosts or {}).get(rank) for rank in range(max(ranks) + 1)]
    told = "axis" in spans.columns
    if plan:
        grid = grid_of(plan.layout, named[: plan.layout.world_size])
        ranks = [rank for rank in ranks if rank < plan.layout.world_size]
        stages = {op.stage: pp_rank for pp_rank, ops in enumerate(plan.schedule.ranks) for op in ops}
    else:
        grid, stages = unknown_grid(ranks, hosts), {}
    spans = spans.filter(pl.col("rank").is_in(ranks))
    whole = with_meetings(spans) if told else with_axes(spans, grid, plan.shardings if plan else (), stages)
    whole = whole.select([pl.col(name).cast(kind) for name, kind in SPANS.items()])
    complete = not told
    own = rollup_of(whole, complete=complete).cast(ROLLUP)  # type: ignore[arg-type]
    if rollups.height:
        own = _together(own, _with_axis(rollups, alone=_cp_alone(grid)))
    steps = rollups.filter(kind=STEP).group_by("step").agg(pl.max("sum")) if rollups.height else None
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
    """Return the roll-ups (seconds per rank, step and kind of op): from spans where a rank's step
    has any, since these also know axes; otherwise as recorded (``told``). The rows of step length
    and processor time always come from the recorded roll-up: no span holds them."""
    keys = ["step", "rank"]
    alone = pl.col("kind").is_in([STEP, PROCESSOR])
    beside, told = told.filter(alone), told.filter(~alone)
    whole = own.filter(kind="compute").select(keys).unique()
    untold = own.join(whole, on=keys, how="anti").join(told.select(keys).unique(), on=keys, how="anti")
    return pl.concat([own.join(whole, on=keys, how="semi"), untold, told.join(whole, on=keys, how="anti"), beside])


def _with_axis(rollups: pl.DataFrame, *, alone: bool) -> pl.DataFrame:
    """Return roll-ups with the axis derived from the site, since roll-ups hold no names. alone:
    True if attention's collectives belong to cp, since no tp is used."""
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
    """True if ranks use context parallelism and no tensor parallelism."""
    return bool((grid["cp"] > 0).any()) and not (grid["tp"] > 0).any()


def _is_step(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and is_number(line.get("seconds"))


# ---- files ----


def _plan(path: Path, notes: Notes) -> Plan | None:
    if not path.exists():
        notes.say(f"{path.name} is missing: rank coordinates are unknown, and all ranks count as peers")
        return None
    try:
        return Plan.read(path)
    except PlaitError as error:
        notes.count(f"{error} Rank coordinates are unknown", UNREAD, 1, path.name)
        return None


def _hosts(folder: Path, notes: Notes) -> tuple[dict[int, str], bool | None]:
    """Return (host of every rank, from the rank table or else from the rings; True if all rings
    have one clock, None if no ring is known). Ranks that share a kernel share its clock."""
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
    """Return spans on the clock of rank 0's host, if all clocks have been compared. A note gives
    the possible error."""
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
    of = [(rank, clocks.clocks[host]) for rank, host in clocks.hosts.items()]
    rows = [(rank, clock.offset / 1e9, clock.drift, clock.origin / 1e9) for rank, clock in of]
    columns = {"rank": spans.schema["rank"], "_offset": pl.Float64, "_drift": pl.Float64, "_origin": pl.Float64}
    fits = pl.DataFrame(rows, schema=columns, orient="row")
    known = spans.join(fits, on="rank", how="left", maintain_order="left").with_columns(
        pl.col("_offset", "_drift", "_origin").fill_null(0.0)
    )
    times = pl.col("start", "end")
    led = times + pl.col("_offset") + pl.col("_drift") * (times - pl.col("_origin"))
    notes.say(f"clocks of hosts were compared: times of different hosts may be wrong by {clocks.error / 1e3:.0f} us")
    return known.with_columns(led).drop("_offset", "_drift", "_origin")


def _alive(folder: Path, attempts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return when metrics were last written, in seconds since 1970; None for a copied folder whose
    files have the time of the copy. A live run writes its history when its last attempt has done a
    step, at a time that the attempt's line holds."""
    last: Mapping[str, Any] = attempts[-1] if attempts else {}
    keys = ("started", "restart_seconds", "first_step_seconds")
    told = sum(float(value) for key in keys if is_number(value := last.get(key)))
    try:
        if (folder / ATTEMPTS).stat().st_mtime > told + HISTORY_DELAY:
            return None
        return (folder / METRICS).stat().st_mtime
    except OSError:
        return None
