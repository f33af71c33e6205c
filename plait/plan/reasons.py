"""Strategies in words: what one has otherwise than another, where a step goes, what every overlap gains, what
the first of several is ahead by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from plait.core.base.text import in_bytes, in_seconds
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS
from plait.plan.memory_report import percent
from plait.plan.safest import LONGER

if TYPE_CHECKING:
    from plait.core.job.spec import Job
    from plait.plan.candidate import Candidate

Point = Mapping[str, int]
PARTS = {
    "compute": "computation",
    "tp": "exposed tensor-parallel communication",
    "cp": "exposed context-parallel communication",
    "ep": "tokens on their way to experts and back",
    "dp": "exposed data-parallel communication",
    "pp": "exposed transfers between stages",
    "optimizer": "the optimizer",
    "idle": "waiting for other ranks",
    "beside": "loading data and logging",
}
"""Where a step goes, in words."""
WORDS = {"schedule": SCHEDULES, "recompute": RECOMPUTES, "overlap": OVERLAPS, "shard_overlap": SHARD_OVERLAPS}
NAMES = {
    "micro": "micro_batch_size",
    "p1": "slices",
    "ring": "heads x ring",
    "virtual": "virtual_stages",
    "params": "shard.params",
    "grads": "shard.grads",
    "optim": "shard.optim",
    "secondary": "shard.secondary",
    "overlap": "overlap.tp",
    "shard_overlap": "overlap.shard",
    "graphs": "cuda_graphs",
}
"""What a job file, or the answer's table, calls columns."""
SHOWN = 0.005
"""Parts of a step that are a smaller share of it are not spoken of."""

ALIKE = 1e-4
"""Steps that differ by a smaller share take equally long."""


def readable(point: Point) -> dict[str, str]:
    """What is chosen at a point, in the words of a job file and of an answer's columns: without what follows
    from the rest, and without what has no meaning there.

    >>> from plait.core.step.columns.points import Points
    >>> readable(Points.of([{"dp": 4, "micro": 2}]).row(0))["micro_batch_size"]
    '2'
    """
    found = dict[str, str]()
    for key, value in point.items():
        if _chosen(point, key):
            told = TOGETHER[key](point) if key in TOGETHER else WORDS[key][value] if key in WORDS else str(value)
            found[NAMES.get(key, key)] = told
    if point["tp"] > 1:
        found["sequence_parallel"] = "true" if point["sequence_parallel"] else "false"
    return found | ({NAMES["graphs"]: "true"} if point["graphs"] else {})


def recomputed(point: Point) -> str:
    """What the backward computes again, and in how many layers of a stage where not in all.

    >>> recomputed({"recompute": RECOMPUTES.index("full"), "recompute_layers": 3})
    'full 3 layers'
    """
    kind, layers = RECOMPUTES[point["recompute"]], point["recompute_layers"]
    return f"{kind} {layers} layer{'s' * (layers != 1)}" if layers >= 0 and kind != "none" else kind


TOGETHER: Mapping[str, Callable[[Point], str]] = {
    "p1": lambda point: f"{point['p1']}x{point['p2']}",
    "ring": lambda point: f"{point['cp'] // point['ring']}x{point['ring']}",
    "recompute": recomputed,
}
"""Columns that are told with others, as the table of an answer has slices, heads x ring and recompute."""


def schedule_of(job: Job, point: Point) -> str:
    """The schedule's name; of one in a file, for which 1f1b stands in points, the file's."""
    said = job.strategy.schedule
    return SCHEDULES[point["schedule"]] if said in SCHEDULES else PurePath(said).name


def chosen(job: Job, point: Point) -> dict[str, str]:
    """``readable``, of a job that leaves nothing open."""
    found = readable(point)
    return found | ({"schedule": schedule_of(job, point)} if "schedule" in found else {})


def _chosen(point: Point, key: str) -> bool:
    """Whether a column means something at a point, and does not follow from the others."""
    match key:
        case "num_micro" | "sequence_parallel" | "graphs" | "p2" | "recompute_layers":
            return False
        case "schedule":
            return point["pp"] > 1
        case "virtual":
            return point["pp"] > 1 and SCHEDULES[point["schedule"]] == "interleaved"
        case "ring":
            return point["cp"] > 1
        case "ep":
            return point["ep"] > 1
        case "overlap" | "p1":
            return point["tp"] * point["cp"] > 1
        case "params" | "grads" | "optim" | "shard_overlap":
            return point["dp"] * point["cp"] > 1
        case "secondary":
            return point["secondary"] > 0
        case _:
            return True


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What the second of two readable strategies has otherwise, by setting: both values; ``-`` where one has
    none."""
    keys = list(dict.fromkeys([*first, *second]))
    return {
        key: (first.get(key, "-"), second.get(key, "-")) for key in keys if first.get(key, "-") != second.get(key, "-")
    }


def instead(one: Point, other: Point) -> str:
    """``differences``, as ``pp=2 dp=32``: what ``other`` has."""
    changed = differences(readable(one), readable(other)).items()
    told = [f"{key}={value}" for key, (_, value) in changed if value != "-"]
    told = told or [f"no {key}" for key, _ in changed]  # what has no meaning there, as a second copy of shards
    return " ".join(told) or "the same strategy otherwise timed"


def limits(parts: Mapping[str, float], seconds: float) -> str:
    """What most of a step is."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    told = [f"{PARTS[name]} for {value / seconds:.0%}" for name, value in ordered[:4] if value > SHOWN * seconds]
    return f"A step is {', '.join(told)} of its time."


def loses(best: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, float]:
    """In which part ``other`` takes most more than ``best``, in words, and how many seconds."""
    more = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in {**best, **other}}
    most = max(more, key=lambda name: more[name])
    return PARTS[most], max(0.0, more[most])


def runner_up(found: Sequence[Candidate]) -> list[str]:
    """What the second loses against the first, if there is a second."""
    if len(found) < 2:
        return []
    best, second = found[:2]
    part, seconds = loses(best.parts, second.parts)
    more = second.seconds - best.seconds
    share = f"{more / best.seconds:.{1 if more > 0.001 * best.seconds else 2}%}"
    longer = f"{share} ({in_seconds(more)}) longer: {in_seconds(seconds)} more for {part}"
    longer += f", {in_seconds(seconds - more)} less for the rest" if seconds > 1.1 * more else ""
    differs = seconds > ALIKE * best.seconds
    return [f"The runner-up ({instead(best.point, second.point)}) takes {longer if differs else 'as long'}."]


def given_up(found: Sequence[Candidate]) -> list[str]:
    """What the safest strategy, the first, costs against the fastest, if there are others."""
    best, fastest = found[0], min(found, key=lambda one: one.seconds)
    if len(found) < 2:
        return []
    if fastest is best:
        sure = percent(best.memory.likely)
        return [f"The safest is the fastest as well, {sure} sure to fit: nothing is given up."]
    likely = [percent(one.memory.likely) for one in (best, fastest)]
    sizes = [in_bytes(one.most_memory) for one in (best, fastest)]
    return [
        f"The safest of those that take at most {LONGER - 1:.0%} longer than the fastest: it fills {sizes[0]} in "
        f"place of {sizes[1]} and is {likely[0]} in place of {likely[1]} sure to fit. It gives up "
        f"{best.seconds / fastest.seconds - 1:.1%} of time against the fastest "
        f"({instead(best.point, fastest.point)}), which takes {in_seconds(fastest.seconds)}."
    ]


def gains(name: str, slower: float, seconds: float) -> str:
    """What an overlap gains. slower: seconds of the step without it."""
    gained = slower / seconds - 1
    told = f"{'gains' if gained >= 0 else 'costs'} {abs(gained):.1%}"
    return f"{name} {told}: a step that hides none of it would take {in_seconds(slower)}."


def without(point: Point) -> dict[str, dict[str, int]]:
    """By what it hides: the point with one overlap off."""
    found = dict[str, dict[str, int]]()
    base = dict(point)
    if point["tp"] > 1 and point["overlap"] != OVERLAPS.index("sync"):
        off = {"overlap": OVERLAPS.index("sync"), "p1": 1, "p2": 1}
        found["Hiding tensor parallelism's communication"] = base | off
    if point["dp"] * point["cp"] > 1 and point["shard_overlap"] != SHARD_OVERLAPS.index("none"):
        found["Hiding data parallelism's communication"] = base | {"shard_overlap": SHARD_OVERLAPS.index("none")}
    return found


def fixed_order(point: Point) -> list[str]:
    """A remark on a strategy whose slices take turns in the order of Domino's paper."""
    if point["tp"] * point["cp"] == 1 or OVERLAPS[point["overlap"]] != "fixed":
        return []
    return ["In closed form Domino's fixed order is priced as the searched one; a simulated step has its own time."]
