"""Jobs drawn from the whole space of strategies, models and batches; the planner's own rules say
which are valid."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import gcd, lcm, prod
from typing import Any, TypeVar, get_args

from plait.core.base.errors import JobError, PlaitError, ScheduleError
from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.parallel.strategy import Recompute, ShardOverlap
from plait.core.step.orders.segment_costs import SegmentCosts, segment_costs
from plait.core.step.schedules import GENERATORS
from plait.plan.make import make_plan

T = TypeVar("T")
Values = dict[str, Any]
HEADS = {2: (8, 16), 3: (12, 24), 4: (8, 16, 24), 5: (10, 20), 6: (12, 24), 10: (20,), 12: (24,), 15: (15, 30)}
"""Numbers of heads, and hidden sizes that go with them."""
DEGREES: tuple[int, ...] = (1, 2, 3, 4, 5)


class Chance(random.Random):
    """Choices that mostly go with what has been chosen before, so that few jobs are refused."""

    def of(self, options: Iterable[T], fits: Callable[[T], bool] = lambda _: True) -> T:
        """One of the options; nine times of ten one that fits, if any does."""
        every = list(options)
        fitting = [one for one in every if fits(one)]
        return self.choice(fitting if fitting and self.random() < 0.9 else every)


def draw(chance: Chance, most: int) -> Values:
    """Any job in fp64, valid or not; mostly on no more than ``most`` ranks."""
    pp, name = chance.of((1, 1, 2, 2, 3), lambda pp: pp <= most), chance.of(GENERATORS)
    chunks = chance.of((1, 2, 3)) if name == "interleaved" else 2 if name == "zb-v" else 1
    cp = chance.of((1, 1, 1, 2, 2, 4), lambda cp: cp * pp <= most)
    degrees = _degrees(chance, pp, most // cp)
    ring = chance.of((1, 2, 4), lambda ring: cp % ring == 0)
    family = chance.of(("gpt", "llama", "utransformer"), lambda family: cp == 1 or family != "utransformer")
    model = _model(chance, family, degrees, ring)
    batches, p1 = _batches(chance, [dp for dp, _ in degrees])
    strategy: Values = {"pp": pp, "schedule": name, "virtual_stages": chunks, "cp": cp}
    strategy |= {"dp": [dp for dp, _ in degrees], "tp": [tp for _, tp in degrees]}
    strategy |= _manner(chance) | {"shard": _shard(chance, [dp * cp for dp, _ in degrees])}
    strategy["slices"] = {"batch": p1, "columns": chance.of((1, 2, 3), lambda p2: model["hidden"] % p2 == 0)}
    strategy["sequence_parallel"] = chance.random() < 0.5 and not model.get("levels", 0)
    if cp > 1:
        kinds = {1: "ulysses", cp: "ring"}
        strategy["cp_comm_type"] = kinds.get(ring, {"ulysses": max(1, cp // ring), "ring": ring})
    if name == "slack-1f1b":
        strategy["slack"] = [chance.of((1, 2, 3)) for _ in range(pp - 1)]
    layers = [chance.of((1, 1, 2)) for _ in range(pp * chunks)]
    parts = 2 * model.get("levels", 0) + 1
    layers[0] += -sum(layers) % parts
    if chance.random() < 0.5:
        strategy["stage_layers"] = layers
    shards = [cp * tp if strategy["sequence_parallel"] else cp for _, tp in degrees]
    step = lcm(1 << model.get("levels", 0), 2 * ring if ring > 1 else 1, *shards)
    sequence = chance.of((8, 12, 15, 16, 24, 30, 40), lambda sequence: sequence % step == 0)
    return {
        "model": model | {"num_layers": sum(layers), "max_sequence": sequence},
        "data": {"sequence_length": sequence},
        "train": batches | {"precision": "fp64"},
        "strategy": strategy,
    }


def _degrees(chance: Chance, pp: int, most: int) -> list[tuple[int, int]]:
    """(dp, tp) of every place."""
    pairs = list(product(DEGREES, DEGREES))
    least, each = chance.choice((1, 2)), most // pp  # degrees of two or more where there is room
    fitting = [pair for pair in pairs if least <= min(pair) and prod(pair) <= each] or [(1, 1), (2, 1), (1, 2)]
    found = [chance.of(fitting, lambda pair: prod(pair) <= each) for _ in range(pp)]
    return found[:1] * pp if chance.random() < 0.5 else found


def _model(chance: Chance, family: str, degrees: Sequence[tuple[int, int]], ring: int) -> Values:
    step = lcm(*(tp for _, tp in degrees))
    heads = chance.of(HEADS, lambda heads: heads % step == 0)
    hidden = chance.of(HEADS[heads])
    model: Values = {"family": family, "hidden": hidden, "num_heads": heads, "vocab": chance.of((31, 37, 40))}
    model["ffn_hidden"] = hidden * chance.of((2, 2, 3, 4), lambda times: times * hidden % step == 0)
    model |= {"tied_embeddings": chance.random() < 0.5, "parallel_block": chance.random() < 0.25}
    model |= {
        "dropout": chance.of((0.0, 0.1)),
        "attention_dropout": chance.of((0.0, 0.2), lambda p: ring == 1 or not p),
    }
    if family == "llama":
        divisors = [number for number in range(1, heads + 1) if heads % number == 0]
        fitting = {kv: all(kv % tp == 0 or tp % kv == 0 for _, tp in degrees) for kv in divisors}
        model |= {"num_kv_heads": chance.of(divisors, lambda kv: fitting[kv]), "head_size": chance.of((2, 4))}
    return model | ({"levels": chance.of((1, 1, 2))} if family == "utransformer" else {})


def _shard(chance: Chance, ranks: Sequence[int]) -> str | Values:
    if chance.random() < 0.5:
        return chance.of(("ddp", "zero1", "zero2", "zero3", "fsdp"))
    several = (*DEGREES, 6, 8)
    optim = chance.of((gcd(*ranks), *several), lambda factor: gcd(*ranks) % factor == 0 and factor > 1)
    grads = chance.of((optim, *several), lambda factor: optim % factor == 0)
    params = chance.of((grads, *several), lambda factor: grads % factor == 0)
    secondary = chance.of((0, 2, 2, 3), lambda k: not k or (params % k == 0 and k < params))
    return {"params": params, "grads": grads, "optim": optim, "secondary": secondary}


def _manner(chance: Chance) -> Values:
    """How communication is hidden and memory saved."""
    kind = chance.of(("domino", "domino", "async", "sync"))  # "none" computes wrong numbers
    again = chance.of(get_args(Recompute))
    return {
        "overlap": chance.of((kind, {"tp": kind, "shard": chance.of(("both", *get_args(ShardOverlap)))})),
        "recompute": chance.of((again, {"kind": again, "layers": chance.of((0, 1, 2))})),
    }


def _batches(chance: Chance, dp: Sequence[int]) -> tuple[Values, int]:
    """Micro-batches of 1 to 9 sequences, a few of them, and slices; mostly no multiple of dp."""
    micro = chance.of(range(1, 10), lambda micro: micro >= max(dp) and (max(dp) == 1 or any(micro % n for n in dp)))
    count, each = chance.of((1, 2, 3, 4, 5)), -(-micro // dp[0])
    p1 = chance.of((1, 2, 2, 3, 3, 4), lambda p1: p1 <= micro // max(dp))
    return {"global_batch_size": micro * count, "micro_batch_size": 0 if count == 1 else each}, p1


def plan_of(job: Job) -> Plan:
    """As ``plait train`` plans it, every rank on a host of its own. Raises JobError or
    ScheduleError."""
    return make_plan(job, Hosts(ranks_per_host=1, rate=1e9), vocab=1)


def drawn_plan(chance: Chance, most: int, limit: int) -> tuple[Values, Plan]:
    """The next drawn job that can be planned, on at most ``limit`` ranks, and its plan. most: as in
    ``draw``."""
    while True:
        values = draw(chance, most)
        try:
            job = Job.from_dict(values)
            if job.world_size <= limit:
                return values, plan_of(job)
        except (JobError, ScheduleError):
            continue


def planned(chance: Chance, most: int, *, like: Job | None = None, levels: bool = True, **told: Values) -> Plan:
    """The plan of the next drawn job on 2 to ``most`` ranks that the rules allow.

    like: a job whose model, data and batch it has. levels: whether models may halve sequences.
    told: keys of its sections that are not drawn.
    """
    while True:
        values = draw(chance, most)
        if like:
            given = like.to_dict()
            told = told | {"train": told.get("train", {}) | {"global_batch_size": like.train.global_batch_size}}
            values |= {section: given[section] for section in ("model", "data")}
        for section, keys in told.items():
            values[section] |= keys
        try:
            plan = plan_of(Job.from_dict(values))
        except PlaitError:
            continue
        if 2 <= plan.layout.world_size <= most and (levels or not plan.model.levels):
            return plan


def measured(chance: random.Random, plan: Plan) -> SegmentCosts:
    """Costs as a noisy machine would measure them, with communication about as long as
    computation."""
    work = plan.workload
    shapes = segment_costs(plan.model, plan.strategy, batch=work.micro_batch, sequence=work.sequence)

    def noisy(table: dict[str, float], total: float) -> dict[str, float]:
        found = {key: seconds * chance.lognormvariate(0.0, 0.7) for key, seconds in table.items()}
        scale = total / (sum(found.values()) or 1.0)
        return {key: seconds * scale for key, seconds in found.items()}

    return SegmentCosts(noisy(shapes.compute, 1e-3), noisy(shapes.collective, 1e-3 * chance.uniform(0.3, 2.0)), 1e-7)
