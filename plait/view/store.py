"""Runs that are watched: what their folders hold, read in the background, again when it has changed.

Three readings. The first is a glance at totals, from which the heat map is drawn at once, however many ranks
and steps there are. The second is small: the sums of every step, metrics, attempts, why the run hangs. The
third has every span that was kept, and what the diagnosis says of it. What comes after a first picture begins
when that has been drawn; a page never waits for it. Which folders there are is said when the server
starts: requests name a run by its number.
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

from plait.api.diagnosing import live_hang, page_predictions, report_of
from plait.core.base.errors import PlaitError
from plait.core.base.files import walk
from plait.core.job.plan import Plan
from plait.core.runs.evidence import Evidence, Verdict
from plait.diagnose.alignment import Alignment, aligned
from plait.diagnose.heat import Heat, HeatColumn, Statistic, by_segment, heat_of_segments, heat_of_steps
from plait.diagnose.places import place_of
from plait.diagnose.reading import RecordedRun, glance, read_run
from plait.diagnose.recording import Recording, grid_of
from plait.diagnose.report import Report
from plait.diagnose.states import Standing, standings
from plait.diagnose.tables import Glance
from plait.view.words import seconds_text

Hang = tuple[Verdict, Sequence[Evidence]]
SMALL = ("plan.json", "metrics.jsonl", "attempts.jsonl", "hang.json", "rank_table.json", "summary.json")
"""Files of a run's folder that are looked at for changes, beside the timeline's folders."""
MOMENT = 1.0
"""Seconds for which a page waits for its first picture; without, it gets one at its first question."""
PATIENCE = 10
"""A folder that changes all the time is read again after so many times what reading took."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """What is known of a run at a moment. generation: grows with every change. glance: its totals, if it has
    any. run: None until it is read; whole: whether with all spans. grid: where ranks stand. problem: why
    there is nothing, for people."""

    name: str
    folder: Path
    generation: int = 0
    glance: Glance | None = None
    run: RecordedRun | None = None
    whole: bool = False
    told: Report | None = None
    hang: Hang | None = None
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    said: tuple[str, ...] = ()
    clocks: Alignment | None = None
    grid: pl.DataFrame | None = None
    problem: str = ""
    doing: str = "reading"
    live: bool = False

    @property
    def recording(self) -> Recording | None:
        """Of the run, if anything of it could be read."""
        return self.run.recording if self.run else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        if self.run:
            return (*self.said, *self.run.notes, *self.run.recording.notes)
        return (*self.said, *self.glance.notes) if self.glance else self.said

    def standings(self) -> list[Standing]:
        """Of every rank."""
        if self.grid is None:
            return []
        slow = self.told.stragglers if self.told else ()
        return standings(self.grid, hang=self.hang, stragglers=slow, errors=self.errors, live=self.live)

    def named(self) -> dict[int, str]:
        """Ranks that the diagnosis or the verdict on a hang names, and as what."""
        found = {rank: one.what for one in (self.told.stragglers if self.told else ()) for rank in one.ranks}
        if self.hang and self.hang[0].certain:
            found |= dict.fromkeys(self.hang[0].ranks, f"hang: {self.hang[0].cause}")
        return found

    def latest(self) -> list[tuple[int, str]]:
        """The latest ranks as the diagnosis has them, and how late they are, in words."""
        named = self.named()
        return [
            (
                one.rank,
                f"{place_of(self.grid, one.rank)}: {one.share:+.1%}, {seconds_text(one.seconds, signed=True)} of a step"
                + (f" since step {one.since + 1}" if one.since is not None else "")
                + (f", {named[one.rank]}" if one.rank in named else ""),
            )
            for one in (self.told.verdicts.lateness if self.told else ())
        ]


_maps: WeakKeyDictionary[Recording | Glance, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
"""The last few heat maps of every recording, as long as that is there."""
KEPT = 8


def heat_of(
    snapshot: Snapshot, statistic: Statistic, steps: tuple[int, int] | None, order: tuple[str, ...],
    columns: str, segment: HeatColumn | None = None,
) -> Heat | None:  # fmt: skip
    """Of a snapshot; None where that does not tell, or not yet. columns: ``segments`` or ``steps``."""
    recording, first, grid = snapshot.recording, snapshot.glance, snapshot.grid
    if recording is None and first and grid is not None and (statistic, steps, columns) == ("mean", None, "segments"):
        return _kept(first, (order,), lambda: heat_of_segments(first.segments, grid, order))
    if recording is None or recording.rollup.is_empty():
        return None

    def made() -> Heat:
        if columns == "steps":
            rows = recording.rollup
            rows = rows if steps is None else rows.filter(pl.col("step").is_between(*steps))
            return heat_of_steps(rows, recording.grid, order, segment)
        sums = _kept(recording, (statistic, steps), lambda: by_segment(recording.rollup, statistic, steps))
        return heat_of_segments(sums, recording.grid, order)

    return _kept(recording, (statistic, steps, order, columns, segment), made)


def _kept(recording: Recording | Glance, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    maps = _maps.setdefault(recording, {})
    found = maps.get(key)
    if found is None:
        found = make()
        while len(maps) >= KEPT:
            maps.pop(next(iter(maps)), None)
        maps[key] = found
    return found


class Watched:
    """One run. Its methods return at once; reading happens in a thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.predicted = folder, page_predictions()
        self._lock = threading.Lock()
        self._snapshot = Snapshot(name=name, folder=folder)
        self._seen: tuple[object, ...] = ()
        self._explained: RecordedRun | None = None
        self._wanted = self._reading = False
        self._not_before = 0.0
        self._looked = threading.Event()  # there is a first picture, or none that soon

    @property
    def snapshot(self) -> Snapshot:
        """The newest."""
        return self._snapshot

    def look(self, *, all_of_it: bool = False) -> Snapshot:
        """Begin to read if there is something new, or if all of it is wanted for the first time."""
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
        """Look, and wait a moment for what can be drawn at once."""
        self.look()
        self._looked.wait(MOMENT)
        return self._snapshot

    def read(self, *, all_of_it: bool = True) -> Snapshot:
        """Read here and now."""
        self._wanted, self._seen, self._reading = all_of_it, signature(self.folder), True
        self._read(True)
        return self._snapshot

    def _lacks(self) -> bool:
        """Whether the second reading is wanted and was not done."""
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
        """Whether more is wanted than was seen at a glance."""
        now = self._snapshot
        return self._wanted and now.run is None and now.glance is not None and not now.problem

    def _glance(self) -> bool:
        """What can be drawn at once; whether there is anything."""
        found = glance(self.folder)
        if found:
            self._change(glance=found[0], grid=found[1], doing="", live=is_live(self.folder))
        return found is not None

    def _first(self) -> None:
        """What was found before stays until the new is there."""
        said: list[str] = []
        try:
            found = live_hang(self.folder, live=is_live(self.folder))
            hang = found and (found.verdict, found.evidence)
        except PlaitError as error:
            hang = None
            said.append(str(error))
        now = self._snapshot
        # A run that hung in its first step has no timeline, and yet there is much to see.
        self._change(
            hang=hang, errors=last_errors(self.folder), said=tuple(said), live=is_live(self.folder),
            grid=planned_grid(self.folder) if now.grid is None else now.grid,
        )  # fmt: skip
        whole = self._wanted and (now.glance is None or now.run is not None)
        self._change(doing="reading all spans" if whole else "reading the sums of all steps")
        run = read_run(self.folder, spans=whole)
        self._change(
            run=run, problem="", whole=whole or not run.recording.spans.is_empty(), doing="",
            clocks=aligned(run.recording), grid=run.recording.grid,
        )  # fmt: skip

    def _second(self) -> None:
        run = self._snapshot.run
        if run is None or not self._snapshot.whole:
            self._change(doing="reading all spans")
            run = read_run(self.folder)
        self._change(run=run, whole=True, doing="diagnosing", clocks=aligned(run.recording))
        self._explained = run
        self._change(told=report_of(run), doing="")

    def _change(self, **values: Any) -> None:
        """A new snapshot, of a new generation if it shows something else."""
        same = values.keys() <= {"doing", "live"}
        self._snapshot = replace(self._snapshot, generation=self._snapshot.generation + (not same), **values)


def watch(folders: Sequence[Path]) -> list[Watched]:
    """These runs, under names that tell them apart."""
    return [Watched(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; more of it where that is not enough to tell them apart."""
    paths = [folder.absolute() for folder in folders]
    for parts in range(1, 4):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def chosen_run(runs: Sequence[Watched], number: object) -> Snapshot:
    """The run of this number; the first, whatever else a request says."""
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(runs):
        return runs[number].snapshot
    return runs[0].snapshot


# ---- what a folder says ----


def planned_grid(folder: Path) -> pl.DataFrame | None:
    """Where ranks stand, by the run's plan."""
    try:
        return grid_of(Plan.read(folder / "plan.json").layout)
    except PlaitError:
        return None


def signature(folder: Path) -> tuple[object, ...]:
    """Equal as long as nothing has changed that is read: times of small files and of the timeline's
    folders, whose files appear whole."""
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
    """Whether somebody holds the run's lock, as far as a file can tell."""
    try:
        return time.time() - (folder / "lock.json").stat().st_mtime < 60
    except OSError:
        return False


TAIL = 4096
"""Bytes of a log in which a rank's last words are looked for."""
MOST = 2048
"""Logs that are looked at."""


def last_errors(folder: Path) -> dict[int, str]:
    """What ranks said in the end, by their logs: the last line of a traceback. Nothing of a run that came to
    its end afterwards. Logs that are links are not followed."""
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
