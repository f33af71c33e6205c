"""Read the small files of a run's folder, and collect the remarks on imported recordings.

Three parts: lines of JSON (metrics, attempts), in which damaged, too long or impossible content is
skipped and counted; the selection of steps with batches of one size; and remarks on other tools'
recordings, as their files are read and as ``imported.json`` keeps them.

Steps of different batch sizes are not comparable, as while a batch ramps up: their median, drift or
prediction describes none of them.
"""

from __future__ import annotations

import errno
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from plait.core.base.codec.json_text import is_table, read_table
from plait.core.base.files import kind_of, reason_of, replacing
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import LARGEST, MOST_SECONDS, counted, is_number, shown
from plait.core.record.timeline import Notes
from plait.core.runs.evidence import spoken_ranks
from plait.diagnose.measured.recording import Recording
from plait.diagnose.measured.tables import MOST_RANKS
from plait.diagnose.verdicts.waits import agree
from plait.formats.flight_recorder import VERSIONS

if TYPE_CHECKING:
    from plait.formats.base.recordings import ForeignSpans
    from plait.formats.flight_recorder import Dump
    from plait.formats.kineto.events import ComputeEvents

FEW = 8
"""Least number of last steps of one batch size that can represent the run."""
MOST_LINES, MOST_VALUES, LONGEST_LINE = 500_000, 8_000_000, 1 << 20
"""Limits of a file of JSON lines: lines and values that are read, bytes of a line. A step has some
15 values."""
LATEST_TIME = 2.0**32
"""Latest possible time in a file, in seconds since 1970: in 2106."""
UNREAD = "files of the run that cannot be read"


@dataclass(frozen=True)
class UniformRun:
    """A recording restricted to steps with batches of one size. metrics: their lines of
    metrics.jsonl. tokens: of each step; None if unknown. note: a sentence on which steps they are;
    empty if all steps of the run have one size."""

    recording: Recording
    metrics: Sequence[Mapping[str, Any]]
    tokens: int | None = None
    note: str = ""


def uniform_run(recording: Recording, metrics: Sequence[Mapping[str, Any]]) -> UniformRun:
    """Return the steps of the last batch size; if few steps have it, of the most frequent size.
    metrics: lines of metrics.jsonl, from which the sizes are known."""
    one = uniform_steps(metrics, recording.seconds)
    if not one.note:
        return UniformRun(recording, metrics, one.tokens)
    here = pl.col("step").is_in(one.steps)
    chosen = replace(
        recording,
        rollup=recording.rollup.filter(here), meetings=recording.meetings.filter(here),
        spans=recording.spans.filter(here), seconds={step: recording.seconds[step] for step in one.steps},
    )  # fmt: skip
    return UniformRun(
        chosen, [line for line in metrics if dict(_size(line)).keys() & {*one.steps}], one.tokens, one.note
    )


class UniformSteps(NamedTuple):
    """Steps with batches of one size, from 0, in order. tokens: of each; None if unknown. note: a
    sentence on which steps they are; empty if all steps have one size."""

    steps: list[int]
    tokens: int | None
    note: str


def uniform_steps(
    metrics: Iterable[Mapping[str, Any]], known: Collection[int], drawn: Collection[int] = ()
) -> UniformSteps:
    """Return the steps in ``known`` of the last batch size; if few have it, of the most frequent
    size. drawn: steps of which the result should contain some, if there are any."""
    sizes = {step: tokens for line in metrics for step, tokens in _size(line) if step in known}
    if len({*sizes.values()}) < 2:
        return UniformSteps(sorted(known), next(iter(sizes.values()), None), "")
    counts = Counter(size for step, size in sizes.items() if step in drawn) or Counter(sizes.values())
    tokens = sizes[max(step for step, size in sizes.items() if size in counts)]
    if counts[tokens] < FEW:
        tokens = max(counts, key=lambda size: (counts[size], size))
    steps = sorted(step for step, size in sizes.items() if size == tokens)
    note = (
        f"Steps have batches of {len({*sizes.values()})} sizes: step statistics cover the {len(steps)} with "
        f"{tokens:,} tokens, from {steps[0] + 1} to {steps[-1] + 1}"
    )
    return UniformSteps(steps, tokens, note)


def _size(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return [(step counted from 0, its tokens)] of a line of metrics.jsonl; empty if the line
    lacks either."""
    step = line.get("step")
    known = all(is_number(line.get(name)) for name in ("seconds", "tokens_per_second"))
    if not known or not isinstance(step, int) or isinstance(step, bool):
        return []
    tokens = float(line["seconds"]) * float(line["tokens_per_second"])
    return [(step - 1, round(tokens))] if math.isfinite(tokens) else []


def lines_of(path: Path, notes: Notes) -> Iterable[Mapping[str, Any]]:
    """Yield the JSON objects of a file's lines, without impossible numbers. A truncated last line
    is ignored silently."""
    bad, good, strange, number = 0, 0, list[str](), 0
    for number, line in enumerate(_texts(path, notes), 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if is_table(values):
            sound = {sys.intern(name): value for name, value in values.items() if _possible(name, value)}
            strange += [f"{name} of line {number}" for name in values if name not in sound]
            good += 1
            yield sound
        else:
            bad += 1
    if bad > 1 or (bad and not good):
        what = "lines are no JSON objects, and were" if bad > 1 else "line is no JSON object, and was"
        notes.count(f"{path.name}: {bad} {what} left out", f"lines of {path.name} that are no JSON objects", bad)
    if strange:
        many = f"{len(strange)} numbers cannot be, such as {strange[0]}, and were"
        line = f"{path.name}: {many if len(strange) > 1 else f'{strange[0]} cannot be, and was'} left out"
        notes.count(line, f"numbers of {path.name} that cannot be", len(strange), strange[0])


def _texts(path: Path, notes: Notes) -> Iterator[bytes]:
    """Yield the lines of a file, up to the limits that protect memory. A note records that there
    are more."""
    number = values = 0
    try:
        if (kind := kind_of(path)) not in ("file", ""):
            raise OSError(errno.EINVAL, f"it is a {kind}")
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE):
                number, values = number + 1, values + line.count(b",") + 1
                if number > MOST_LINES or values > MOST_VALUES or len(line) == LONGEST_LINE:
                    break
                yield line
            else:
                return
    except FileNotFoundError:
        return
    except OSError as error:
        notes.left_out(UNREAD, {path.name: f"it cannot be read: {error.strerror}"})
        return
    what = f"{path.name}: from line {number} on it is too long to be read, and was left out"
    notes.count(what, f"ends of {path.name} that are too long", 1, f"line {number}")


def _possible(name: str, value: Any) -> bool:
    """True if the value is possible for its name: finite, and for counts and times within
    limits."""
    if not is_number(value):
        return True
    counts = name in ("step", "steps", "resumed", "writing", "skipped")
    least, most = (-1, LARGEST) if counts else (-1e300, 1e300)
    if name.endswith("seconds") or name in ("started", "ended"):
        least, most = 0, MOST_SECONDS if name.endswith("seconds") else LATEST_TIME
    return bool(least <= value <= most)


FILE = "imported.json"
VERSION = 1
UNREADABLE_SHARE = 0.02
"""Share of a rank's kernels: if more of them cannot be read, the rank's computation counts as
unknown."""
MAX_LISTED = 8
"""The largest number of files or ranks that one remark lists."""


class ImportRemarks(NamedTuple):
    """Remarks on an imported recording. steps: True if spans have steps; profiles do,
    flight-recorder dumps do not. shared_clock: True if either all traces or none have a base time.
    unknown: the number of unreadable kernels, for each rank with too many of them."""

    notes: tuple[str, ...]
    over: IgnoredInput
    steps: bool
    shared_clock: bool = True
    unknown: Mapping[int, int] = MappingProxyType({})

    def add_to(self, notes: Notes) -> None:
        """Append the remarks and counts to ``notes``."""
        notes.lines += [*self.notes, *self.over.lines()]
        notes.over.add(self.over)


def write_notes(folder: Path, imported: ImportRemarks) -> None:
    """Write the remarks into the imported folder. Raises OSError."""
    content = {
        "version": VERSION, "notes": list(imported.notes), "passed_over": imported.over.rows(), "steps": imported.steps,
        "one_clock": imported.shared_clock, "unknown": {str(rank): count for rank, count in imported.unknown.items()},
    }  # fmt: skip
    with replacing(folder / FILE) as partial:
        partial.write_text(json.dumps(content) + "\n")


def imported_notes(folder: Path) -> ImportRemarks | None:
    """Return the remarks of an imported folder; None for any other folder."""
    if not (folder / FILE).is_file():
        return None
    over = IgnoredInput()
    try:
        content = read_table(folder / FILE)
        notes = tuple(str(note) for note in content["notes"])
        for row in content["passed_over"]:
            over.note(str(row["what"]), str(row["first"]), _count(row["count"]))
        unknown = {_count(counted(rank)): _count(count) for rank, count in content.get("unknown", {}).items()}
        return ImportRemarks(notes, over, content["steps"] is not False, content.get("one_clock") is not False, unknown)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return ImportRemarks((f"{FILE} cannot be read: {reason_of(error)}",), IgnoredInput(), steps=True)


def _count(value: Any) -> int:
    """Return the count in a file. Raises ValueError for anything that is no count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise ValueError(f"{shown(value)} is no count")
    return value


# ---- remarks on files as they are read ----


class UnreadFile(NamedTuple):
    """A file that cannot be read. rank: from the file's name; None if unknown. why: the reason."""

    rank: int | None
    why: str


@dataclass(kw_only=True)
class ImportedFile:
    """A file that was read. rank: None if unknown. communicates: True if the trace shows any
    communication. without_group: collectives without a known group. groups: number of process
    groups. has_base: True if the trace has a base time."""

    path: Path
    rank: int | None
    part: ForeignSpans
    over: IgnoredInput
    dump: Dump | None = None
    world: int | None = None
    communicates: bool = True
    without_group: int = 0
    groups: int = 0
    work: ComputeEvents | None = None
    has_base: bool = True


def ranks_of_the_job(unread: Mapping[Path, UnreadFile], read: Mapping[int, ImportedFile]) -> list[int]:
    """Return the ranks whose files cannot be read, without numbers beyond the job's size, if that
    is known."""
    world = max((one.world or 0 for one in read.values()), default=0) or MOST_RANKS
    ranks = {one.rank for one in unread.values() if one.rank is not None}
    return sorted(rank for rank in ranks if rank < world and rank not in read)


def remarks(read: Mapping[int, ImportedFile], unread: Mapping[Path, UnreadFile]) -> Iterator[str]:
    """Yield remarks on inconsistencies between files that can each be read."""
    dumps = {rank: one for rank, one in read.items() if one.dump}
    traces = {rank: one for rank, one in read.items() if not one.dump}
    world = max((one.world or 0 for one in read.values()), default=0)
    yield from _of_ranks(read, unread, world)
    yield from _of_dumps(dumps)
    if ranks := without_base_time(read):
        whose = f"rank {ranks[0]}'s trace has" if len(ranks) == 1 else f"the traces of {spoken_ranks(ranks)} have"
        yield f"{whose} no base time (baseTimeNanoseconds): lateness cannot be computed"
    yield from _of_steps(traces)
    yield from _of_work(traces, world)


def _of_ranks(read: Mapping[int, ImportedFile], unread: Mapping[Path, UnreadFile], world: int) -> Iterator[str]:
    """Yield remarks on ranks that are missing or impossible. world: the largest job size in any
    file."""
    worlds = sorted({one.world for one in read.values() if one.world})
    lost = ranks_of_the_job(unread, read)
    if len(worlds) > 1 and not any(one.dump for one in read.values()):
        yield f"the files are of jobs of different sizes: {', '.join(map(str, worlds[:MAX_LISTED]))} ranks"
    if lost:
        whose = f"{spoken_ranks(lost)}'s file" if len(lost) == 1 else f"the files of {spoken_ranks(lost)}"
        yield f"{whose} cannot be read: what {agree(lost, 'it|they')} did is not known"
    if missing := [rank for rank in range(min(world, 65536)) if rank not in read and rank not in lost]:
        nobodys = sum(one.rank is None for one in unread.values())
        or_not = f", unless theirs is among the {nobodys} that cannot be read" if nobodys else ""
        yield f"the job has {world} ranks, and {spoken_ranks(missing)} left no file{or_not}"
    strange = [(rank, one) for rank, one in read.items() if one.world and rank >= one.world]
    for rank, one in strange[:MAX_LISTED]:
        yield f"{one.path.name} says that it is of rank {rank}, of a job of {one.world} ranks"


def _of_dumps(dumps: Mapping[int, ImportedFile]) -> Iterator[str]:
    known = {rank: one.dump for rank, one in dumps.items() if one.dump}
    unknown = [rank for rank, dump in known.items() if dump.version.partition(".")[0] not in VERSIONS]
    for rank in unknown[:MAX_LISTED]:
        name, version = dumps[rank].path.name, known[rank].version
        yield f"{name} is of version {version}, which is not known: it is read as version 2"
    if unheard := [rank for rank, dump in known.items() if not dump.entries]:
        yield f"the dump of {spoken_ranks(unheard)} holds no operation: none was begun, or none was recorded"
    if waiting := {rank: n for rank, dump in known.items() if (n := dump.waiting(rank))}:
        yield (
            f"{sum(waiting.values())} operations of {spoken_ranks(waiting)} had not ended: plait diagnose --hang says "
            "what is known of them"
        )


def _of_work(traces: Mapping[int, ImportedFile], world: int) -> Iterator[str]:
    """Yield remarks on ranks whose traces show no computation, or no communication. world: number
    of ranks of the job."""
    for rank, work in list(unknown_work(traces).items())[:MAX_LISTED]:
        yield (
            f"{work.unread} of rank {rank}'s {work.count} {work.kind} cannot be read, so what it computes is "
            "unknown: no cause is reported for it"
        )
    silent = [rank for rank, one in traces.items() if not one.communicates]
    if silent and (len(traces) > 1 or world > 1):
        who = "any rank" if len(silent) == len(traces) else spoken_ranks(silent)
        yield (
            f"nothing in the trace of {who} is known as communication, although the job has "
            f"{max(world, len(traces))} ranks: if their library's kernels have other names, they count as computation"
        )
    if untold := sum(one.without_group for one in traces.values() if one.groups > 1):
        yield f"{untold} collectives have no known process group, and the job has several: they count as one group's"


def without_base_time(read: Mapping[int, ImportedFile]) -> list[int]:
    """Return the ranks whose traces lack a base time while others have one: their clock differs."""
    ranks = [rank for rank, one in read.items() if not one.has_base]
    return ranks if len(ranks) < len(read) else []


def unknown_work(read: Mapping[int, ImportedFile]) -> dict[int, ComputeEvents]:
    """Return the counts of readable and unreadable kernels for each rank with too many unreadable
    ones (``UNREADABLE_SHARE``)."""
    works = {rank: one.work for rank, one in read.items() if one.work and one.work.unread}
    return {rank: work for rank, work in works.items() if work.unread >= UNREADABLE_SHARE * work.count}


def _of_steps(traces: Mapping[int, ImportedFile]) -> Iterator[str]:
    """Yield a remark on the steps of the traces, if they differ."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, one in traces.items():
        ranks[tuple(one.part.spans["step"].unique().sort().to_list())].append(rank)
    if len(ranks) > 1:
        common, every = set[int].intersection(*map(set, ranks)), set[int].union(*map(set, ranks))
        whose = "; ".join(
            f"{spoken_ranks(own)}: {_spoken_steps(steps)}" for steps, own in list(ranks.items())[:MAX_LISTED]
        )
        yield f"steps common to all: {len(common)} of {len(every)} ({whose})"


def _spoken_steps(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return str(steps[0]) if steps else "none"
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"{'' if whole else f'{len(steps)} of '}{steps[0]}-{steps[-1]}"
