"""Settings of a replayed queue as people write them, and the zones that placements have chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from plait.api.queueing import ClusterShape, JobShape, Planned, Replay
from plait.api.topologies import read_topology
from plait.core.base.codec.data import Count, Natural, NotNegative, Positive, Texts
from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.text import counted
from plait.core.job.place_settings import Weight
from plait.core.topology.rank_table import RankTable
from plait.place.readers import Remarks

TIME = re.compile(
    r"\+?(?:(?P<d>\d+(?:\.\d+)?)d)?(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?"
)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Settings of a replay as people write them: times such as ``1d12h``, ``90m``.

    nodes, gpus_per_node, minipod: of the cluster; the planned job is packed by minipods. reserve: planned
    jobs, each ``NODES@TIME`` after the replay's start. shape: PP groups times stages of each, ``150x8``,
    to place it when it is announced; alpha: weight of its DP groups; price: score of a node that another
    job leaves, 0: a share of a minipod. spares: nodes kept beside each. announce: how long before its
    arrival one is known. planned_for: how long it runs. zone: files of the nodes of placements, one a
    planned job. topology: which number these nodes have. policy: names with commas between them. overlay,
    load: copies of the trace, or the share of all GPUs that they ask for. window: how long jobs arrive.
    late: jobs still there when the planned one comes are preempted, or delay it. checkpoint, replan,
    level: as of a ``Replay``.
    """

    nodes: Count = 2000
    gpus_per_node: Count = 8
    minipod: Count = 50
    reserve: Texts = ()
    announce: str = "4h"
    planned_for: str = "12h"
    shape: Texts = ()
    alpha: Weight = 0.3
    price: NotNegative = 0.0
    spares: Natural = 0
    zone: Texts = ()
    topology: str = ""
    policy: str = "all"
    overlay: Positive | None = None
    load: Positive | None = None
    window: str | None = None
    late: Literal["preempt", "delay"] = "preempt"
    checkpoint: str = "1h"
    replan: str = "10m"
    level: float = 0.9

    def replay(self, remark: Callable[[Remarks], None]) -> Replay:
        """The replay that they ask for. remark: takes what is to be said of the topology. Raises JobError
        naming the setting."""
        window = None if self.window is None else _seconds("window", self.window, positive=True)
        return Replay(
            cluster=ClusterShape(nodes=self.nodes, gpus_per_node=self.gpus_per_node, minipod=self.minipod),
            planned=self._planned(remark), policies=self.policy, copies=self.overlay, load=self.load, window=window,
            delay_late=self.late == "delay", checkpoint=_seconds("checkpoint", self.checkpoint),
            replan=_seconds("replan", self.replan), level=self.level,
        )  # fmt: skip

    def _planned(self, remark: Callable[[Remarks], None]) -> list[Planned]:
        for key, noun in (("zone", "file"), ("shape", "shape")):
            given = getattr(self, key)
            if given and len(given) != len(self.reserve):
                problem = f"{counted(len(given), noun)} for {counted(len(self.reserve), 'planned job')}"
                raise JobError(problem, key=key, fix="Give one for each of reserve, or none")
        if self.zone and self.shape:
            raise JobError("a job whose zone is given is not placed", key="shape", fix="Leave out shape or zone")
        duration, notice = _seconds("planned_for", self.planned_for, positive=True), _seconds("announce", self.announce)
        places = places_in(self.topology, remark) if self.topology else {}
        found: list[Planned] = []
        for at, text in enumerate(self.reserve):
            count, sign, when = text.partition("@")
            if not sign or not count.strip().isdigit():
                raise JobError(f"'{text}' is no NODES@TIME", key="reserve", fix="Write for example 1200@+22h")
            zone = zone_of(Path(self.zone[at]), places, spares=self.spares > 0) if self.zone else None
            found.append(Planned(
                nodes=int(count), arrival=_seconds("reserve", when), notice=notice, duration=duration,
                spares=self.spares, shape=self._shape(self.shape[at]) if self.shape else None, zone=zone,
            ))  # fmt: skip
        return found

    def _shape(self, text: str) -> JobShape:
        found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip())
        if not found or not all(map(int, found.groups())):
            raise JobError(f"'{text}' is no ROWSxSTAGES", key="shape", fix="Write for example 150x8")
        return JobShape(rows=int(found[1]), columns=int(found[2]), alpha=self.alpha, price=self.price)


def _seconds(key: str, text: str, *, positive: bool = False) -> float:
    found = TIME.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise JobError(f"'{text}' is no time", key=key, fix="Write for example 4h, 90m or 1d12h")
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    seconds = sum(float(found[unit] or 0) * size for unit, size in units)
    if positive and not seconds:
        raise JobError(f"'{text}' is not allowed", key=key, fix="Allowed: more than 0s")
    return seconds


# ---- zones ----


def zone_of(file: Path, places: dict[str, int], *, spares: bool = False) -> list[int]:
    """The node numbers of a file: a JSON list of them, or of names, or a rank table, or a placement with its
    ``hosts``. places: numbers of names, by a topology. spares: whether those of a placement come behind.
    Raises JobError for anything else, PlacementError for a rank table that is none."""

    def refuse(why: str | Exception) -> JobError:
        fix = "Write [0, 1, 2], or give a rank table and its topology"
        why = why if isinstance(why, str) else reason_of(why)
        return JobError(f"no JSON list of node numbers: {why}", file=str(file), key="zone", fix=fix)

    try:
        value: Any = read_json(file)
    except (OSError, ValueError) as error:
        raise refuse(error) from None
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        value, more = list(RankTable.read(file).hosts) if "nodes" in table else table.get("hosts"), table.get("spares")
        value = [*value, *more] if spares and isinstance(value, list) and isinstance(more, list) else value
    if not isinstance(value, list):
        raise refuse("it is no list, and has neither nodes nor hosts")
    return [_number(node, places, refuse) for node in cast("list[Any]", value)]


def places_in(topology: str, remark: Callable[[Remarks], None]) -> dict[str, int]:
    """Numbers of a topology's nodes: minipod after minipod, as the nodes of a replay lie. remark: takes what
    is to be said of it."""
    tree, remarks = read_topology(topology)
    remark(remarks)
    return {node.name: number for number, node in enumerate(tree.nodes)}


def _number(node: Any, places: dict[str, int], refuse: Any) -> int:
    if isinstance(node, str) and places:
        if node not in places:
            raise refuse(f"the topology has no node '{node[:40]}'")
        return places[node]
    if not isinstance(node, int) or isinstance(node, bool):
        why = "is a name: say with topology where it is" if isinstance(node, str) else "is no number of a node"
        raise refuse(f"{json.dumps(node)[:40]} {why}")
    return node
