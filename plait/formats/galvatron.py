"""Reader of Galvatron's measurements (https://github.com/PKU-DAIR/Hetu-Galvatron), by file name.

===========  =====================================================================================
read         ``allreduce_bandwidth_*nodes_*gpus_per_node.json`` and ``p2p_bandwidth_...`` (GB/s),
             ``sp_time_...`` (milliseconds by MiB)
ignored      nothing
refused      ``overlap_coefficient.json`` (one factor instead of two), other keys, values that are
             no numbers above 0, a name without numbers of nodes and GPUs
===========  =====================================================================================
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import is_table
from plait.core.base.errors import JobError
from plait.core.cluster.profile import CollectiveKind, Curve, Group, Machine, Profile, wire_share
from plait.formats.base.collective_runs import points_of, positive

GALVATRON_BYTES = 1 << 27
"""The message size in bytes of Galvatron's one bandwidth, by default an average over messages of 16
to 512 MiB."""
MOST_KEYS = 10_000
_SHAPE = re.compile(r"(\d{1,6})nodes_(\d{1,6})gpus_per_node")
_ALL_REDUCE = re.compile(r"allreduce_size_(\d{1,9})_consec_([01])")
_SEND = re.compile(r"pp_size_(\d{1,9})")
_TIME = re.compile(r"(allreduce|all2all)_size_(\d{1,9})_(\d{1,9})MB_time")


def galvatron(values: Any, file: str, date: str) -> Profile:
    """Return the profile of a Galvatron file, whose name has the numbers of nodes and GPUs. Raises
    JobError for keys and values that Galvatron does not write."""
    if not is_table(values) or not values:
        raise JobError("is neither a profile nor one of Galvatron's files", file=file)
    if len(values) > MOST_KEYS:
        raise JobError(f"has {len(values)} keys; at most {MOST_KEYS} are read", file=file)
    if set(values) == {"overlap_coe"}:
        fix = "Measure it: plait measure machine. The factors of both sides are wanted, and Galvatron has one for both"
        raise JobError("does not say on which ranks it was measured", file=file, key="overlap_coe", fix=fix)
    shape = _SHAPE.search(Path(file).name)
    if not shape:
        fix = "Keep Galvatron's own name, such as allreduce_bandwidth_2nodes_8gpus_per_node.json"
        raise JobError("the name does not say how many nodes and GPUs there are", file=file, fix=fix)
    nodes, per_node = int(shape[1]), int(shape[2])
    found: dict[tuple[CollectiveKind, Group], dict[int, float]] = {}
    for key, told in values.items():
        kind, group, size, seconds = _entry(key, told, file, nodes * per_node, per_node)
        found.setdefault((kind, group), {})[size] = seconds
    curves = tuple(
        Curve(
            kind=kind,
            group=group,
            points=points_of({size: [seconds] for size, seconds in points.items()}),
            source=f"Galvatron, {Path(file).name}",
        )
        for (kind, group), points in found.items()
    )
    machine = Machine(kind="cuda", ranks=nodes * per_node, ranks_per_node=per_node, backend="nccl")
    return Profile(machine=machine, date=date, collectives=curves)


def _entry(key: str, value: Any, file: str, world: int, per_node: int) -> tuple[CollectiveKind, Group, int, float]:
    """Return (kind, process group, bytes, seconds) of one measurement. Raises JobError for a key or
    value that Galvatron does not write."""
    number = positive(value, file, key)
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
    """Return a group of ranks that are ``stride`` apart. Galvatron measures one group after the
    other."""
    if not 2 <= ranks <= world or stride < 1 or world % ranks:
        fix = "A group has at least 2 ranks, and its size divides the number of all"
        raise JobError(f"{ranks} of {world} ranks are no group", file=file, key=key, fix=fix)
    return Group.of(range(0, ranks * stride, stride), per_node)
