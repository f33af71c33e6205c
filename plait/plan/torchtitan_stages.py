"""A torchtitan configuration's pipeline as a job's: its schedule and its stages.

torchtitan 0.3.0, distributed/pipeline_parallel.py (and its TOML since June 2025): embedding and head count as
so many layers each (``pipeline_parallel_first_stage_less_layers`` and ``last``, 1 by default). There are as
many stages as these and the layers fill with ``pipeline_parallel_layers_per_stage`` each, else one a rank, or
two of schedules with several. They are as equal as can be, the first ones larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from plait.core.parallel.strategy import slice_sizes
from plait.plan.emit_torchtitan import SCHEDULES
from plait.plan.frameworks import KEPT
from plait.plan.told import Told, whole_number

PARTS = "module_fqns_per_model_part"
EACH = "parallelism.pipeline_parallel_layers_per_stage"
LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
ROUNDS = {"1f1b": (1, 1), "gpipe": (1, 1), "zb-v": (2, 2), "interleaved": (2, 1000)}
"""By schedule, the fewest and the most stages a rank."""


def number_of(told: Told, values: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number of the file, or its default. Raises JobError for other values."""
    return whole_number(told, key, values[key]) if key in values else default


def given_stages(values: Mapping[str, Any]) -> list[int]:
    """Layers of every stage, where a file names them: by its parts, or by their first layers as Plait writes
    them."""
    first, parts = values.get("first"), values.get(f"parallelism.{PARTS}")
    if isinstance(parts, list):
        return [sum(str(name).startswith("layers.") for name in part) for part in parts]
    if isinstance(first, list) and all(isinstance(layer, int) for layer in first):
        return [end - start for start, end in pairwise(first)]
    return []


def pipeline(told: Told, values: Mapping[str, Any], computed: Sequence[str]) -> list[str]:
    """Set the schedule and the stages. computed: what no literal says. Returns what of it nobody understands.
    Raises JobError for what torchtitan refuses."""
    given = str(values.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    name = given.lower()  # torch finds classes whatever the case
    pp, known = told.get("strategy.pp", 1), {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    if pp == 1:
        told.set("strategy.schedule", "1f1b")
        return []
    if name not in known:
        told.unmodelled.append(f"parallelism.pipeline_parallel_schedule = {given} (1F1B is predicted)")
        told.freed = (*told.freed, "strategy.schedule")
    schedule = known.get(name, "1f1b")
    told.set("strategy.schedule", schedule)
    sizes = given_stages(values)
    stages = len(sizes) or _counted(told, values, ROUNDS.get(known.get(name, "interleaved"), (1, 1000)))
    if stages % pp:
        raise told.refuse("parallelism.pipeline_parallel_degree", f"{pp} does not divide {stages} stages",
                          "Use a divisor of them")  # fmt: skip
    if schedule == "interleaved":
        told.set("strategy.virtual_stages", stages // pp)
    if not sizes and name in known:
        _shared_out(told, values, stages)
    return [] if sizes else [f"{one} (computed)" for one in computed if PARTS in one]


def _counted(told: Told, values: Mapping[str, Any], rounds: tuple[int, int]) -> int:
    """Stages of so many layers. rounds: the fewest and the most a rank that the schedule has."""
    pp, layers = told.get("strategy.pp", 1), told.get("model.num_layers", 0)
    each, ends = number_of(told, values, EACH, 0), sum(number_of(told, values, key, 1) for key in LESS)
    if EACH in values and each < 1:
        raise told.refuse(EACH, f"{each} is not positive", "Use at least 1, or leave it out")
    if not each or not layers:
        return rounds[0] * pp
    stages = -(-(layers + ends) // each)
    what = f"{layers} layers, and {ends} that embedding and head count as, are {stages} stages of {each}"
    if stages % pp:
        raise told.refuse(EACH, f"{what}, no multiple of {pp} ranks", "Use a number that gives one")
    if not rounds[0] <= stages // pp <= rounds[1]:
        wanted = f"{rounds[0]}{' or more' if rounds[1] > rounds[0] else ''}"
        problem = f"{what}, {stages // pp} a rank where the schedule has {wanted}"
        raise told.refuse(EACH, problem, f"Use a {'smaller' if stages // pp < rounds[0] else 'larger'} number")
    return stages


def _shared_out(told: Told, values: Mapping[str, Any], stages: int) -> None:
    """Layers of stages: of memory as torchtitan cuts them, where embedding and head count as a layer each or
    not at all; of time equal ones."""
    layers, less = told.get("model.num_layers", 0), [number_of(told, values, key, 1) for key in LESS]
    if not layers:
        return
    counted = layers + sum(less)
    if max(less) > counted // stages:
        key, fewest = LESS[less.index(max(less))], counted // stages
        raise told.refuse(key, f"{max(less)} is more than the {fewest} layers of a stage", "Use at most so many")
    sizes = list(slice_sizes(counted, stages))
    sizes[0], sizes[-1] = sizes[0] - less[0], sizes[-1] - less[1]
    own = [stage.num_layers for stage in KEPT["torchtitan"].stages(layers, stages)]
    if less == [1, 1]:
        told.options["ends_count"] = True
    elif less == [0, 0]:
        told.options["ends_fill"] = False
    if sizes != own:
        what = "The time of a step is" if less in ([1, 1], [0, 0]) else "Time and memory are"
        told.notes.append(f"Stages have {min(sizes)} to {max(sizes)} layers. {what} predicted with equal ones.")
