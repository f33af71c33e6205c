"""Read timeline files as tables. This module alone knows the content of a file, and what to do with
an unreadable one.

The files hold spans and roll-ups of any number of ranks and steps, as ``core.record.timeline`` and
``core.record.rollup`` write them. Times are seconds (``start``, ``sum``) or whole nanoseconds
(``start_ns``, ``sum_ns``).

    known          columns and versions of timelines, roll-ups and totals
    passed over    files that are damaged, of other versions, programs or plans, or that unpack to far
                   more than their size; rows without numbers or with impossible ones (all counted);
                   unknown columns
    refused        a folder in which no file can be used
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from plait.core.base.errors import DataError
from plait.core.base.files import walk
from plait.core.base.numbers import LARGEST, MOST_RANKS, counted
from plait.core.record.columns import Unpacked, first_line
from plait.core.record.rollup import BLOCK, STEPS, TOTALS
from plait.core.record.rollup import FOLDER as ROLLUPS
from plait.core.record.timeline import Notes
from plait.diagnose.measured.recording import ROLLUP, SPANS

VERSIONS = ("1", "2")
"""Versions of timelines and roll-ups that can be read."""
SPAN_COLUMNS = ("step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes")
ROLLUP_COLUMNS = ("step", "rank", "kind", "site", "direction", "n", "sum")
TOTAL_COLUMNS = ("rank", "kind", "site", "direction", "steps", "n", "sum")
COLUMNS = {"timeline": SPAN_COLUMNS, "rollup": ROLLUP_COLUMNS, "totals": TOTAL_COLUMNS}
"""Required columns by kind of file."""
TYPES = {"timeline": SPANS, "rollup": ROLLUP, "totals": ROLLUP | {"steps": pl.Int64}}
LONGEST = 86_400.0
"""Longest possible duration of a span or of a step's sum, in seconds: no step takes a day."""
LONGEST_TEXT = 1024
"""Longest name in bytes. A kernel's name may be long, but megabytes of text in every row would fill
the memory."""
NO_TIMELINE = "a Parquet file, but no timeline of Plait"
WHOLE = ("step", "rank", "n", "steps")
"""Integer columns in which a number that is too large costs its row, not the whole file."""
WHOSE = {"plan": pl.Categorical, "sampled": pl.Boolean}
BATCH = 1000
"""Number of files that are read at once."""
FILES, ROWS = "files of the timeline that cannot be read", "rows that cannot be"
MAX_TOTALS_FILES = 4096
"""The largest number of files of totals that are read, those of the last steps."""


def timeline_files(timeline: Path) -> list[Path]:
    """Return the files of spans and roll-ups, without totals, which add no information."""
    return _below(timeline, without=TOTALS)


def rollup_files(timeline: Path) -> list[Path]:
    """Return the files of roll-ups in their folder."""
    return _below(timeline / ROLLUPS)


def _below(folder: Path, without: str = "") -> list[Path]:
    found: list[Path] = []
    for here, folders, names in walk(folder):
        if without in folders and here == folder:
            folders.remove(without)
        found += [here / name for name in (*names, *folders) if name.endswith(".parquet")]  # a folder is reported, too
    return sorted(found)


def read_tables(files: Sequence[Path], plan: str | None, notes: Notes) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return (spans, roll-ups) as tables, with the columns ``plan`` and ``sampled``. If a rank did
    a step twice, its second run counts. plan: hash of the plan whose files are read; None: of all
    plans. notes: receives what was skipped."""
    found = _read_all(files, plan, notes)
    empty = {noun: pl.DataFrame(schema={name: _type(noun, name) for name in COLUMNS[noun]} | WHOSE) for noun in COLUMNS}
    spans, rollups = (_newest(found[noun]) if found.get(noun) else empty[noun] for noun in ("timeline", "rollup"))
    return spans, rollups


@dataclass(frozen=True, eq=False, kw_only=True)
class RunTotals:
    """A summary of a run: the totals of its last blocks of steps. segments: seconds of a mean step
    by rank, kind, site and direction. first, last: steps."""

    segments: pl.DataFrame
    first: int
    last: int
    notes: tuple[str, ...]


def read_totals(timeline: Path, plan: str | None) -> RunTotals | None:
    """Return the summary of a run's totals; None if the run has none. A step that was done twice
    counts twice here."""
    blocks = sorted((timeline / TOTALS).glob("block=*"), key=lambda path: _number(path.name))
    files: list[Path] = []
    for block in reversed(blocks):
        own = sorted(block.glob("*.parquet"))
        if files and len(files) + len(own) > MAX_TOTALS_FILES:
            break
        files += own
    notes = Notes()
    spans: list[tuple[int, int]] = []
    found = _read_all(files, plan, notes, spans).get("totals", [])
    if not found or not spans:
        return None
    keys = ("rank", "kind", "site", "direction")
    sums = pl.concat(found).group_by(keys).agg(seconds=pl.sum("sum") / pl.sum("steps").clip(1))
    firsts, lasts = zip(*spans, strict=True)
    return RunTotals(segments=sums, first=min(firsts), last=max(lasts), notes=tuple(notes.lines))


def _number(name: str) -> int:
    number = counted(name.rpartition("=")[2])
    return -1 if number is None else number


# ---- files ----


class _TimelineFile(NamedTuple):
    """A file's key for sorting. began: start time of the rank that wrote the file; of a step done
    twice, the later start counts."""

    began: int
    written: float
    path: Path
    plan: str


def _read_all(
    files: Sequence[Path], plan: str | None, notes: Notes, spans: list[tuple[int, int]] | None = None
) -> dict[str, list[pl.DataFrame]]:
    """Return tables by kind of file (``timeline``, ``rollup``, ``totals``). spans: this list
    receives the first and the last step of each file of totals."""
    kinds: dict[tuple[str, str], list[_TimelineFile]] = {}
    skipped: dict[str, str] = {}
    strange: dict[str, int] = {}
    other: list[str] = []
    unpacked = Unpacked()
    for path in files:
        try:
            metadata = unpacked.metadata(path)
        except DataError as error:
            skipped[path.name] = str(error)
            continue
        noun = next((one for one in COLUMNS if f"plait.{one}.version" in metadata), "timeline")
        version, belongs = metadata.get(f"plait.{noun}.version", ""), metadata.get("plait.plan", "")
        if version not in VERSIONS:
            none = f"a timeline of version {version}; this Plait reads versions {', '.join(VERSIONS)}"
            skipped[path.name] = none if version else NO_TIMELINE
        elif plan and belongs and belongs != plan:
            other.append(path.name)
        else:
            file = _TimelineFile(counted(metadata.get("plait.began", "")) or 0, _written(path), path, belongs)
            kinds.setdefault((noun, version), []).append(file)
            ends = [end for word in metadata.get(STEPS, "").split() if (end := counted(word)) is not None]
            if spans is not None and len(ends) == 2:
                spans.append((ends[0], ends[1]))
    found: dict[str, list[pl.DataFrame]] = {}
    order = {file: number for number, file in enumerate(sorted(file for own in kinds.values() for file in own))}
    for (noun, _), own in kinds.items():
        for at in range(0, len(own), BATCH):
            for kind, read in _read(own[at : at + BATCH], noun, order, skipped):
                table = _possible(read, kind)
                if table.height < read.height:
                    _count(read, table, order, strange)
                found.setdefault(kind, []).append(table)
    notes.left_out(FILES, skipped)
    if strange:
        name, rows = next(iter(strange.items()))
        several = f"{sum(strange.values())} rows of {len(strange)} files" if len(strange) > 1 else f"{rows} rows"
        such = f"such as {name}" if len(strange) > 1 else name
        line = f"{several} ({such}) have no numbers where they must, or impossible ones, and were left out"
        notes.count(line, ROWS, sum(strange.values()), name)
    if other:
        line = f"{len(other)} files belong to other plans of this run, and were left out"
        notes.count(line, "files of other plans of this run", len(other), other[0])
    return found


def _read(
    files: list[_TimelineFile], noun: str, order: dict[_TimelineFile, int], skipped: dict[str, str]
) -> list[tuple[str, pl.DataFrame]]:
    """Return (kind, table) of files of one kind, read at once. If that fails, read halves, until
    each unreadable file is alone; ``skipped`` receives the reason for each."""
    paths = [file.path for file in files]
    try:
        scan = pl.scan_parquet(
            paths, include_file_paths="_path", extra_columns="ignore", missing_columns="raise", glob=False
        )
        schema = scan.collect_schema()
        if noun == "timeline" and not {"start", "start_ns"} & schema.keys() and {"sum", "sum_ns"} & schema.keys():
            noun = "rollup"  # another program's timeline with sums in place of spans
        problem = _problem(schema, noun)
        table = scan.select(*_wanted(schema, noun), "_path").collect() if not problem else pl.DataFrame()
    except (OSError, pl.exceptions.PolarsError) as error:
        problem = f"it is truncated or no Parquet file: {first_line(error)}"
        table = pl.DataFrame()
    if problem and len(files) == 1:
        skipped[paths[0].name] = problem
        return []
    if problem:
        half = len(files) // 2
        return _read(files[:half], noun, order, skipped) + _read(files[half:], noun, order, skipped)
    # Runs of rows of one file: looking up the path of every row took as long as all the reading.
    runs = table["_path"].rle().struct.unnest()
    of = {str(file.path): file for file in files}
    sources = [of[path] for path in runs["value"].to_list()]
    rows = np.repeat(np.arange(len(sources), dtype=np.uint32), runs["len"].to_numpy())
    whose = pl.DataFrame(
        {
            "_file": pl.Series([order[file] for file in sources], dtype=pl.Int32),
            "plan": pl.Series([file.plan for file in sources], dtype=pl.Categorical),
            "sampled": pl.Series([file.path.parent.name == "sampled" for file in sources], dtype=pl.Boolean),
        }
    )
    return [(noun, table.drop("_path").hstack(whose[rows]))]


def _wanted(schema: pl.Schema, noun: str) -> list[pl.Expr]:
    """Return polars expressions for the columns of a file of this kind, with times in seconds,
    whether the file has seconds or nanoseconds."""
    found: list[pl.Expr] = []
    for name in (*COLUMNS[noun], *(name for name in ("axis", "group") if name in schema)):
        value = pl.col(f"{name}_ns") / 1e9 if f"{name}_ns" in schema else pl.col(name)
        found.append(value.cast(_type(noun, name), strict=name not in WHOLE).alias(name))
    return found


def _possible(table: pl.DataFrame, noun: str) -> pl.DataFrame:
    """Return the rows with possible values: rank, kind and times are known and finite, and no span
    ends before it begins. noun: kind of file."""
    longest = LONGEST * (BLOCK if noun == "totals" else 1)
    conditions = [pl.col("rank").is_between(0, MOST_RANKS - 1), pl.col("kind").is_not_null()]
    conditions += [pl.col(name).is_between(0, LARGEST) for name in WHOLE[2:] + WHOLE[:1] if name in table.columns]
    if noun == "timeline":
        conditions += [
            pl.col("name").is_not_null(),
            pl.col("start").is_finite(),
            (pl.col("end") - pl.col("start")).is_between(0, longest),
        ]
    else:
        conditions.append(pl.col("sum").is_between(0, longest))
    texts = [name for name in ("kind", "name", "site", "direction") if table.schema.get(name) == pl.String]
    conditions += [pl.col(name).str.len_bytes().fill_null(0) <= LONGEST_TEXT for name in texts]
    whole = pl.all_horizontal(conditions).fill_null(value=False)
    table = table if table.select(whole.all()).item() else table.filter(whole)
    return _of_its_step(table) if noun == "timeline" else table


def _of_its_step(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans without those that are days away from their rank's step."""
    begins = spans.group_by("_file").agg(pl.max("start") - pl.min("start"))["start"]
    if not (begins > LONGEST).any():  # a cheap test that nearly always holds
        return spans
    middle = pl.median("start").over("_file", "step", "rank")
    return spans.filter((pl.col("start") - middle).abs() <= LONGEST)


def _count(read: pl.DataFrame, kept: pl.DataFrame, order: dict[_TimelineFile, int], strange: dict[str, int]) -> None:
    """Add the numbers of dropped rows to ``strange``, by file name."""
    before, after = (dict(table.group_by("_file").len().iter_rows()) for table in (read, kept))
    names = {number: file.path.name for file, number in order.items()}
    for number in sorted(before):
        if lost := before[number] - after.get(number, 0):
            strange[names[number]] = strange.get(names[number], 0) + lost


def _type(noun: str, name: str) -> pl.DataType | type[pl.DataType]:
    return TYPES[noun].get(name, pl.Float64 if name == "sum" else pl.String)


def _problem(schema: pl.Schema, noun: str) -> str:
    """Return why a table cannot be used; empty if it can."""
    kinds = {name: schema.get(f"{name}_ns", schema.get(name)) for name in COLUMNS[noun]}
    if any(kind is None for kind in kinds.values()):
        return NO_TIMELINE
    numbers = ("step", "rank", "start", "end", "steps", "n", "sum")
    strange = [name for name, kind in kinds.items() if name in numbers and kind and not kind.is_numeric()]
    return f"column {strange[0]} holds no numbers" if strange else ""


def _newest(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Return the concatenated tables. A rank's step in several files is taken from the newest
    one."""
    whole = pl.concat(parts, how="diagonal_relaxed")
    ends = whole.group_by("rank", "_file").agg(first=pl.min("step"), last=pl.max("step"))
    before = pl.col("last").cum_max().shift().over("rank")
    several = ends.sort("rank", "first").filter(pl.col("first") <= before)["rank"].unique()
    if len(several):  # the step ranges of these ranks' files overlap
        doubtful = pl.col("rank").is_in(several.to_list())
        own = whole.filter(doubtful).select("step", "rank", "_file").unique()
        older = own.filter(pl.col("_file") < pl.max("_file").over("step", "rank"))
        if older.height:
            whole = whole.join(older, on=["step", "rank", "_file"], how="anti", maintain_order="left")
    return whole.drop("_file")


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
