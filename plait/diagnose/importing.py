"""Recordings of other tools, made into a run's folder that ``plait diagnose`` reads:
traces of PyTorch's profiler, dumps of its flight recorder, one file a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from plait.core.base.codec.json_stream import read_stream
from plait.core.base.codec.json_text import Most, open_unpacked
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import check_target, explained, kind_of, reason_of, replacing
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.core.record.timeline import SCHEMA_VERSION
from plait.core.runs.evidence import spoken_ranks, write_hang
from plait.diagnose.dumps import verdict_of
from plait.diagnose.flight_recorder import VERSIONS, Dump, dump_spans, is_dump
from plait.diagnose.imported import Said, write_notes
from plait.diagnose.kineto import ComputeEvents, TraceEvents
from plait.diagnose.plain_pickle import MARKS, read_plain
from plait.diagnose.tables import MOST_RANKS
from plait.diagnose.trace_columns import LATEST, NS, ForeignSpans
from plait.diagnose.whose import LOW, can_be_rank, checked_rank, numbered, process_in, rank_by_path

if TYPE_CHECKING:
    from plait.core.runs.evidence import Verdict

BACKWARD = r"reduce_?scatter|backward|grad"
FIRST = 1000
"""ns at which the first span begins: a start of 0 is one that is not known."""
LOST = 0.02
"""Share of a rank's kernels that cannot be read, from which on nobody can say what it computes."""
NAMED = 8
"""Files whose ranks are listed, at most."""


@dataclass(kw_only=True)
class Imported:
    """What was read. ranks, spans: how many. notes: of the whole, for people. verdict: of dumps, why their
    ranks wait; None where there are none."""

    ranks: int = 0
    spans: int = 0
    over: PassedOver = field(default_factory=PassedOver)
    notes: list[str] = field(default_factory=list[str])
    verdict: Verdict | None = None


class _Unread(NamedTuple):
    """A file that cannot be read. rank: as its name tells."""

    rank: int | None
    why: str


@dataclass(kw_only=True)
class _ImportedFile:
    """One that could be read. rank: None where nothing tells it. communicates: whether a trace shows any.
    has_base: whether it has a base time."""

    path: Path
    rank: int | None
    part: ForeignSpans
    over: PassedOver
    dump: Dump | None = None
    world: int | None = None
    communicates: bool = True
    untold: int = 0
    groups: int = 0
    work: ComputeEvents | None = None
    has_base: bool = True


def import_traces(files: Sequence[Path], out: Path, told: Callable[[str], None] = lambda _: None) -> Imported:
    """Write ``out`` and say what was read; files that cannot be used are skipped, and ``told``.

    Raises JobError for a folder that holds something else, LaunchError for one that cannot be written,
    DataError where no file could be used.
    """
    cannot, fix = f"{out} cannot be written", "Choose another with --out"
    with explained(cannot, fix=fix):
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken:
        raise JobError(f"{out} exists and is not empty", key="--out", fix="Name a new folder")
    check_target(out / "timeline" / "rank", fix=fix)
    found = Imported()
    every, unread = _all(files, told)
    read = _by_rank(every, found, told)
    if not read:
        why = f" ({next(iter(unread))}: {next(iter(unread.values())).why})" if unread else ""
        raise DataError(f"none of {len(files)} files could be used{why}")
    dumps = {rank: one.dump for rank, one in read.items() if one.dump}
    evidence = None
    if dumps:
        found.verdict, evidence = verdict_of(dumps, _of_the_job(unread, read))
        if found.verdict.cause == "none" and any(one.part.spans.height for one in read.values()):
            found.notes.append(found.verdict.why)
    _remark(read, unread, found)
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
    """Files, and those of folders that may be recordings: by their beginning, whatever their names are."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [one for one in inside if not path.is_dir() or (kind_of(one) == "file" and _begins(one))]
    return found


def _begins(path: Path) -> bool:
    head = _head(path)
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or head[:2] in MARKS


# ---- reading ----


def _all(files: Sequence[Path], told: Callable[[str], None]) -> tuple[list[_ImportedFile], dict[Path, _Unread]]:
    """Those that can be read; the others, and whose they are by their names."""
    found: list[_ImportedFile] = []
    unread: dict[Path, _Unread] = {}
    low = max(LOW, 8 * len(files))
    for path in files:
        try:
            found.append(_read(path, low))
        except DataError as error:
            unread[path] = _Unread(rank_by_path(path, low), str(error))
            told(f"{path} was skipped: {error}")
    return found, unread


def _of_the_job(unread: Mapping[Path, _Unread], read: Mapping[int, _ImportedFile]) -> list[int]:
    """Ranks whose files cannot be read, of the job as far as its size is known."""
    world = max((one.world or 0 for one in read.values()), default=0) or MOST_RANKS
    ranks = {one.rank for one in unread.values() if one.rank is not None}
    return sorted(rank for rank in ranks if rank < world and rank not in read)


def _read(path: Path, low: int) -> _ImportedFile:
    """Raises DataError for whatever cannot be used, so that the other files are not lost with it."""
    over = PassedOver()
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
        # A file of another tool may hold anything anywhere.
        raise DataError(f"a value in it cannot be used: {str(error).partition(chr(10))[0][:200]}") from None
    raise DataError("neither a PyTorch profiler trace nor a flight recorder's dump")


def _trace(path: Path, trace: TraceEvents, header: Mapping[str, Any], over: PassedOver, low: int) -> _ImportedFile:
    said = trace.told(header)
    rank = rank_by_path(path, low) if said.rank is None else said.rank
    part, comm = trace.spans(header, rank)
    return _ImportedFile(path=path, rank=rank, part=_sound(part), over=over, world=said.world, untold=comm.untold,
                 communicates=not comm.comm.is_empty(), groups=said.groups, work=trace.work,
                 has_base=header.get("baseTimeNanoseconds") is not None)  # fmt: skip


def _dump(path: Path, dump: Dump, header: Mapping[str, Any], over: PassedOver, low: int) -> _ImportedFile:
    dump.finish(header)
    rank = _rank_of(dump, rank_by_path(path, low))
    world = 1 + max(dump.mentioned or {rank})
    return _ImportedFile(path=path, rank=rank, part=_sound(dump_spans(dump, rank)), over=over, dump=dump, world=world)


def _rank_of(dump: Dump, named: int | None) -> int:
    """The rank that a dump says, or its name where that cannot be; a doubt where its groups have not got it.
    Raises DataError for a dump without a possible rank."""
    said = named if dump.told is None else dump.told
    if said is None:
        raise DataError("it does not say whose it is: name the file rank-N... or ..._rank_N...")
    if can_be_rank(said, dump.mentioned):
        return said
    why = "which none of its groups has" if can_be_rank(said) else "which is none"
    where = "by its name" if dump.told is None else "by what it says"
    if dump.told is not None and can_be_rank(named, dump.mentioned):
        dump.doubts.append(f"is of rank {shown(said)} {where}, {why}: it counts as rank {named}'s, as its name tells")
        return checked_rank(named)
    dump.doubts.append(f"is of rank {shown(said)} {where}, {why}")
    return checked_rank(said)


def _sound(part: ForeignSpans) -> ForeignSpans:
    """Raises DataError for times that no clock has."""
    longest = float(part.spans["end"].max() or 0.0)  # type: ignore[arg-type]
    if not (longest >= 0 and -LATEST * NS <= part.since <= (LATEST - longest) * NS):
        raise DataError(f"it has times more than {LATEST:.0f} seconds from 1970")
    return part


def _head(path: Path) -> bytes:
    """How a file begins, unpacked; nothing of one that cannot be read."""
    try:
        with open_unpacked(path, Most()) as stream:
            return stream.read(64)
    except (OSError, ValueError):
        return b""


def _by_rank(read: Sequence[_ImportedFile], found: Imported, told: Callable[[str], None]) -> dict[int, _ImportedFile]:
    """One file a rank: of several the first. Files that tell none are numbered."""
    by_rank: dict[int, _ImportedFile] = {}
    for one in read:
        if one.rank is None:
            continue
        if one.rank in by_rank:
            told(f"{one.path} was skipped: it is of rank {one.rank}, as is {by_rank[one.rank].path}")
            if first := by_rank[one.rank].dump:
                first.doubts.append(f"is not the only one of it: {one.path.name}, too, says so and was skipped")
        else:
            by_rank[one.rank] = one
    unknown = {one.path: one for one in _one_window([one for one in read if one.rank is None], told)}
    if unknown:
        numbers = numbered(list(unknown), {rank: one.path for rank, one in by_rank.items()})
        for path, rank in numbers.items():
            by_rank[rank] = unknown[path]
        listed = [f"{rank}: {path.name}" for path, rank in list(numbers.items())[:NAMED]]
        more = f", and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        found.notes.append(
            f"the ranks of {len(numbers)} files are not known: neither they nor their names tell them. They are "
            f"numbered in the order of their names ({', '.join(listed)}{more})"
        )
    return dict(sorted(by_rank.items()))


def _one_window(read: Sequence[_ImportedFile], told: Callable[[str], None]) -> Iterator[_ImportedFile]:
    """The first of the files that TensorBoard's handler has written for one process at one time after the
    other, and all other files."""
    first: dict[str, _ImportedFile] = {}
    for one in read:
        other = first.setdefault(process_in(one.path.name) or str(one.path), one)
        if other is one or set(one.part.spans["step"].unique()) & set(other.part.spans["step"].unique()):
            yield one
        else:
            told(f"{one.path} was skipped: its name is that of the same process as {other.path}, with other steps")


def _remark(read: Mapping[int, _ImportedFile], unread: Mapping[Path, _Unread], found: Imported) -> None:
    """What is wrong with the whole, although each file can be read."""
    worlds = sorted({one.world for one in read.values() if one.world})
    if len(worlds) > 1 and not any(one.dump for one in read.values()):
        found.notes.append(f"the files are of jobs of different sizes: {', '.join(map(str, worlds[:NAMED]))} ranks")
    world = max(worlds, default=0)
    lost = _of_the_job(unread, read)
    if lost:
        whose = f"rank {lost[0]}'s file" if len(lost) == 1 else f"the files of {spoken_ranks(lost)}"
        found.notes.append(f"{whose} cannot be read: what {'it' if len(lost) == 1 else 'they'} did is not known")
    missing = world - len([rank for rank in (*read, *lost) if rank < world])
    if missing > 0:
        some = [rank for rank in range(min(world, 65536)) if rank not in read and rank not in lost]
        nobodys = sum(one.rank is None for one in unread.values())
        or_not = f", unless theirs is among the {nobodys} that cannot be read" if nobodys else ""
        found.notes.append(f"the job has {world} ranks, and {spoken_ranks(some)} left no file{or_not}")
    found.notes += [
        f"{one.path.name} says that it is of rank {rank}, of a job of {one.world} ranks"
        for rank, one in read.items()
        if one.world and rank >= one.world
    ][:NAMED]
    found.notes += [
        f"{one.path.name} is of version {one.dump.version}, which is not known: it is read as version 2"
        for one in read.values()
        if one.dump and one.dump.version.partition(".")[0] not in VERSIONS
    ][:NAMED]
    if unheard := [rank for rank, one in read.items() if one.dump and not one.dump.entries]:
        found.notes.append(
            f"the dump of {spoken_ranks(unheard)} holds no operation: none was begun, or none was recorded"
        )
    traces = {rank: one for rank, one in read.items() if one.dump is None}
    found.notes += [*_said_of_times(read), *_said_of_steps(traces)]
    found.notes += [
        f"{work.unread} of rank {rank}'s {work.count} {work.kind} cannot be read, so what it computes is not known: no "
        "cause is told for it"
        for rank, work in _unknown(read).items()
    ][:NAMED]
    silent = [rank for rank, one in traces.items() if not one.communicates]
    if silent and (len(traces) > 1 or world > 1):
        who = "any rank" if len(silent) == len(traces) else spoken_ranks(silent)
        found.notes.append(
            f"nothing in the trace of {who} is known as communication, although the job has "
            f"{max(world, len(traces))} ranks: if their library's kernels have other names, they count as computation"
        )
    untold = sum(one.untold for one in traces.values() if one.groups > 1)
    if untold:
        found.notes.append(
            f"of {untold} collectives no group is told, and the job has several: they count as one group's"
        )
    open_ = {
        rank: len([e for e in one.dump.entries if e.open and not e.batch])
        + len([e for e in one.dump.loose(rank) if e.batch])
        for rank, one in read.items()
        if one.dump
    }
    if any(open_.values()):
        found.notes.append(
            f"{sum(open_.values())} operations of {spoken_ranks([rank for rank, n in open_.items() if n])} had not "
            "ended: plait diagnose --hang says what is known of them"
        )


def _timeless(read: Mapping[int, _ImportedFile]) -> list[int]:
    """Ranks whose traces have no base time, where others' have one: their clock is another."""
    ranks = [rank for rank, one in read.items() if not one.has_base]
    return ranks if len(ranks) < len(read) else []


def _unknown(read: Mapping[int, _ImportedFile]) -> dict[int, ComputeEvents]:
    """Ranks of whose work too much cannot be read."""
    works = {rank: one.work for rank, one in read.items() if one.work and one.work.unread}
    return {rank: work for rank, work in works.items() if work.unread >= LOST * work.count}


def _said_of_times(read: Mapping[int, _ImportedFile]) -> list[str]:
    ranks = _timeless(read)
    if not ranks:
        return []
    whose = f"rank {ranks[0]}'s trace has" if len(ranks) == 1 else f"the traces of {spoken_ranks(ranks)} have"
    return [f"{whose} no base time (baseTimeNanoseconds): lateness cannot be told"]


def _said_of_steps(traces: Mapping[int, _ImportedFile]) -> list[str]:
    """Where not all have the same."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, one in traces.items():
        ranks[tuple(one.part.spans["step"].unique().sort().to_list())].append(rank)
    if len(ranks) < 2:
        return []
    common, every = set.intersection(*map(set, ranks)), set.union(*map(set, ranks))
    whose = [f"{spoken_ranks(own)}: {_spoken_steps(steps)}" for steps, own in list(ranks.items())[:NAMED]]
    return [f"steps common to all: {len(common)} of {len(every)} ({'; '.join(whose)})"]


def _spoken_steps(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"{steps[0]}" if len(steps) == 1 else f"{'' if whole else f'{len(steps)} of '}{steps[0]}-{steps[-1]}"


# ---- writing ----


def _write(read: Mapping[int, _ImportedFile], out: Path, found: Imported) -> None:
    """One file a rank, as a run has them, and what there is to say."""
    timeless = _timeless(read)
    told = {rank: one.part.since for rank, one in read.items() if one.part.spans.height and rank not in timeless}
    origin = min(told.values(), default=0) - FIRST
    (out / "timeline").mkdir(parents=True, exist_ok=True)
    for rank, one in read.items():
        if not one.part.spans.height:
            continue
        part = one.part._replace(since=origin + FIRST) if rank in timeless else one.part
        spans, twice = _finished(part, rank, origin)
        if twice:
            found.over.note("events that stand in a file twice", one.path.name, twice)
            found.spans -= twice
        target = out / "timeline" / f"rank-{rank:05d}-step-{int(spans['step'].max() or 0) + 1:08d}.parquet"  # type: ignore[arg-type]
        with replacing(target) as partial:
            spans.write_parquet(partial, metadata={"plait.timeline.version": SCHEMA_VERSION, "plait.plan": ""})
    write_notes(
        out,
        Said(
            tuple(found.notes), found.over, steps=any(one.dump is None for one in read.values()),
            one_clock=not _timeless(read), unknown={rank: work.unread for rank, work in _unknown(read).items()},
        ),
    )  # fmt: skip


def _finished(part: ForeignSpans, rank: int, origin: int) -> tuple[pl.DataFrame, int]:
    """With the rest of a timeline's columns, and times from ``origin``; how many spans stood twice.
    Occurrences that were not counted are, in each group in the order of their starts."""
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
    ).select(  # seconds, and the same in whole nanoseconds: whoever reads takes what it knows

        "step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes", "axis",
        "group", "start_ns", "end_ns",
    ), part.spans.height - spans.height  # fmt: skip
