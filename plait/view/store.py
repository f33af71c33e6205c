"""Watch runs: read their folders in the background, and again after changes.

There are three readings. The first reads totals, from which the heat map is drawn at once for any
number of ranks and steps. The second reads the sums of every step, metrics, attempts, and the
verdict on a hang. The third reads every span and runs the diagnosis. The second and third begin
after the first picture is drawn, and a page never waits for them. The folders are fixed when the
server starts; requests identify a run by its index.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import polars as pl

from plait.api.diagnosing import live_hang, report_of
from plait.core.base.errors import PlaitError
from plait.core.base.files import walk
from plait.core.base.text import seconds_text
from plait.core.job.plan import Plan
from plait.core.runs.evidence import Evidence, Verdict
from plait.diagnose.measured.dependencies import Alignment, aligned
from plait.diagnose.measured.reading import RecordedRun, glance, read_run
from plait.diagnose.measured.recording import Recording, grid_of, rank_phrase
from plait.diagnose.measured.tables import RunTotals
from plait.diagnose.rank_map import Heat, RankState, Statistic, by_segment, heat_of_segments, heat_of_steps, rank_states
from plait.diagnose.report import Report

Hang = tuple[Verdict, Sequence[Evidence]]
SMALL = ("plan.json", "metrics.jsonl", "attempts.jsonl", "hang.json", "rank_table.json", "summary.json")
"""Names of files in a run's folder that are checked for changes, besides the timeline's folders."""
FIRST_FIGURE_SECONDS = 1.0
"""Seconds that a page waits for its first figure. Without one in time, the page gets it at its
first update."""
PATIENCE = 10
"""Least time between two readings of a changing folder, as a multiple of the time that a reading
takes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """Snapshot of a run at a moment. generation: grows with every change. glance: the run's
    totals; None without any. run: its folder as read; None until then. has_spans: True if all spans
    are read. report: the diagnosis; None until then. hang: the verdict on a hang. errors: last
    error messages, by rank. grid: coordinates of ranks. problem: for people, why there is no
    content."""

    name: str
    folder: Path
    generation: int = 0
    glance: RunTotals | None = None
    run: RecordedRun | None = None
    has_spans: bool = False
    report: Report | None = None
    hang: Hang | None = None
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    hang_notes: tuple[str, ...] = ()
    clocks: Alignment | None = None
    grid: pl.DataFrame | None = None
    problem: str = ""
    doing: str = "reading"
    live: bool = False

    @property
    def recording(self) -> Recording | None:
        """The run's recording; None until it is read."""
        return self.run.recording if self.run else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on content of the run's folder that was skipped."""
        if self.run:
            return (*self.hang_notes, *self.run.notes)
        return (*self.hang_notes, *self.glance.notes) if self.glance else self.hang_notes

    def standings(self) -> list[RankState]:
        """Return the state of every rank, in order of rank."""
        if self.grid is None:
            return []
        slow = self.report.stragglers if self.report else ()
        return rank_states(self.grid, hang=self.hang, stragglers=slow, errors=self.errors, live=self.live)

    def named(self) -> dict[int, str]:
        """Return the finding on each rank that the diagnosis or the verdict on a hang names, as
        text, by rank."""
        found = {rank: one.what for one in (self.report.stragglers if self.report else ()) for rank in one.ranks}
        if self.hang and self.hang[0].certain:
            found |= dict.fromkeys(self.hang[0].ranks, f"hang: {self.hang[0].cause}")
        return found

    def latest(self) -> list[tuple[int, str]]:
        """Return (rank, its lateness in words) of the latest ranks of the diagnosis."""
        named = self.named()
        return [
            (
                one.rank,
                f"{rank_phrase(self.grid, one.rank)}: {one.share:+.1%}, "
                + f"{seconds_text(one.seconds, signed=True)} of a step"
                + (f" since step {one.since + 1}" if one.since is not None else "")
                + (f", {named[one.rank]}" if one.rank in named else ""),
            )
            for one in (self.report.verdicts.lateness if self.report else ())
        ]


_maps: WeakKeyDictionary[Recording | RunTotals, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
"""The last few heat maps that were computed, for every recording or totals still in use."""
KEPT = 8


def heat_of(
    snapshot: Snapshot, statistic: Statistic, steps: tuple[int, int] | None, order: tuple[str, ...],
    columns: str,
) -> Heat | None:  # fmt: skip
    """Return the heat map of a snapshot; None if it cannot be computed yet. columns: ``segments``
    or ``steps``."""
    recording, first, grid = snapshot.recording, snapshot.glance, snapshot.grid
    if recording is None and first and grid is not None and (statistic, steps, columns) == ("mean", None, "segments"):
        return _kept(first, (order,), lambda: heat_of_segments(first.segments, grid, order))
    if recording is None or recording.rollup.is_empty():
        return None

    def made() -> Heat:
        if columns == "steps":
            rows = recording.rollup
            rows = rows if steps is None else rows.filter(pl.col("step").is_between(*steps))
            return heat_of_steps(rows, recording.grid, order)
        sums = _kept(recording, (statistic, steps), lambda: by_segment(recording.rollup, statistic, steps))
        return heat_of_segments(sums, recording.grid, order)

    return _kept(recording, (statistic, steps, order, columns), made)


def _kept(recording: Recording | RunTotals, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    maps = _maps.setdefault(recording, {})
    found = maps.get(key)
    if found is None:
        found = make()
        while len(maps) >= KEPT:
            maps.pop(next(iter(maps)), None)
        maps[key] = found
    return found


class Watched:
    """A watched run. Methods return at once, except ``first`` and ``read``; a thread reads the
    folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._snapshot = Snapshot(name=name, folder=folder)
        self._seen: tuple[object, ...] = ()
        self._explained: RecordedRun | None = None
        self._wanted = self._reading = False
        self._not_before = 0.0
        self._looked = threading.Event()  # set when the first figure is available, or will not be soon

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot."""
        return self._snapshot

    def look(self, *, all_of_it: bool = False) -> Snapshot:
        """Start to read the folder if it has changed, or at the first request for all of it; return
        the current snapshot at once. all_of_it: True to request the spans and the diagnosis."""
        with self._lock:
            self._wanted |= all_of_it
            if not self._reading:
                seen = signature(self.folder)
                changed = seen != self._seen and time.monotonic() >= self._not_before
                if changed or self._lacks() or self._only_glanced():
                    self._seen, self._reading = seen, True
                    threading.Thread(target=self._read, args=(changed,), name="reading", daemon=True).start()
            return self._snapshot

    def first(self) -> Snapshot:
        """Start to read the folder; wait up to ``FIRST_FIGURE_SECONDS`` for the content that can be
        drawn at once, and return the snapshot."""
        self.look()
        self._looked.wait(FIRST_FIGURE_SECONDS)
        return self._snapshot

    def read(self) -> Snapshot:
        """Read the whole folder in this thread, with the diagnosis; return the snapshot."""
        self._wanted, self._seen, self._reading = True, signature(self.folder), True
        self._read(True)
        return self._snapshot

    def _lacks(self) -> bool:
        """True if the diagnosis is requested and not done."""
        now = self._snapshot
        return self._wanted and now.run is not None and now.run is not self._explained and not now.problem

    def _read(self, changed: bool) -> None:
        began = time.monotonic()
        try:
            seen = changed and self._snapshot.run is None and not self._wanted and self._glance()
            self._looked.set()
            if not seen and (changed or self._only_glanced()):
                self._first()
            if self._lacks():
                self._second()
        except PlaitError as error:
            self._change(problem=str(error), doing="", live=is_live(self.folder))
        except Exception as error:  # noqa: BLE001 - the page goes on, and who started the server sees why
            traceback.print_exc(file=sys.stderr)
            self._change(problem=f"reading failed: {type(error).__name__}: {error}", doing="")
        finally:
            with self._lock:
                self._not_before = time.monotonic() + PATIENCE * (time.monotonic() - began)
                self._reading = False

    def _only_glanced(self) -> bool:
        """True if more is requested and only totals were read."""
        now = self._snapshot
        return self._wanted and now.run is None and now.glance is not None and not now.problem

    def _glance(self) -> bool:
        """Read the totals; True if there are any."""
        found = glance(self.folder)
        if found:
            self._change(glance=found[0], grid=found[1], doing="", live=is_live(self.folder))
        return found is not None

    def _first(self) -> None:
        """Read the sums of steps or all spans into the snapshot; previous results stay until the
        new ones are complete."""
        said: list[str] = []
        try:
            found = live_hang(self.folder, live=is_live(self.folder))
            hang = found and (found.verdict, found.evidence)
        except PlaitError as error:
            hang = None
            said.append(str(error))
        now = self._snapshot
        # A run that hung in its first step has no timeline, but its states can be shown.
        self._change(
            hang=hang, errors=last_errors(self.folder), hang_notes=tuple(said), live=is_live(self.folder),
            grid=planned_grid(self.folder) if now.grid is None else now.grid,
        )  # fmt: skip
        whole = self._wanted and (now.glance is None or now.run is not None)
        self._change(doing="reading all spans" if whole else "reading the sums of all steps")
        run = read_run(self.folder, spans=whole)
        self._change(
            run=run, problem="", has_spans=whole or not run.recording.spans.is_empty(), doing="",
            clocks=aligned(run.recording), grid=run.recording.grid,
        )  # fmt: skip

    def _second(self) -> None:
        run = self._snapshot.run
        if run is None or not self._snapshot.has_spans:
            self._change(doing="reading all spans")
            run = read_run(self.folder)
        self._change(run=run, has_spans=True, doing="diagnosing", clocks=aligned(run.recording))
        self._explained = run
        self._change(report=report_of(run), doing="")

    def _change(self, **values: Any) -> None:
        """Replace the snapshot; its generation grows if the shown content changes."""
        same = values.keys() <= {"doing", "live"}
        self._snapshot = replace(self._snapshot, generation=self._snapshot.generation + (not same), **values)


def watch(folders: Sequence[Path]) -> list[Watched]:
    """Return the runs of these folders, watched, under distinct names."""
    return [Watched(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as make the names distinct."""
    paths = [folder.absolute() for folder in folders]
    for parts in range(1, 4):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def chosen_run(runs: Sequence[Watched], number: object) -> Snapshot:
    """Return the snapshot of the run with this index; of the first run for any other value."""
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(runs):
        return runs[number].snapshot
    return runs[0].snapshot


# ---- reading folders ----


def planned_grid(folder: Path) -> pl.DataFrame | None:
    """Return the coordinates of ranks from the run's plan; None without a readable plan."""
    try:
        return grid_of(Plan.read(folder / "plan.json").layout)
    except PlaitError:
        return None


def signature(folder: Path) -> tuple[object, ...]:
    """Return a value that is equal as long as no file has changed: times and sizes of small files
    and of the timeline's folders, whose files appear completely or not at all."""
    found: list[object] = []
    inside = [place for place, _, _ in walk(folder / "timeline")]
    for path in (*(folder / name for name in SMALL), *inside):
        try:
            status = path.stat()
            found.append((path.name, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((path.name, 0, 0))
    return tuple(found)


def is_live(folder: Path) -> bool:
    """True if the run's lock file was written within the last minute."""
    try:
        return time.time() - (folder / "lock.json").stat().st_mtime < 60
    except OSError:
        return False


TAIL = 4096
"""Bytes at the end of a log that are searched for an error message."""
MOST = 2048
"""The largest number of logs that are searched for error messages."""


def last_errors(folder: Path) -> dict[int, str]:
    """Return the last line of the traceback in each rank's log, by rank. Logs older than the run's
    orderly end are ignored. Symbolic links are not followed."""
    found: dict[int, str] = {}
    try:
        ended = (folder / "summary.json").stat().st_mtime
    except OSError:
        ended = 0.0
    for path in sorted((folder / "logs").glob("rank-*.log"))[:MOST]:
        number = path.stem.removeprefix("rank-")
        try:
            if path.is_symlink() or not path.is_file() or not number.isdigit() or path.stat().st_mtime < ended:
                continue
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.strip()]
        if "Traceback (most recent call last)" in text and lines:
            found[int(number)] = lines[-1].strip()
    return found
