"""Shared reading of nccl-tests and rccl-tests results: ranks, samples and the network profile made
of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.core.cluster.profile import CollectiveKind, Curve, Group, Machine, Point, Profile

TESTS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send",
}
"""Plait's kind of collective by the nccl-tests name; only collectives that Plait uses."""
UNUSED_TESTS = ("reduce", "gather", "scatter", "hypercube", "alltoallv", "bisection")
"""nccl-tests names of collectives that Plait does not use."""
MOST_ROWS, MOST_RANKS = 50_000, 200_000
"""The largest numbers of rows and of ranks that a file may have."""
WRONG = "rows whose results are wrong"
NO_END = "missing end(s) of tables, whose rows are taken"
CANNOT = "row(s) whose size, count, time and bandwidth contradict each other"
NO_BYTES = "rows of 0 bytes, which is less than one element a rank"
FAILED = "row(s) of a table that FAILED without saying which"
OUT, IN = "time", "time in place"
"""Names of a row's measurements: out of place (from one buffer to another) and in place."""


WIDTHS = {"int8": 1, "uint8": 1, "char": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "f8e4m3": 1, "f8e5m2": 1, "half": 2,
          "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "double": 8,
          "float64": 8, "int64": 8, "uint64": 8}  # fmt: skip
"""Bytes per element by the data type's name in the tests' output."""


class Measurement(NamedTuple):
    """Time and bandwidth that one row of a table reports, out of place or in place. of_processor:
    True if the time was measured on the CPU. wrong: the number of wrong elements, as printed in the
    file."""

    time: Any
    bandwidth: Any
    wrong: Any
    of_processor: bool = False


@dataclass
class Runs:
    """The contents of one file as read so far.

    over: ignored input, counted by reason. ranks: host names by group and rank. per_second: how
    many of the file's time units make one second. pending: rows of the table being read: test, size
    in bytes, seconds and position. marked: whether a row of this table had wrong results. samples:
    seconds by test, group, ranks per node and size in bytes of the whole tensor."""

    file: str
    over: IgnoredInput
    count: int = 0
    device: str = ""
    ranks: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    per_second: float = 1e6
    pending: list[tuple[str, int, float, str]] = field(default_factory=list[tuple[str, int, float, str]])
    marked: bool = False
    versions: dict[str, str] = field(default_factory=dict[str, str])
    samples: dict[tuple[str, Group, int], dict[int, list[float]]] = field(
        default_factory=dict[tuple[str, Group, int], dict[int, list[float]]]
    )

    def refuse(self, problem: str, where: str, fix: str) -> JobError:
        """Return the error for a line or key of the file."""
        return JobError(problem, file=self.file, key=where, fix=fix)

    def add(self, test: str, ranks: tuple[Group, int], size: int, seconds: float) -> None:
        """Add one measured time in seconds to the samples. size: bytes as the test prints them; for
        an all-to-all, the bytes of one rank."""
        group, per_node = ranks
        whole = size * group.ranks if test == "alltoall" else size
        self.samples.setdefault((test, group, per_node), {}).setdefault(whole, []).append(seconds)

    def rank(self, group: int, rank: int, host: str, device: str, where: str, many: int = 1) -> None:
        """Record a line that names a rank, the first of ``many`` ranks of its process. Raises
        JobError if the rank was named before, or if there are more than ``MOST_RANKS``."""
        members = self.ranks.setdefault(group, {})
        if rank in members:
            fix = "Build nccl-tests with MPI=1, so that its processes are one job"
            raise self.refuse(f"rank {rank} is listed twice", where, fix)
        members.update(dict.fromkeys(range(rank, rank + many), host))
        if len(members) > MOST_RANKS:
            raise self.refuse(f"more than {MOST_RANKS} ranks", where, "Keep those of one run")
        self.device = self.device or device

    def seconds(self, test: str, size: int, halves: Mapping[str, Measurement], where: str) -> float | None:
        """Return a row's time in seconds, or None for an ignored row, which is noted. halves:
        measurements by ``OUT`` and ``IN``. Raises JobError for impossible times and for more than
        ``MOST_ROWS`` rows."""
        self.count += 1
        if self.count > MOST_ROWS:
            raise self.refuse(f"more than {MOST_ROWS} rows", where, "Keep those that are to be used")
        if self.ignores(test, size, where):
            return None
        if any(_is_wrong(half.wrong) for half in halves.values()):
            self.marked = True
            self.over.note(WRONG, where)
            return None
        # Training runs all-reduce in place, and every other collective out of place.
        order = (IN, OUT) if test == "all_reduce" else (OUT, IN)
        half = next((halves[name] for name in order if name in halves), None)
        if half is None:
            raise self.refuse("has no time", where, "Give a whole table: size ... time algbw busbw")
        if half.of_processor:
            raise self.refuse("has the processor's times, not the collective's", where, "Run the test without -C 1")
        seconds = positive(half.time, self.file, where) / self.per_second
        cannot = contradicts(size, seconds, half.bandwidth)
        self.over.note(CANNOT, where, cannot)
        return None if cannot else seconds

    def close(self, where: str, *, failed: bool) -> None:
        """Add the rows of the table to the samples, unless the table failed without marking the
        wrong rows."""
        if failed and not self.marked:
            self.over.note(FAILED, where, len(self.pending))
        elif self.pending:
            ranks = group_of(self, self.pending[0][3])
            for test, size, seconds, _ in self.pending:
                self.add(test, ranks, size, seconds)
        self.pending.clear()
        self.marked = False

    def ignores(self, test: str, size: int, where: str) -> bool:
        """True if the row is ignored, which is noted. Raises JobError if the row's collective is
        unknown."""
        if test in TESTS:
            self.over.note(NO_BYTES, where, not size)
            return not size
        if not test:
            fix = "Keep the lines above the table, or put all_reduce or the like into the file's name"
            raise self.refuse("the collective is unknown: neither the log nor the file name names its test", where, fix)
        self.over.note(f"rows of {test}_perf, which no plan uses", where)
        return True

    def profile(self, date: str, tool: str) -> Profile:
        """Return the profile of the samples. date: the file's, because its text has none. Raises
        JobError if there is no sample."""
        if not self.samples:
            lost = "; ".join(self.over.lines())
            raise JobError(
                f"has no table of {tool} that can be used{': ' + lost if lost else ''}", file=self.file,
                fix=f"Give what one of these prints: {', '.join(f'{test}_perf' for test in TESTS)}",
            )  # fmt: skip
        source = f"{tool}, {Path(self.file).name}"
        curves = tuple(
            Curve(kind=TESTS[test], group=group, points=points_of(found), source=source)
            for (test, group, _), found in self.samples.items()
        )
        groups = [(group, per_node) for _, group, per_node in self.samples]
        machine = Machine(
            device=self.device,
            kind="cuda",
            ranks=max(group.ranks * group.at_once for group, _ in groups),
            ranks_per_node=max(per_node for _, per_node in groups),
            backend="nccl",
        )
        return Profile(machine=machine, date=date, versions=self.versions, collectives=curves)


def contradicts(size: int, seconds: float, bandwidth: Any) -> bool:
    """True if a row's bandwidth (``algbw``, GB/s) is below a quarter of, or above four times, its
    size divided by its time. A bandwidth that is no number above 0, or that differs by rounding
    alone, does not contradict.

    >>> contradicts(1_000_000, 1e-3, 1.0), contradicts(1_000_000, 1.0, 1.0), contradicts(8, 1e-5, 0.0)
    (False, True, False)
    """
    try:
        told = float(bandwidth)
    except (TypeError, ValueError, OverflowError):
        return False
    real, claimed = size / 1e9, told * seconds
    return 0 < told < math.inf and abs(claimed - real) > 0.01 * seconds and not real / 4 <= claimed <= real * 4


def points_of(samples: Mapping[int, Sequence[float]]) -> tuple[Point, ...]:
    """Return the median seconds of each size, by growing size. samples: seconds by size in
    bytes."""
    return tuple(Point(bytes=size, seconds=median(samples[size])) for size in sorted(samples))


def version_of(code: int) -> str:
    """Return the version of NCCL as text, for its number.

    >>> version_of(22803)
    '2.28.3'
    """
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _is_wrong(count: Any) -> bool:
    """True if a row's count of wrong elements is not 0: ``2e+06`` or ``nan``; not ``N/A``, which
    means unchecked."""
    if count in (None, "N/A", "n/a", ""):
        return False
    try:
        return float(str(count).rstrip("*")) != 0
    except ValueError:
        return True


def group_of(runs: Runs, where: str) -> tuple[Group, int]:
    """Return (process group, ranks per node) of the ranks that a run of the tests names. Raises
    JobError if ranks are missing."""
    ranks = runs.ranks
    members = next(iter(ranks.values()), dict[int, str]())
    if len(members) < 2:
        fix = "Keep the lines '#  Rank  0 ...' of a run of at least 2 ranks"
        raise runs.refuse(f"{len(members)} ranks are named above this table", where, fix)
    gap = next((number for number, rank in enumerate(sorted(members)) if number != rank), None)
    if gap is not None:
        fix = "Give the whole log: without all ranks the group is unknown"
        raise runs.refuse(f"of {max(members) + 1} ranks above this table rank {gap} is missing", where, fix)
    everybody = [host for each in ranks.values() for host in each.values()]
    hosts = [members[rank] for rank in sorted(members)]
    per_node = max(Counter(everybody).values())
    counts = Counter(hosts)
    together = max(counts.values())
    fewer = sum(count < together for count in counts.values())
    runs.over.note(f"node(s) of fewer than {together} ranks, which the largest one stands for", where, fewer)
    # The groups of a split run interleave among the ranks of a node.
    stride = max(1, per_node // together) if len(counts) > 1 else 1
    group = Group(ranks=len(hosts), per_node=together, nodes=len(counts), stride=stride, at_once=len(ranks))
    return group, per_node


def positive(raw: Any, file: str, where: str) -> float:
    """Return a number above 0. Raises JobError for anything else, also for text."""
    value = raw if isinstance(raw, (int, float)) and not isinstance(raw, bool) else math.nan
    try:
        value = float(value)
    except OverflowError:
        value = math.nan
    if not 0 < value < math.inf:
        raise JobError(f"{shown(raw)} is not allowed", file=file, key=where, fix="Allowed: a number above 0")
    return value
