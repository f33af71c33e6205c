"""What files of nccl-tests and rccl-tests have in common: ranks, samples, and the profile of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import CollectiveKind, Curve, Group, Machine, Point, Profile

TESTS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send",
}
"""nccl-tests' names of what Plait uses."""
OTHERS = ("reduce", "gather", "scatter", "hypercube", "alltoallv", "bisection")
"""Its tests of what Plait does not use."""
MOST_ROWS, MOST_RANKS = 50_000, 200_000
"""Of a file."""
WRONG = "rows whose results are wrong"
NO_END = "missing end(s) of tables, whose rows are taken"
CANNOT = "row(s) of which size, count, time and bandwidth contradict each other"
NO_BYTES = "rows of 0 bytes, which is less than one element a rank"


WIDTHS = {"int8": 1, "uint8": 1, "char": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "f8e4m3": 1, "f8e5m2": 1, "half": 2,
          "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "double": 8,
          "float64": 8, "int64": 8, "uint64": 8}  # fmt: skip
"""Bytes of an element, by the names of types that the tests print."""


@dataclass
class Runs:
    """What has been read of a file. over: what was not taken. samples: seconds by test, group, ranks of a
    node and size in bytes of the whole tensor."""

    file: str
    over: PassedOver
    count: int = 0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    samples: dict[tuple[str, Group, int], dict[int, list[float]]] = field(
        default_factory=dict[tuple[str, Group, int], dict[int, list[float]]]
    )

    def refuse(self, problem: str, where: str, fix: str) -> JobError:
        """The error of a line or key."""
        return JobError(problem, file=self.file, key=where, fix=fix)

    def add(self, test: str, ranks: tuple[Group, int], size: int, seconds: float) -> None:
        """A sample. size: bytes as the test prints them. Of an all-to-all these are one rank's."""
        self.count += 1
        if self.count > MOST_ROWS:
            raise JobError(f"has more than {MOST_ROWS} rows", file=self.file, fix="Keep those that are to be used")
        group, per_node = ranks
        whole = size * group.ranks if test == "alltoall" else size
        self.samples.setdefault((test, group, per_node), {}).setdefault(whole, []).append(seconds)

    def contradict(self, size: int, seconds: float, bandwidth: Any, where: str) -> bool:
        """Whether a row contradicts itself (``contradicts``), which is noted."""
        cannot = contradicts(size, seconds, bandwidth)
        self.over.note(CANNOT, where, cannot)
        return cannot

    def passes_over(self, test: str, size: int, where: str) -> bool:
        """Whether a row is of no use, which is noted. Raises JobError where nobody names its test."""
        if test in TESTS:
            self.over.note(NO_BYTES, where, not size)
            return not size
        if not test:
            fix = "Keep the lines above the table, or put all_reduce or the like into the file's name"
            raise self.refuse("nothing says which collective this is", where, fix)
        self.over.note(f"rows of {test}_perf, which no plan uses", where)
        return True

    def profile(self, date: str, tool: str) -> Profile:
        """Raises JobError where nothing was taken. date: of the file, which does not say itself."""
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
    """Whether a row's bandwidth (``algbw``, GB/s) is below a quarter or above four times its size
    over its time. What is no number above 0 contradicts nothing, and neither does what was rounded away.

    >>> contradicts(1_000_000, 1e-3, 1.0), contradicts(1_000_000, 1.0, 1.0), contradicts(8, 1e-5, 0.0)
    (False, True, False)
    """
    try:
        told = float(bandwidth)
    except (TypeError, ValueError, OverflowError):
        return False
    real, claimed = size / 1e9, told * seconds
    return 0 < told < math.inf and abs(claimed - real) > 0.01 * seconds and not real / 4 <= claimed <= real * 4


def points_of(found: Mapping[int, Sequence[float]]) -> tuple[Point, ...]:
    """Of seconds by size: medians, by growing size."""
    return tuple(Point(bytes=size, seconds=median(found[size])) for size in sorted(found))


def group_of(ranks: Mapping[int, Mapping[int, str]], runs: Runs, where: str) -> tuple[Group, int]:
    """The ranks that a run names, and how many a node has. ranks: host by group and rank. Raises JobError
    where some are missing."""
    members = next(iter(ranks.values()), {})
    if len(members) < 2:
        fix = "Keep the lines '#  Rank  0 ...' of a run of at least 2 ranks"
        raise runs.refuse(f"{len(members)} ranks are named above this table", where, fix)
    gap = next((number for number, rank in enumerate(sorted(members)) if number != rank), None)
    if gap is not None:
        fix = "Give the whole log: without all ranks nobody knows the group"
        raise runs.refuse(f"of {max(members) + 1} ranks above this table rank {gap} is missing", where, fix)
    everybody = [host for each in ranks.values() for host in each.values()]
    hosts = [members[rank] for rank in sorted(members)]
    per_node = max(_counts(everybody).values())
    together = max(_counts(hosts).values())
    fewer = sum(count < together for count in _counts(hosts).values())
    runs.over.note(f"node(s) of fewer than {together} ranks, which the largest one stands for", where, fewer)
    # Groups of a split run take turns among the ranks of a node.
    stride = max(1, per_node // together) if len(set(hosts)) > 1 else 1
    shape = {"ranks": len(hosts), "per_node": together, "nodes": len(set(hosts))}
    return Group(**shape, stride=stride, at_once=len(ranks)), per_node


def _counts(hosts: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    return counts


def positive(told: Any, file: str, where: str) -> float:
    """A number above 0. Raises JobError for anything else, a text among them."""
    value = told if isinstance(told, (int, float)) and not isinstance(told, bool) else math.nan
    try:
        value = float(value)
    except OverflowError:
        value = math.nan
    if not 0 < value < math.inf:
        raise JobError(f"{shown(told)} is not allowed", file=file, key=where, fix="Allowed: a number above 0")
    return value
