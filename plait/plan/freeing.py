"""What would free memory of a strategy, by kind of memory, and what it would cost.

Changes of one setting each are tried all at once, in closed form, as a search tries strategies. Of each kind
the one that costs least time for what it frees is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_bytes
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, Points
from plait.core.step.memory.closed_memory import step_memory
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.seconds.closed_form import total_seconds
from plait.plan.asking import job_at
from plait.plan.choices import factors
from plait.plan.frameworks import framework_of
from plait.plan.memory_report import MemoryReport

NONE, SELECTIVE, FULL = (RECOMPUTES.index(kind) for kind in ("none", "selective", "full"))
PLAIN = SCHEDULES.index("1f1b")
LEAST = 0.005
"""Of a device's memory: what frees less is not worth a word."""
SAME = 0.01
"""Of a step's time: closed forms do not tell apart what differs by less."""
NEAR = 1.25
"""Of changes that cost at most so many times the least for what they free, the smallest is told."""
SHARDED = {"params": "parameters", "grads": "gradients", "optim": "optimizer"}
"""Kinds of memory by columns of sharding, each shared out no less than the one before."""
Point = Mapping[str, int]
Column = NDArray[np.float64]


@dataclass(frozen=True)
class FreeingChange:
    """One change of a strategy. kind: of memory that it is about; what: in words; point: with it."""

    kind: str
    what: str
    point: Point


@dataclass(frozen=True)
class Freed:
    """A change that was tried. held: bytes of its kind without it, on the fullest device. freed: bytes of the
    fullest device that it frees. longer: by how much a step takes longer, as a share."""

    change: FreeingChange
    held: int
    freed: int
    longer: float

    @property
    def told(self) -> str:
        """In words."""
        cost = f"a step takes {abs(self.longer):.1%} {'longer' if self.longer > 0 else 'less'}"
        cost = cost if abs(self.longer) >= SAME else "a step takes about as long"
        what = f"{self.change.what} would free {in_bytes(self.freed)}"
        return f"{self.change.kind} {in_bytes(self.held)}: {what} ({cost})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "kind": self.change.kind, "bytes": self.held, "change": self.change.what, "frees": self.freed,
            "longer": self.longer,
        }  # fmt: skip


def told_together(found: Sequence[Freed]) -> str:
    """A sentence on what would free memory; nothing where nothing would."""
    return f"What would free memory: {'; '.join(one.told for one in found)}." if found else ""


def possible(point: Point, layers: int, local: int) -> Iterator[FreeingChange]:
    """Changes of a point that may free memory. layers: of the largest stage. local: ranks of a node that hold
    the same weights."""
    base = dict(point)
    again = 0 if point["recompute"] != FULL else layers if point["recompute_layers"] < 0 else point["recompute_layers"]
    if point["recompute"] == NONE:
        yield FreeingChange(
            "activations", "selective recomputation", base | {"recompute": SELECTIVE, "recompute_layers": -1}
        )
    for part in sorted({layers * quarter // 4 for quarter in (1, 2, 3, 4)}):
        if part > again:
            what = f"full recomputation of {part - again} more" if again else f"full recomputation of {part}"
            full = {"recompute": FULL, "recompute_layers": part if part < layers else -1}
            yield FreeingChange("activations", f"{what} of a stage's {layers} layers", base | full)
    if point["micro"] % 2 == 0:
        half = point["micro"] // 2
        fewer = {"micro": half, "num_micro": 2 * point["num_micro"], "p1": min(point["p1"], half)}
        yield FreeingChange("activations", f"micro-batches of {half}", base | fewer)
    if point["tp"] > 1 and not point["sequence_parallel"]:
        yield FreeingChange("activations", "sequence parallelism", base | {"sequence_parallel": 1})
    if point["pp"] > 1 and point["schedule"] != PLAIN:
        yield FreeingChange("activations", "the schedule 1f1b", base | {"schedule": PLAIN, "virtual": 1})
    yield from _sharded(base, factors(point["dp"] * point["cp"], local))


def _sharded(base: dict[str, int], tried: Sequence[int]) -> Iterator[FreeingChange]:
    """States over more ranks; what is shared out no less follows."""
    names = list(SHARDED)
    for at, name in enumerate(names):
        for ranks in tried:
            after = {one: max(base[one], ranks) for one in names[at:]}
            if ranks > base[name] and all(size % ranks == 0 for size in after.values()):
                changed = [SHARDED[one] for one in after if after[one] != base[one]]
                words = " and ".join([", ".join(changed[:-1]), changed[-1]] if changed[1:] else changed)
                words = words.replace("optimizer", "optimizer states")
                yield FreeingChange(SHARDED[name], f"sharding {words} over {ranks:,} ranks", base | after)


def freed(
    model: ModelSpec, job: Job, point: Point, memory: MemoryReport, cluster: Cluster, options: MemoryOptions
) -> list[Freed]:
    """Of a job's strategy. point: where it stands. memory: what fills its places. options: of its runtime."""
    layers = -(-model.num_layers // (point["pp"] * point["virtual"]))
    changes = possible(point, layers, max(1, cluster.ranks_per_node // point["tp"]))
    tried = [FreeingChange("", "", point), *(one for one in changes if _is_a_job(job, one.point))]
    points = Points.of([one.point for one in tried])
    told: dict[str, Any] = {"sequence": job.data.sequence_length, "precision": job.train.precision, "options": options}
    held = step_memory(model, points, overhead=cluster.overhead, **told).total
    framework = framework_of(job.plan.framework)
    can = framework.can(points) if framework else np.ones(len(points), dtype=bool)
    kinds = asdict(memory.fullest.place.memory)
    seconds = total_seconds(model, points, cluster, **told)
    return best_changes(tried, kinds, held, seconds, lambda at: bool(can[at]), memory.usable)


def _is_a_job(job: Job, point: Point) -> bool:
    """Whether no rule forbids it: of what none allows neither memory nor time can be told."""
    try:
        return bool(job_at(job, point))
    except PlaitError:
        return False


def best_changes(
    changes: Sequence[FreeingChange],
    kinds: Mapping[str, int],
    held: Column,
    seconds: Column,
    allowed: Callable[[int], bool],
    device: float,
) -> list[Freed]:
    """Of each kind the change that costs least for what it frees, those that free most first.

    changes: of a strategy, which itself stands first. kinds: its bytes by kind. held, seconds: bytes of each
    change's fullest device, and of a step. allowed: whether no rule forbids a change, by its number. device:
    bytes of its memory.
    """
    less, longer, found = held[0] - held, seconds / seconds[0] - 1, list[Freed]()
    for kind in dict.fromkeys(one.kind for one in changes[1:]):
        which = [at for at, one in enumerate(changes) if at and one.kind == kind and less[at] >= LEAST * device]
        price = {at: max(longer[at], SAME) / less[at] for at in which if allowed(at)}
        if cheap := [at for at, each in price.items() if each <= NEAR * min(price.values())]:
            at = min(cheap, key=lambda at: less[at])
            found.append(Freed(changes[at], kinds[kind], int(less[at]), float(longer[at])))
    return sorted(found, key=lambda one: -one.freed)
