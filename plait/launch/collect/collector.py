"""The agent that collects what the ranks of a host record.

    python -m plait.launch.collect.collector RUN_FOLDER FIRST_RANK RANKS COLLECTED

The agent reads the ranks' rings from outside: a rank that is killed, or holds the interpreter's
lock for ever, loses nothing that it recorded. Whole steps go into the timeline's files and live
metrics for Prometheus; rank 0's metrics go to loggers. The agent stops when its standard input,
held by its starter, is closed; then it waits for the ranks to end and collects the remaining
records. A full disk costs the timeline, and is reported once; no failure here ends the run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

from plait.core.base.errors import DataError, PlaitError
from plait.core.base.files import replacing
from plait.core.base.process import process_since
from plait.core.job.collecting import CollectorSettings
from plait.core.record.records import Records
from plait.core.record.ring import UNSET, read_ring
from plait.core.record.ring_follower import RingFollower
from plait.core.record.ring_progress import read_headers
from plait.core.runs.attempts import Epoch
from plait.core.runs.evidence import RINGS, ring_path
from plait.core.runs.host_memory import sweep_memory
from plait.core.runs.progress import Missing
from plait.launch.collect.metrics import Live, Loggers, MetricsTail
from plait.launch.collect.timeline_files import MAX_WAITING_RECORDS, Journal, Sums
from plait.launch.health.nodes import make_room

LOOK = 10.0
"""Seconds between two reads of the rings, at most: each read has a fixed cost, however little is
new."""
SOON = 1.0
"""Seconds between two reads of the rings, at most, with live metrics or loggers; also the initial
assumption of a step's length."""
QUICK = 0.05
"""Seconds between two reads of the rings, at least. They are so frequent that a read finds at most
a quarter of a ring new."""
FLUSH = 10.0
"""Seconds between two writes of new records, at least; longer if writing would take more than
``SHARE`` of the host's CPU time."""
SHARE = 0.0005
MANY = 64
"""The largest number of rings that are all read to compare hosts' clocks; above it, one ring per
host is read."""
GRACE = 5.0
"""Seconds to wait for ranks that still run after the launcher has ended; they end soon after it."""


class RankFiles:
    """A rank's ring, and the journal of spans that is written from it."""

    def __init__(self, ring: RingFollower, sums: Sums | None, run: CollectorSettings) -> None:
        self.ring, self.sums = ring, sums
        self.journal: Journal | None = None
        if sums:
            self.journal = Journal(
                sums.timeline, ring.header, keep_steps=run.timeline_steps, sample=run.timeline_sample
            )
        self._taken = sums.written(ring.header) if sums else -1
        self._begun = self._taken >= 0
        self.over = self.ended  # True for a ring of an earlier start: its records are written, but not published live

    def look(self, live: Live | None, *, last: bool = False) -> int:
        """Read new records of the ring, and pass on whole steps up to the one before the last
        finished step; return the number of new records. What a rank does between two steps, such as
        saving, belongs to the step before. last: pass on everything."""
        fresh = self.ring.advance()
        if self.ring.header.step == UNSET:  # the rank still measures what its plan leaves open, and has begun no step
            self.ring.keep(self.ring.header.capacity)
            return fresh
        steps = self.ring.steps
        if not self._begun and (steps or last):  # records from before the first step belong to no step
            self._taken = (steps[0] if steps else max(self.ring.header.step, 0)) - 1
            self._begun = True
        until = max([*steps, self.ring.header.step], default=-1) if last else (steps[-2] if len(steps) > 1 else -1)
        if until > self._taken:
            rows = self.ring.take(self._taken + 1, until)
            self._taken = until
            records = Records(rows, self.ring.names, self.ring.groups)
            if self.journal and self.sums and len(rows):
                self.journal.ring = self.ring.header  # the rank's plan may have changed
                self.journal.add(records)
                self.sums.add(self.ring.header, records)
            if live and not self.over:
                live.add(self.ring.header, records)
        if live and not self.over:
            live.at(self.ring.header, self.ring.lost)
        return fresh

    @property
    def ended(self) -> bool:
        """True if no process writes the ring any more."""
        header = self.ring.header
        return bool(header.closed) or process_since(header.pid, header.process_started) is None


class Collector:
    """Collector of what ranks ``first`` to ``first + count - 1`` of the run in ``folder`` write
    into their rings."""

    def __init__(
        self, folder: Path, first: int, count: int, run: CollectorSettings, *, live: Live | None = None,
        loggers: Loggers | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.run, self.live, self.loggers = folder, run, live, loggers
        self._epoch = Epoch.mine(folder)
        self._tail = MetricsTail(folder / "metrics.jsonl") if first == 0 and (live or loggers) else None
        self.missing = Missing("the timeline", say)
        self._ranks: dict[int, RankFiles] = {}
        ranks = range(first, first + count)
        self._wanted = ranks if run.timeline_steps or live else range(0)
        self._sums = Sums(folder / "timeline", ranks) if run.timeline_steps else None
        self._told: set[str] = set()
        self._flushed = self._looked = time.monotonic()
        self._pause, self._rate = FLUSH, 0.25 / SOON  # rate: share of a ring that is written per second

    def look(self) -> float:
        """Collect the new records of every rank; return the seconds to wait before the next
        call."""
        if self._epoch.over:  # the rings and files belong to another attempt
            return LOOK
        start, share = time.monotonic(), 0.0
        for rank in self._wanted:
            if (found := self._open(rank)) is not None:
                share = max(share, self._tried(found, last=False) / found.ring.header.capacity)
        waiting = max((found.journal.waiting for found in self._ranks.values() if found.journal), default=0)
        if time.monotonic() - self._flushed > self._pause or waiting > MAX_WAITING_RECORDS // 2:
            self.flush()
        self._pass_on()
        self._rate = max(share / max(start - self._looked, QUICK), 0.9 * self._rate)
        self._looked = start
        longest = SOON if self.live or self.loggers else LOOK
        return max(QUICK, min(longest, 0.25 / max(self._rate, 1e-9)) - (time.monotonic() - start))

    def flush(self, *, last: bool = False) -> None:
        """Write the collected records to files, unless another attempt of the run has begun. last:
        write even incomplete parts."""
        if self._epoch.over:
            return
        if self._sums:
            import_module("pyarrow.parquet")  # imported before the clock starts: a one-time cost
        start, cost = time.monotonic(), time.process_time()
        journals = [found.journal for found in self._ranks.values() if found.journal]
        errors = [error for one in journals if (error := one.flush())]
        # After the spans of the same steps: a successor of this agent continues where the sums end.
        if self._sums and (error := self._sums.flush(last=last, write=not errors)):
            errors = [error]
        if errors:
            self.missing.failed(errors[0], 0)
        elif journals:
            self.missing.worked()
        self._pause = max(FLUSH, (time.process_time() - cost) / SHARE / (os.cpu_count() or 1))
        self._flushed = start

    def finish(self) -> None:
        """Wait for the ranks to end, and collect their last records."""
        deadline = time.monotonic() + GRACE
        if self._epoch.over:
            return
        self.look()
        while time.monotonic() < deadline and not all(found.ended for found in self._ranks.values()):
            time.sleep(0.02)
            for found in self._ranks.values():
                with suppress(DataError):
                    found.ring.advance()
        for rank in self._wanted:
            if (found := self._open(rank)) is not None:
                self._tried(found, last=True)
        self.flush(last=True)
        self._compare_clocks()
        self._pass_on()
        if self.loggers:
            self.loggers.close()
        keepers = [found.journal for found in self._ranks.values() if found.journal]
        lost = max(one.lost for one in (*keepers, self._sums)) if self._sums else 0
        records = sum(found.ring.lost for found in self._ranks.values())
        if lost:
            say(f"warning: the timeline misses {lost} steps, which could not be written to the disk in time")
        if records:
            say(f"warning: the timeline misses {records} records, which were overwritten before they were read")

    def _open(self, rank: int) -> RankFiles | None:
        """Return the files of a rank, opened anew; None if the rank has no new ring. After a
        restart of the rank, first take what the old ring holds."""
        known, path = self._ranks.get(rank), ring_path(self.folder, rank)
        if known and known.ring.replaced:
            self._tried(known, last=True)
            if known.journal and (error := known.journal.flush()):
                self.missing.failed(error, 0)
            known.ring.close()
            del self._ranks[rank]
        if rank not in self._ranks and path.is_file():
            try:
                self._ranks[rank] = RankFiles(RingFollower(path), self._sums, self.run)
            except DataError as error:
                self._warn_once(str(error))
        return self._ranks.get(rank)

    def _compare_clocks(self) -> None:
        """Compare the clocks of all hosts, if there are several, from one ring of each. Only the
        agent of rank 0 does so."""
        from plait.core.record.clocks import FILE, aligned

        headers, _ = read_headers(self.folder / RINGS)
        hosts = {header.boot or header.host: rank for rank, header in sorted(headers.items(), reverse=True)}
        if 0 not in self._ranks or not self.run.timeline_steps or len(hosts) < 2:
            return
        try:
            rings = [read_ring(ring_path(self.folder, rank)) for rank in headers if len(headers) <= MANY]
            clocks = aligned(rings or [read_ring(ring_path(self.folder, rank)) for rank in hosts.values()])
            with replacing(self.folder / "timeline" / FILE, parents=False) as path:
                path.write_text(json.dumps(clocks.to_dict()) + "\n")
        except (DataError, OSError) as error:
            self._warn_once(str(error))

    def _pass_on(self) -> None:
        """Pass new lines of rank 0's ``metrics.jsonl`` to live metrics and loggers."""
        for line in self._tail.lines() if self._tail else ():
            if self.live:
                self.live.measured(line)
            if self.loggers:
                self.loggers.add(line)

    def _tried(self, rank: RankFiles, *, last: bool) -> int:
        try:
            return rank.look(self.live, last=last)
        except (DataError, OSError) as error:
            self._warn_once(str(error))
            return 0

    def _warn_once(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            say(f"warning: {problem}")


def say(text: str) -> None:
    """Print a message for the user on stderr, which may be closed."""
    with suppress(OSError):
        print(f"plait: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect until standard input ends; return the exit status."""
    folder, first, count, collected = (arguments or sys.argv[1:])[:4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the starter decides when the agent ends
    os.nice(10)
    run = CollectorSettings.from_json(collected)
    with ExitStack() as held:
        try:
            make_room(2 * int(count), f"The records of {count} ranks")
            live, loggers = _outputs(Path(folder), run, held, loggers=first == "0")
        except PlaitError as error:
            say(str(error))
            return error.exit_status
        collector = Collector(Path(folder), int(first), int(count), run, live=live, loggers=loggers)
        pause = 0.0
        while not select.select([sys.stdin], [], [], pause)[0] or os.read(sys.stdin.fileno(), 4096):
            pause = collector.look()
        collector.finish()
    sweep_memory()  # its starter may have been killed, and nothing else sweeps before the next run
    return 0


def _outputs(
    folder: Path, run: CollectorSettings, held: ExitStack, *, loggers: bool
) -> tuple[Live | None, Loggers | None]:
    """Return the live metrics and the loggers to feed. The plan is read for these alone. Raises
    PlaitError if one cannot be set up."""
    if not run.metrics_port and not (run.loggers and loggers):
        return None, None
    from plait.core.job.plan import Plan

    plan = Plan.read(folder / "plan.json")
    live = Live(folder, plan) if run.metrics_port else None
    if live:
        held.callback(live.serve(run.metrics_port, run.metrics_address, say))
    return live, Loggers(run.loggers, folder, plan, say) if run.loggers and loggers else None


if __name__ == "__main__":
    sys.exit(main())
