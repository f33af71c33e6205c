"""Import other tools' recordings into a run's folder that ``plait diagnose`` reads: PyTorch
profiler traces and flight-recorder dumps, one file per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from plait.core.base.codec.json_stream import read_stream
from plait.core.base.codec.json_text import Most, open_unpacked
from plait.core.base.codec.pickles import MARKS, read_plain
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import check_target, explained, kind_of, reason_of, replacing
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.core.base.text import counted
from plait.core.record.timeline import SCHEMA_VERSION
from plait.core.runs.evidence import write_hang
from plait.diagnose.measured.run_files import (
    MAX_LISTED,
    ImportedFile,
    ImportRemarks,
    UnreadFile,
    ranks_of_the_job,
    remarks,
    unknown_work,
    without_base_time,
    write_notes,
)
from plait.diagnose.verdicts.dumps import verdict_of
from plait.formats.base.recordings import (
    LATEST,
    LOW,
    NS,
    ForeignSpans,
    assign_ranks,
    can_be_rank,
    checked_rank,
    process_in,
    rank_by_path,
)
from plait.formats.flight_recorder import Dump, dump_spans, is_dump
from plait.formats.kineto.events import TraceEvents
from plait.formats.kineto.spans import spans_of

if TYPE_CHECKING:
    from plait.core.runs.evidence import Verdict

BACKWARD = r"reduce_?scatter|backward|grad"
FIRST = 1000
"""Start of the first span in ns: a start of 0 means an unknown one."""


@dataclass(kw_only=True)
class Imported:
    """Result of an import. ranks, spans: number of ranks and spans written. over: counts of skipped
    content. notes: sentences on the whole import. verdict: why ranks wait, according to
    flight-recorder dumps; None without dumps."""

    ranks: int = 0
    spans: int = 0
    over: IgnoredInput = field(default_factory=IgnoredInput)
    notes: list[str] = field(default_factory=list[str])
    verdict: Verdict | None = None


def import_traces(files: Sequence[Path], out: Path, warn: Callable[[str], None] = lambda _: None) -> Imported:
    """Write the run's folder ``out`` and return a summary. Unusable files are skipped, and ``warn``
    receives a message for each.

    Raises JobError for a folder that is not empty, LaunchError if it cannot be written, DataError
    if no file could be used.
    """
    cannot, fix = f"{out} cannot be written", "Choose another with --out"
    with explained(cannot, fix=fix):
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken:
        raise JobError(f"{out} exists and is not empty", key="--out", fix="Name a new folder")
    check_target(out / "timeline" / "rank", fix=fix)
    found = Imported()
    every, unread = _all(files, warn)
    read = _by_rank(every, found, warn)
    if not read:
        why = f" ({next(iter(unread))}: {next(iter(unread.values())).why})" if unread else ""
        fix = "Name one run (RUN --against OTHER compares two), or recordings of PyTorch"
        raise DataError(f"of {counted(len(files), 'file')}, none could be used{why}. {fix}.")
    dumps = {rank: one.dump for rank, one in read.items() if one.dump}
    evidence = None
    if dumps:
        found.verdict, evidence = verdict_of(dumps, ranks_of_the_job(unread, read))
        if found.verdict.cause == "none" and any(one.part.spans.height for one in read.values()):
            found.notes.append(found.verdict.why)
    found.notes += remarks(read, unread)
    for one in read.values():
        found.over.add(one.over, one.path.name)
    found.ranks, found.spans = len(read), sum(one.part.spans.height for one in read.values())
    with explained(cannot, fix=fix):
        _write(read, out, found)
        if evidence is not None:
            assert found.verdict
            write_hang(out, found.verdict, evidence)
    return found


def recordings_in(paths: Iterable[Path]) -> list[Path]:
    """Return the recordings in ``paths``: files that are named, and in folders those whose content
    begins like a recording, whatever their names."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [one for one in inside if not path.is_dir() or (kind_of(one) == "file" and _begins(one))]
    return found


def _begins(path: Path) -> bool:
    head = _head(path)
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or head[:2] in MARKS


# ---- reading ----


def _all(files: Sequence[Path], warn: Callable[[str], None]) -> tuple[list[ImportedFile], dict[Path, UnreadFile]]:
    """Return (the readable files, the unreadable ones by path with reason and the rank in the
    name)."""
    found: list[ImportedFile] = []
    unread: dict[Path, UnreadFile] = {}
    low = max(LOW, 8 * len(files))
    for path in files:
        try:
            found.append(_read(path, low))
        except DataError as error:
            unread[path] = UnreadFile(rank_by_path(path, low), str(error))
            warn(f"{path} was skipped: {error}")
    return found, unread


def _read(path: Path, low: int) -> ImportedFile:
    """Return the content of a recording. low: first number that counts as a rank in a name. Raises
    DataError for any unusable content, so that other files can still be read."""
    over = IgnoredInput()
    trace, dump = TraceEvents(over), Dump(over)
    try:
        if _head(path)[:2] in MARKS:
            header = read_plain(path, {"entries": dump.add}, over)
        else:
            header = read_stream(path, {"traceEvents": trace.add, "entries": dump.add}, over, bare="traceEvents")
    except OSError as error:
        raise DataError(f"it cannot be read: {reason_of(error)}") from None
    except ValueError as error:
        raise DataError(str(error)) from None
    try:
        if isinstance(header.get("traceEvents"), int):
            return _trace(path, trace, header, over, low)
        if is_dump(header):
            if header.get("entries") and not dump.entries:
                raise DataError("none of its entries can be used")
            return _dump(path, dump, header, over, low)
    except UnicodeEncodeError:
        raise DataError("a name in it holds half a character, which is no text") from None
    except (ArithmeticError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        # Another tool's file may hold any value in any field.
        raise DataError(f"a value in it cannot be used: {str(error).partition(chr(10))[0][:200]}") from None
    raise DataError("it is neither a PyTorch profiler trace nor a flight recorder's dump")


def _trace(path: Path, trace: TraceEvents, header: Mapping[str, Any], over: IgnoredInput, low: int) -> ImportedFile:
    said = trace.facts(header)
    rank = rank_by_path(path, low) if said.rank is None else said.rank
    part, comm = spans_of(trace, header, rank)
    return ImportedFile(
        path=path, rank=rank, part=_sound(part), over=over, world=said.world, without_group=comm.unknown_groups,
        communicates=not comm.comm.is_empty(), groups=said.groups, work=trace.work,
        has_base=header.get("baseTimeNanoseconds") is not None,
    )  # fmt: skip


def _dump(path: Path, dump: Dump, header: Mapping[str, Any], over: IgnoredInput, low: int) -> ImportedFile:
    dump.finish(header)
    rank = _rank_of(dump, rank_by_path(path, low))
    world = 1 + max(dump.group_ranks or {rank})
    return ImportedFile(path=path, rank=rank, part=_sound(dump_spans(dump, rank)), over=over, dump=dump, world=world)


def _rank_of(dump: Dump, named: int | None) -> int:
    """Return the rank that a dump states, or the one in its name if the stated one is impossible.
    Record a doubt if no group of the dump has the rank. Raises DataError for a dump without a
    possible rank."""
    said = named if dump.recorded_rank is None else dump.recorded_rank
    if said is None:
        raise DataError("it does not say whose it is: name the file rank-N... or ..._rank_N...")
    if can_be_rank(said, dump.group_ranks):
        return said
    why = "which none of its groups has" if can_be_rank(said) else "which cannot be"
    where = "by its name" if dump.recorded_rank is None else "by its content"
    if dump.recorded_rank is not None and can_be_rank(named, dump.group_ranks):
        dump.doubts.append(f"is of rank {shown(said)} {where}, {why}: it counts as rank {named}'s, as in its name")
        return checked_rank(named)
    dump.doubts.append(f"is of rank {shown(said)} {where}, {why}")
    return checked_rank(said)


def _sound(part: ForeignSpans) -> ForeignSpans:
    """Return the spans unchanged. Raises DataError if they have impossible times."""
    longest = float(part.spans["end"].max() or 0.0)  # type: ignore[arg-type]
    if not (longest >= 0 and -LATEST * NS <= part.since <= (LATEST - longest) * NS):
        raise DataError(f"it has times more than {LATEST:.0f} seconds from 1970")
    return part


def _head(path: Path) -> bytes:
    """Return the first 64 bytes of a file, unpacked; empty if it cannot be read."""
    try:
        with open_unpacked(path, Most()) as stream:
            return stream.read(64)
    except (OSError, ValueError):
        return b""


def _by_rank(read: Sequence[ImportedFile], found: Imported, warn: Callable[[str], None]) -> dict[int, ImportedFile]:
    """Return one file per rank, the first of several. Files without a known rank are numbered."""
    by_rank: dict[int, ImportedFile] = {}
    for one in read:
        if one.rank is None:
            continue
        if one.rank in by_rank:
            warn(f"{one.path} was skipped: it is of rank {one.rank}, as is {by_rank[one.rank].path}")
            if first := by_rank[one.rank].dump:
                first.doubts.append(f"is not the only one of this rank: {one.path.name} was skipped")
        else:
            by_rank[one.rank] = one
    unknown = {one.path: one for one in _one_window([one for one in read if one.rank is None], warn)}
    if unknown:
        numbers = assign_ranks(list(unknown), {rank: one.path for rank, one in by_rank.items()})
        for path, rank in numbers.items():
            by_rank[rank] = unknown[path]
        listed = [f"{rank}: {path.name}" for path, rank in list(numbers.items())[:MAX_LISTED]]
        more = f", and {len(numbers) - MAX_LISTED} more" if len(numbers) > MAX_LISTED else ""
        found.notes.append(
            f"the ranks of {len(numbers)} files are unknown: neither content nor names state them. The files are "
            f"numbered in the order of their names ({', '.join(listed)}{more})"
        )
    return dict(sorted(by_rank.items()))


def _one_window(read: Sequence[ImportedFile], warn: Callable[[str], None]) -> Iterator[ImportedFile]:
    """Yield the files, but only the first of several that TensorBoard's handler wrote in sequence
    for one process; ``warn`` receives a message for each of the others."""
    first: dict[str, ImportedFile] = {}
    for one in read:
        other = first.setdefault(process_in(one.path.name) or str(one.path), one)
        if other is one or set(one.part.spans["step"].unique()) & set(other.part.spans["step"].unique()):
            yield one
        else:
            warn(f"{one.path} was skipped: its name is that of the same process as {other.path}, with other steps")


# ---- writing ----


def _write(read: Mapping[int, ImportedFile], out: Path, found: Imported) -> None:
    """Write the spans into a run's folder, one file per rank, and the remarks. Raises OSError."""
    other_clock = without_base_time(read)
    told = {rank: one.part.since for rank, one in read.items() if one.part.spans.height and rank not in other_clock}
    origin = min(told.values(), default=0) - FIRST
    (out / "timeline").mkdir(parents=True, exist_ok=True)
    for rank, one in read.items():
        if not one.part.spans.height:
            continue
        part = one.part._replace(since=origin + FIRST) if rank in other_clock else one.part
        spans, twice = _finished(part, rank, origin)
        if twice:
            found.over.note("events that stand in a file twice", one.path.name, twice)
            found.spans -= twice
        target = out / "timeline" / f"rank-{rank:05d}-step-{int(spans['step'].max() or 0) + 1:08d}.parquet"  # type: ignore[arg-type]
        with replacing(target) as partial:
            spans.write_parquet(partial, metadata={"plait.timeline.version": SCHEMA_VERSION, "plait.plan": ""})
    write_notes(
        out,
        ImportRemarks(
            tuple(found.notes), found.over, steps=any(one.dump is None for one in read.values()),
            shared_clock=not other_clock, unknown={rank: work.unread for rank, work in unknown_work(read).items()},
        ),
    )  # fmt: skip


def _finished(part: ForeignSpans, rank: int, origin: int) -> tuple[pl.DataFrame, int]:
    """Return (spans with the remaining columns of a timeline and times in ns from ``origin``,
    number of duplicate spans). Missing occurrence numbers are counted in each group, in order of
    start."""
    keys = ["step", "kind", "name", "group"]
    backward = pl.col("name").str.to_lowercase().str.contains(BACKWARD)
    spans = part.spans.unique(maintain_order=True).sort("start")
    later = (part.since - origin) / NS
    return spans.with_columns(
        rank=pl.lit(rank, pl.Int32),
        seq=pl.when(pl.col("seq") >= 0).then("seq").otherwise(pl.int_range(pl.len()).over(keys)),
        layer=pl.lit(0, pl.Int64),
        slice=pl.lit(-1, pl.Int64),
        direction=pl.when(backward).then(pl.lit("backward")).otherwise(pl.lit("forward")),
        start=pl.col("start") + later,
        end=pl.col("end") + later,
    ).with_columns(
        start_ns=(pl.col("start") * NS).round().cast(pl.Int64), end_ns=(pl.col("end") * NS).round().cast(pl.Int64)
    ).select(  # seconds, and whole nanoseconds: each reader takes the form that it knows

        "step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes", "axis",
        "group", "start_ns", "end_ns",
    ), part.spans.height - spans.height  # fmt: skip
