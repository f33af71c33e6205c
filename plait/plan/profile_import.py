"""Profiles from what other tools have measured, so that nobody measures a cluster twice.

nccl-tests and rccl-tests (https://github.com/NVIDIA/nccl-tests): what ``all_reduce_perf`` and its sisters
print. Ranks, devices and hosts stand in comment lines, sizes in a table. Galvatron
(https://github.com/PKU-DAIR/Hetu-Galvatron): ``allreduce_bandwidth_*nodes_*gpus_per_node.json``,
``p2p_bandwidth_...``, ``sp_time_...`` and ``overlap_coefficient.json``. Plait's own profiles are read too, so
that all may be joined.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

from plait.core.errors import JobError
from plait.core.files import contents
from plait.core.numbers import shown
from plait.core.profile import CollectiveKind, Curve, Group, Machine, Point, Profile, joined, wire_share

TESTS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send",
}
"""nccl-tests' names of what Plait uses."""
OTHERS = ("reduce", "gather", "scatter", "hypercube")
"""Its tests of what Plait does not use."""
GALVATRON_BYTES = 1 << 27
"""Galvatron's files give one bandwidth, the average over messages of 16 to 512 MiB unless told otherwise."""
_TEST = re.compile(rf"(?<![a-z_])({'|'.join((*TESTS, *OTHERS))})_perf")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^]]*\]\s*(.*)")
_OUTPUT = re.compile(r"^.*<std(?:out|err)>:|^\s*(?:>|\[\d+\])\s+")
"""What mpirun, a quotation or ``plait lab run`` put before a line."""
_VERSION = re.compile(r"NCCL version (\d[\w.]*)")
_SHAPE = re.compile(r"(\d+)nodes_(\d+)gpus_per_node")
_ALL_REDUCE = re.compile(r"allreduce_size_(\d+)_consec_([01])")
_SEND = re.compile(r"pp_size_(\d+)")
_TIME = re.compile(r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time")


def import_profiles(files: Sequence[Path]) -> Profile:
    """One profile of all files. Raises JobError naming the file and what of it cannot be used."""
    return joined([import_profile(file) for file in files])


def import_profile(file: Path) -> Profile:
    """The profile of one file, whatever wrote it."""
    try:
        text = contents(file).decode()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {error}", file=str(file)) from None
    date = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).date().isoformat()
    try:
        if not text.lstrip().startswith("{"):
            return nccl_tests(text, str(file), date)
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise JobError(f"is no JSON, or only a part of it: {error}", file=str(file)) from None
        return Profile.from_json(text, str(file)) if "version" in values else galvatron(values, str(file), date)
    except (ValueError, OverflowError) as error:  # thousands of digits, times that vanish, sizes beyond all memory
        told = " ".join(line.strip() for line in str(error).partition(" [type")[0].splitlines()[-2:])
        raise JobError(f"has a number that cannot be: {told}", file=str(file)) from None


# ---- nccl-tests ----


@dataclass
class _Log:
    """What has been read of a log. ranks: host by group and rank. points: samples in seconds by test and
    size."""

    file: str
    test: str = ""
    columns: tuple[str, ...] = ()
    ranks: dict[int, dict[int, str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, Group, int], dict[int, list[float]]] = field(default_factory=dict)


def nccl_tests(text: str, file: str, date: str) -> Profile:
    """The profile of a log, which may hold several tests one after the other. date: of the log, which does
    not say itself.

    Raises JobError for a log without a table, without ranks, or with numbers that cannot be.
    """
    log = _Log(file)
    if found := _TEST.search(Path(file).name) or re.search(r"(" + "|".join(TESTS) + ")", Path(file).name):
        log.test = found[1]
    for number, line in enumerate(text.splitlines(), 1):
        _line(log, _OUTPUT.sub("", line), f"line {number}")
    if not log.samples:
        raise JobError(
            "has no table of nccl-tests that can be used", file=file,
            fix=f"Give what one of these prints: {', '.join(f'{test}_perf' for test in TESTS)}",
        )  # fmt: skip
    curves = tuple(
        Curve(kind=TESTS[test], group=group, points=_points(found), source=f"nccl-tests, {Path(file).name}")
        for (test, group, _), found in log.samples.items()
    )
    groups = [(group, per_node) for _, group, per_node in log.samples]
    machine = Machine(
        device=log.devices[0] if log.devices else "",
        kind="cuda",
        ranks=max(group.ranks * group.at_once for group, _ in groups),
        ranks_per_node=max(per_node for _, per_node in groups),
        backend="nccl",
    )
    return Profile(machine=machine, date=date, versions=log.versions, collectives=curves)


def _line(log: _Log, line: str, where: str) -> None:
    if found := _RANK.match(line.strip()):
        if log.columns:  # a table ended before: this is another run
            log.ranks.clear()
            log.columns = ()
        _rank(log, int(found[1]), int(found[2] or 0), found[3], found[4].strip(), where)
        return
    if "Using devices" in line:
        log.ranks.clear()
    if test := _TEST.search(line):
        log.test = test[1]
    if version := _VERSION.search(line):
        log.versions["nccl"] = version[1]
    words = line.split()
    if words[:2] == ["#", "size"]:
        log.columns = tuple(words[1:])
    elif log.columns and all(word.isascii() and word.isdigit() for word in words[:2]) and words:  # size, count
        if len(words) < len(log.columns):
            problem = f"has {len(words)} of the table's {len(log.columns)} columns: the log was cut here"
            raise JobError(problem, file=log.file, key=where, fix="Give the whole log, or delete this line")
        if len(words) == len(log.columns):
            _row(log, dict(zip(_numbered(log.columns), words, strict=True)), where)


def _rank(log: _Log, rank: int, group: int, host: str, device: str, where: str) -> None:
    members = log.ranks.setdefault(group, {})
    if rank in members:
        raise JobError(
            f"rank {rank} stands here a second time", file=log.file, key=where,
            fix="Build nccl-tests with MPI=1, so that its processes are one job",
        )  # fmt: skip
    members[rank] = host
    if device and device not in log.devices:
        log.devices.append(device)


def _numbered(columns: Sequence[str]) -> Iterator[str]:
    """Out of place comes first, then the same columns in place."""
    seen: set[str] = set()
    for column in columns:
        yield f"{column} in place" if column in seen else column
        seen.add(column)


def _row(log: _Log, row: Mapping[str, str], where: str) -> None:
    size = int(row["size"])
    if log.test in OTHERS or not size:  # a size that is less than a rank's share of it counts as nothing
        return
    if log.test not in TESTS:
        raise JobError(
            "nothing says which collective this is", file=log.file, key=where,
            fix="Keep the lines above the table, or put all_reduce or the like into the file's name",
        )  # fmt: skip
    # An all-reduce is done in place when models train, everything else from one buffer to another.
    preferred = ("time in place", "time") if log.test == "all_reduce" else ("time", "time in place")
    told = next((row[column] for column in preferred if row.get(column, "N/A") != "N/A"), None)
    if told is None:
        raise JobError("has no time", file=log.file, key=where, fix="Give a whole table: size ... time algbw busbw")
    seconds = _positive(told, log.file, where) / 1e6
    group, per_node = _group(log, where)
    whole = size * group.ranks if log.test == "alltoall" else size  # its size is one rank's
    log.samples.setdefault((log.test, group, per_node), {}).setdefault(whole, []).append(seconds)


def _group(log: _Log, where: str) -> tuple[Group, int]:
    """Of the ranks that the log names, and how many ranks a node has."""
    members = next(iter(log.ranks.values()), {})
    if len(members) < 2:
        raise JobError(
            f"{len(members)} ranks are named above this table", file=log.file, key=where,
            fix="Keep the lines '#  Rank  0 ...' of a run of at least 2 ranks",
        )  # fmt: skip
    everybody = [host for each in log.ranks.values() for host in each.values()]
    hosts = [members[rank] for rank in sorted(members)]
    per_node = max(everybody.count(host) for host in set(everybody))
    together = max(hosts.count(host) for host in set(hosts))
    # Groups of a split run take turns among the ranks of a node.
    stride = max(1, per_node // together) if len(set(hosts)) > 1 else 1
    shape = {"ranks": len(hosts), "per_node": together, "nodes": len(set(hosts))}
    return Group(**shape, stride=stride, at_once=len(log.ranks)), per_node


def _points(found: Mapping[int, Sequence[float]]) -> tuple[Point, ...]:
    return tuple(Point(bytes=size, seconds=median(found[size])) for size in sorted(found))


# ---- Galvatron ----


def galvatron(values: Any, file: str, date: str) -> Profile:
    """The profile of one of Galvatron's files, whose name says how many nodes and GPUs there are. Raises
    JobError for keys and values that it does not write."""
    if not isinstance(values, dict) or not values:
        raise JobError("is neither a profile nor one of Galvatron's files", file=file)
    if set(values) == {"overlap_coe"}:
        fix = "Measure it: plait profile. The factors of both sides are wanted, and Galvatron has one for both"
        raise JobError("says nothing of where it was measured", file=file, key="overlap_coe", fix=fix)
    shape = _SHAPE.search(Path(file).name)
    if not shape:
        fix = "Keep Galvatron's own name, such as allreduce_bandwidth_2nodes_8gpus_per_node.json"
        raise JobError("the name does not say how many nodes and GPUs there are", file=file, fix=fix)
    nodes, per_node = int(shape[1]), int(shape[2])
    found: dict[tuple[CollectiveKind, Group], dict[int, float]] = {}
    for key, told in cast("dict[str, Any]", values).items():
        kind, group, size, seconds = _entry(key, told, file, nodes * per_node, per_node)
        found.setdefault((kind, group), {})[size] = seconds
    curves = tuple(
        Curve(
            kind=kind,
            group=group,
            points=_points({size: [seconds] for size, seconds in points.items()}),
            source=f"Galvatron, {Path(file).name}",
        )
        for (kind, group), points in found.items()
    )
    machine = Machine(kind="cuda", ranks=nodes * per_node, ranks_per_node=per_node, backend="nccl")
    return Profile(machine=machine, date=date, collectives=curves)


def _entry(key: str, told: Any, file: str, world: int, per_node: int) -> tuple[CollectiveKind, Group, int, float]:
    """Kind, group, bytes and seconds of one line."""
    number = _positive(told, file, key)
    if match := _TIME.fullmatch(key):  # milliseconds, by a rank's MiB, of neighbouring ranks
        kind: CollectiveKind = "all_reduce" if match[1] == "allreduce" else "all_to_all"
        group = _spaced(int(match[2]), 1, world, per_node, file, key)
        size = (int(match[3]) << 20) * (group.ranks if kind == "all_to_all" else 1)
        return kind, group, size, number / 1e3
    if match := _ALL_REDUCE.fullmatch(key):
        kind, ranks, apart = "all_reduce", int(match[1]), match[2] == "0"
    elif match := _SEND.fullmatch(key):
        kind, ranks, apart = "send", int(match[1]), True
    else:
        known = "allreduce_size_N_consec_0 or _1, pp_size_N, allreduce_size_N_MMB_time, all2all_size_N_MMB_time"
        raise JobError("is no key of Galvatron's", file=file, key=key, fix=f"Known: {known}")
    group = _spaced(ranks, world // ranks if apart and ranks else 1, world, per_node, file, key)
    return kind, group, GALVATRON_BYTES, GALVATRON_BYTES * wire_share(kind, group.ranks) / (number * 1e9)


def _spaced(ranks: int, stride: int, world: int, per_node: int, file: str, key: str) -> Group:
    """So many ranks, ``stride`` apart; Galvatron measures one group after the other."""
    if not 2 <= ranks <= world or stride < 1 or world % ranks:
        fix = "A group has at least 2 ranks, and its size divides the number of all"
        raise JobError(f"{ranks} of {world} ranks are no group", file=file, key=key, fix=fix)
    return Group.of(range(0, ranks * stride, stride), per_node)


def _positive(told: Any, file: str, where: str) -> float:
    try:
        value = float(told) if not isinstance(told, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 < value < math.inf:
        raise JobError(f"{shown(told)} is not allowed", file=file, key=where, fix="Allowed: a number above 0")
    return value
