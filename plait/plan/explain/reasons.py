"""Reasons for a strategy, in words: its differences from another one, the parts of its step, the
gain of every overlap, and its lead over the runner-up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from plait.core.base.text import in_bytes, in_seconds
from plait.core.job.constraint import SIZES, Constraint
from plait.core.job.spec import Job
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS
from plait.core.step.columns.points import WORDS as WORDS
from plait.core.step.schedules import GENERATORS, takes_chunks
from plait.core.step.seconds.closed_form import Seconds
from plait.plan.explain.memory_report import percent
from plait.plan.search.search import LONGER
from plait.plan.search.space import column_of, spelled

if TYPE_CHECKING:
    from plait.plan.search.candidate import Candidate

Point = Mapping[str, int]
PARTS = {
    "compute": "computation",
    "tp": "exposed tensor-parallel communication",
    "cp": "exposed context-parallel communication",
    "ep": "exposed expert-parallel communication",
    "dp": "exposed data-parallel communication",
    "pp": "exposed transfers between stages",
    "optimizer": "the optimizer",
    "idle": "waiting for other ranks",
    "beside": "loading data and logging",
}
"""Descriptions of a step's parts for messages, by part."""
ONE_STAGE = PARTS | {"idle": "waiting for the slowest rank"}
"""Descriptions of the parts of a step without a pipeline, by part."""
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
"""Names in a job file, by column of ``StrategyTable``, for columns with
another name."""
SHOWN = 0.005
"""Minimum fraction of a step that a part must have to be mentioned."""

ALIKE = 1e-4
"""Relative difference below which two steps count as equally long."""


def readable(point: Point) -> dict[str, str]:
    """Return the choices of a strategy by setting, in the words of a job file. Columns that follow
    from others, or that have no effect in this strategy, are left out.

    >>> from plait.core.step.columns.points import StrategyTable
    >>> readable(StrategyTable.of([{"dp": 4, "micro": 2}]).row(0))["micro_batch_size"]
    '2'
    """
    found = dict[str, str]()
    for key, value in point.items():
        if _chosen(point, key):
            told = TOGETHER[key](point) if key in TOGETHER else spelled(key, value)
            found[NAMES.get(key, key)] = told
    if point["tp"] > 1:
        found["sequence_parallel"] = "true" if point["sequence_parallel"] else "false"
    return found | ({NAMES["graphs"]: "true"} if point["graphs"] else {})


def recomputed(point: Point) -> str:
    """Return what the backward recomputes, and in how many layers of a stage if not in all.

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
"""Functions that return the text of a strategy, by column, for values told together: slices p1 x
p2, heads x ring, and what is recomputed in how many layers."""


# ---- in the words of the answer's table ----

DEGREE_KEYS = ("pp", "dp", "cp", "tp")
"""Settings that share a column of the answer's table."""
LEGEND = {
    r"\b(params|grads|optim) \d": "Sharding in numbers: over how many ranks parameters, gradients and optimizer states "
    "are sharded; what is not named is whole on every rank.",
    r"\bhpZ \d": "hpZ N: a second copy of the parameters, sharded over N neighbouring ranks (ZeRO++).",
    r"\binterleaved x\d": "interleaved xN: N virtual stages on each pipeline rank.",
    r"\beager-1f1b\b": "eager-1f1b: 1F1B with more forwards first, so that transfers between stages overlap.",
}
"""Explanations of the table's words, by patterns of the texts in which they are needed."""


def settings(point: Point, schedule: str = "") -> dict[str, str]:
    """Return the settings of a strategy in the words of the answer's table; ``-`` for a setting
    that has no effect. schedule: its name, if it is not the point's.

    >>> from plait.core.step.columns.points import StrategyTable
    >>> settings(StrategyTable.of([{"dp": 4, "tp": 2, "p1": 2, "optim": 4}]).row(0))["slices"]
    'batch 2'
    """
    tp, cp, replicas = point["tp"], point["cp"], point["dp"] * point["cp"]
    name, flat = schedule or WORDS["schedule"][point["schedule"]], point["sequence_parallel"]
    found = {key: f"{point[key]}" for key in (*DEGREE_KEYS, "ep")} | {
        "micro-batch": f"{point['micro']}",
        "schedule": f"{name} x{point['virtual']}" if takes_chunks(name) else name,
        "sharding": format_sharding(point),
        "recompute": recomputed(point),
        "cp type": _named({"Ulysses": cp // point["ring"], "ring": point["ring"]}),
        "slices": _named({"batch": point["p1"], "columns": point["p2"]}),
        "sequence parallel": "yes" if flat else "no",
        "tp overlap": spelled("overlap", point["overlap"]),
        "dp overlap": spelled("shard_overlap", point["shard_overlap"]),
    }
    needed = {"schedule": point["pp"], "sharding": replicas, "cp type": cp, "slices": tp * cp, "ep": point["ep"],
              "sequence parallel": tp, "tp overlap": tp, "dp overlap": replicas}  # fmt: skip
    return found | {key: "-" for key, size in needed.items() if size == 1}


def format_sharding(point: Point) -> str:
    """Return how the training state is sharded over dp x cp ranks: a common name, or the number of
    ranks of each sharded kind.

    >>> sizes = {"dp": 8, "cp": 1, "params": 1, "grads": 2, "optim": 8, "secondary": 0}
    >>> format_sharding(sizes), format_sharding(sizes | {"grads": 8}), format_sharding(sizes | {"grads": 1})
    ('grads 2, optim 8', 'ZeRO-2', 'ZeRO-1')
    """
    ranks, sizes = point["dp"] * point["cp"], {key: point[key] for key in ("params", "grads", "optim")}
    known: dict[tuple[int, ...], str] = {
        (ranks, ranks, ranks): "ZeRO-3/FSDP", (1, ranks, ranks): "ZeRO-2", (1, 1, ranks): "ZeRO-1", (1, 1, 1): "DDP",
    }  # fmt: skip
    hybrid = f"HSDP {point['params']}" if len({*sizes.values()}) == 1 else _named(sizes)
    told = known.get(tuple(sizes.values()), hybrid)
    return f"{told}, hpZ {point['secondary']}" if point["secondary"] else told


def _named(sizes: Mapping[str, int]) -> str:
    """Return sizes above 1 with their names."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "-"


def legend(texts: Iterable[str]) -> list[str]:
    """Return explanations of the words that occur in cells of the answer's table."""
    told = "\n".join(texts)
    return [explained for pattern, explained in LEGEND.items() if re.search(pattern, told)]


# ---- comparisons ----


def schedule_of(job: Job, point: Point) -> str:
    """Return the name of the job's schedule; for a schedule in a file, the file's name. ``point``
    cannot give the latter: there, a file that no search used has the number of 1f1b."""
    said = job.strategy.schedule
    return WORDS["schedule"][point["schedule"]] if said in GENERATORS else PurePath(said).name


def chosen(job: Job, point: Point) -> dict[str, str]:
    """Return a strategy's settings as ``readable`` does, but with the name of a schedule file. The
    job leaves nothing open."""
    found = readable(point)
    return found | ({"schedule": schedule_of(job, point)} if "schedule" in found else {})


FOLLOWS = ("num_micro", "sequence_parallel", "graphs", "p2", "recompute_layers")
"""Columns of ``StrategyTable`` that answers do not list: they follow from others, or are shown
together with others."""
DEGREES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("pp",), "virtual": ("pp",), "ring": ("cp",), "ep": ("ep",), "secondary": ("secondary",),
    **dict.fromkeys(("overlap", "p1"), ("tp", "cp")),
    **dict.fromkeys(("params", "grads", "optim", "shard_overlap"), ("dp", "cp")),
}  # fmt: skip
"""Degrees of parallelism by column: the column has an effect only if their product is above 1."""


def _chosen(point: Point, key: str) -> bool:
    """True if answers list a column of a strategy: it has an effect, and does not follow from other
    columns."""
    if key in FOLLOWS or (key == "virtual" and not takes_chunks(WORDS["schedule"][point["schedule"]])):
        return False
    return key not in DEGREES or math.prod(point[one] for one in DEGREES[key]) > (key != "secondary")


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the settings in which two readable strategies differ, with both values; ``-`` if a
    strategy lacks the setting."""
    keys = list(dict.fromkeys([*first, *second]))
    return {
        key: (first.get(key, "-"), second.get(key, "-")) for key in keys if first.get(key, "-") != second.get(key, "-")
    }


def changed_settings(base: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the ``settings`` of a strategy that differ from those of ``base``, as in ``dp 32 (not
    64)``."""
    changed = differences(base, other).items()
    told = [f"{key} {now}{'' if was == '-' else f' (not {was})'}" for key, (was, now) in changed if now != "-"]
    told = told or [f"no {key}" for key, _ in changed]  # settings without effect there
    return ", ".join(told) or "the same settings, otherwise timed"


def part_names(pp: int) -> Mapping[str, str]:
    """Return descriptions of a step's parts that suit the number of pipeline ranks."""
    return PARTS if pp > 1 else ONE_STAGE


def describe_parts(parts: Mapping[str, float], seconds: float, pp: int) -> str:
    """Return a sentence on the largest parts of a step. seconds: of the step. pp: pipeline ranks."""
    ordered, names = sorted(parts.items(), key=lambda part: -part[1]), part_names(pp)
    shown = [(value, names[name]) for name, value in ordered[:4] if value > SHOWN * seconds]
    other = seconds - sum(value for value, _ in shown)
    shown += [(other, "other")] if other >= SHOWN * seconds else []
    return f"A step is {', '.join(f'{value / seconds:.0%} {words}' for value, words in shown)}."


def largest_loss(best: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, float]:
    """Return the part of a step in which ``other`` is slowest relative to ``best``, in words, and
    by how many seconds."""
    more = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in {**best, **other}}
    most = max(more, key=lambda name: more[name])
    return PARTS[most], max(0.0, more[most])


def runner_up(candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence on what the second candidate loses against the first; empty if there is
    only one."""
    if len(candidates) < 2:
        return []
    best, second = candidates[:2]
    part, seconds = largest_loss(best.parts, second.parts)
    more = second.seconds - best.seconds
    share = f"{more / best.seconds:.{1 if more > 0.001 * best.seconds else 2}%}"
    longer = f"{in_seconds(more)} ({share}) longer: {in_seconds(seconds)} more for {part}"
    longer += f", {in_seconds(seconds - more)} less for everything else" if seconds > 1.1 * more else ""
    differs = seconds > ALIKE * best.seconds
    has = changed_settings(*(settings(one.point, one.schedule) for one in (best, second)))
    return [f"The runner-up, strategy 2, has {has}. Its step takes {longer if differs else 'as long'}."]


def describe_safety_cost(candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence on what the safest candidate (the first) costs against the fastest; empty
    if there is only one."""
    best, fastest = candidates[0], min(candidates, key=lambda one: one.seconds)
    if len(candidates) < 2:
        return []
    if fastest is best:
        sure = percent(best.memory.likely)
        return [f"The fastest strategy is also the safest: it fits with a chance of {sure}."]
    likely = [percent(one.memory.likely) for one in (best, fastest)]
    sizes = [in_bytes(one.most_memory) for one in (best, fastest)]
    has = changed_settings(*(settings(one.point, one.schedule) for one in (best, fastest)))
    return [
        f"Strategy 1 is the safest of those that take at most {LONGER - 1:.0%} longer than the fastest: it takes "
        f"{sizes[0]} instead of {sizes[1]}, and fits with a chance of {likely[0]} instead of {likely[1]}. Its step "
        f"takes {best.seconds / fastest.seconds - 1:.1%} longer than that of the fastest "
        f"({has}), {in_seconds(fastest.seconds)}."
    ]


def describe_gain(name: str, slower: float, seconds: float) -> str:
    """Return a sentence on the gain of an overlap. name: of the communication. slower: seconds of
    the step without the overlap."""
    more = slower / seconds - 1
    told = f"{abs(more):.1%} {'longer' if more >= 0 else 'less'}"
    return f"Without overlap of {name} communication, a step takes {in_seconds(slower)}, {told}."


def without_overlaps(point: Point) -> dict[str, dict[str, int]]:
    """Return the point with one overlap switched off, for each overlap, by the name of the hidden
    communication."""
    found = dict[str, dict[str, int]]()
    base = dict(point)
    if point["tp"] > 1 and point["overlap"] != OVERLAPS.index("sync"):
        off = {"overlap": OVERLAPS.index("sync"), "p1": 1, "p2": 1}
        found["tensor-parallel"] = base | off
    if point["dp"] * point["cp"] > 1 and point["shard_overlap"] != SHARD_OVERLAPS.index("none"):
        found["data-parallel"] = base | {"shard_overlap": SHARD_OVERLAPS.index("none")}
    return found


def fixed_order(point: Point) -> list[str]:
    """Return a remark on a strategy whose slices take turns in the fixed order of Domino's
    paper."""
    if point["tp"] * point["cp"] == 1 or OVERLAPS[point["overlap"]] != "fixed":
        return []
    return ["In closed form Domino's fixed order is priced as the searched one; a simulated step has its own time."]


# ---- constraints of the job ----


@dataclass(frozen=True)
class ConstraintCheck:
    """A constraint and how the strategy meets it. text: as the job writes it. found: the strategy's
    values: one, or one for each pp rank if these differ."""

    text: str
    met: bool
    found: tuple[str, ...]


def check_constraints(job: Job, point: Mapping[str, int], memory: int) -> list[ConstraintCheck]:
    """Return the checks of ``plan.constraints``, in order, for a job that leaves nothing open.
    point: its strategy, as columns of ``StrategyTable``. memory: bytes of the fullest rank."""
    quantities = [values | {"memory": memory} for values in _quantities(job, point)]
    found = list[ConstraintCheck]()
    for one in map(Constraint.parse, job.plan.constraints):
        values = list(dict.fromkeys(known[column_of(one)] for known in quantities))
        words = tuple(_word(one.quantity, value) for value in values)
        found.append(ConstraintCheck(one.text, all(bool(one.holds(value)) for value in values), words))
    return found


def format_constraints(checks: Sequence[ConstraintCheck]) -> list[str]:
    """Return a sentence on all constraints, violated ones first; empty if there are none."""
    parts = [
        f"'{one.text}' is {'' if one.met else 'not '}met ({', '.join(one.found)})"
        for one in sorted(checks, key=lambda one: one.met)
    ]
    return [f"plan.constraints: {'; '.join(parts)}."] if parts else []


def _quantities(job: Job, point: Mapping[str, int]) -> list[dict[str, int | str]]:
    """Return the quantities that constraints may limit, by name, once for each kind of pp rank. A
    schedule file gets its own name, since ``point`` has the number of 1f1b for it."""
    known = job.strategy.schedule in SCHEDULES
    more = {"ulysses": point["cp"] // point["ring"]} | ({} if known else {"schedule": schedule_of(job, point)})
    if len(set(job.degrees)) == 1:
        return [{**point, **more}]
    found = list[dict[str, int | str]]()
    for dp, tp in dict.fromkeys(job.degrees):
        sharding = job.sharding(dp * point["cp"])
        shard = {key: getattr(sharding, key) for key in ("params", "grads", "optim", "secondary")}
        found.append({**point, **more, **shard, "dp": dp, "tp": tp, "micro": -(-job.micro_batch // dp)})
    return found


def _word(quantity: str, value: int | str) -> str:
    if isinstance(value, str):
        return value
    if quantity in SIZES:
        return in_bytes(value)
    return spelled(quantity, value)


# ---- parts of a step in closed form ----

AXES = {
    "compute": ("linear", "attention", "elementwise", "host", "head"),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp": ("sharding", "sync"),
    "pp": ("transfers",),
    "optimizer": ("optimizer",),
    "idle": ("bubble", "straggler"),
    "beside": ("fixed",),
}
"""Fields of the closed form's ``Seconds`` that add up to each part of a step, by part."""


def closed_parts(seconds: Seconds) -> dict[str, float]:
    """Return the seconds of one strategy's step by part (``PARTS``); they add up to the step's
    seconds."""
    return {axis: float(sum(getattr(seconds, name)[0] for name in names)) for axis, names in AXES.items()}
