"""InternEvo's figures by the planner: its example of 7B with 256k tokens, memory and traffic of 7B with 32k,
and the share of the peak of 7B to 65B by length, beside DeepSpeed's Ulysses and Megatron-LM at their own
best.

Ulysses is DeepSpeed as Plait plans for it (``plan.framework``) without a pipeline and tensor parallelism;
Megatron-LM has no context parallelism, as when the paper was written. The paper's space is Plait's
without rings and without selective recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.papers.found import Found, Row, Series
from benchmarks.papers.planned import Settings, best, command, full_mfu, planning, predict, settings
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.estimate import PlaceEstimate, estimate
from plait.plan.candidate import Candidate

PAPER = "internevo"
GPUS, TOKENS, GIB = 128, 1 << 22, 2**30
MODELS = {"7B": "llama2-7b", "13B": "llama2-13b", "30B": "llama-30b", "65B": "llama-65b"}
LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072, "256k": 262144}
SYSTEMS: dict[str, Settings] = {
    "InternEvo": (), "Ulysses": ("plan.framework=deepspeed", "plan.constraints=['pp = 1', 'tp = 1']"),
    "Megatron-LM": ("plan.framework=megatron", "plan.constraints=['cp = 1']"),
}  # fmt: skip
SPACE = ("plan.constraints=['recompute in none, full', 'ring = 1']",)
READINGS = {
    "relative": "os on top of ps: optimizer states over 4 x 2 = 8 ranks",
    "nodes": "os counts nodes: over 2 x 8 = 16 ranks",
}
NEAREST = "of the ten fastest the first with sequences over 32 ranks"
SAME = 1.01
"""Steps that differ by less are not told apart; the paper's planner measures its ten fastest plans."""
ADAM = 12
"""Bytes of Adam's states for a parameter: master, mean and variance in fp32."""


@dataclass(frozen=True)
class Case:
    """A model and a length, 4M tokens a step."""

    model: str
    length: str

    def asked(self, system: str) -> Settings:
        """The settings of its plan."""
        tokens = LENGTHS[self.length]
        return settings(
            model__preset=MODELS[self.model], data__sequence_length=tokens, model__max_sequence=tokens,
            train__global_batch_size=TOKENS // tokens,
        ) + SYSTEMS[system]  # fmt: skip

    def best(self, system: str) -> Candidate | None:
        """The system's fastest plan that fits; None where there is none."""
        return best(PAPER, self.asked(system))

    def __str__(self) -> str:
        return f"{self.model}, {self.length}"


def _says(one: Candidate) -> str:
    """A strategy in a few words."""
    own: Strategy = one.job.base_strategy
    point = one.point
    sharded = f"p,g,o {point['params']},{point['grads']},{point['optim']}"
    ring = f" ({point['ring']} rings)" if point.get("ring", 1) > 1 else ""
    return f"pp {point['pp']}, tp {own.tp}, sp {own.cp}{ring}, {sharded}, recompute {own.recompute}"


def lengths() -> Found:
    """MFU and tokens a GPU and second, 7B to 65B, 8k to 256k."""
    rows: list[Row] = []
    series: list[Series] = []
    ratios: dict[str, float] = {}
    for model in MODELS:
        points: dict[str, list[tuple[float | str, float]]] = {system: [] for system in SYSTEMS}
        for length in LENGTHS:
            case = Case(model, length)
            found = {system: case.best(system) for system in SYSTEMS}
            for system, one in found.items():
                if one:
                    points[system].append((length, round(full_mfu(one), 4)))
                note = f"{one.tokens_per_second / GPUS:,.0f} tokens a GPU and second; {_says(one)}" if one else ""
                rows.append(Row(name=f"{case}, {system}", value=round(full_mfu(one), 4) if one else "nothing fits",
                                command=command(PAPER, case.asked(system)), note=note))  # fmt: skip
            ours, others = (
                found["InternEvo"],
                [one.seconds for name, one in found.items() if one and name != "InternEvo"],
            )
            assert ours is not None
            ratios[str(case)] = round(min(others) / ours.seconds, 4) if others else float("inf")
        series += [Series(name=f"{model}, {system}", points=own) for system, own in points.items()]
    most = max(one for one in ratios.values() if one < float("inf"))
    return Found(
        rows=rows, series=series, claims={9: ratios}, facts={"most": round(most, 2), "least": min(ratios.values())}
    )


def example() -> Found:
    """7B, 256k tokens, 128 GPUs: what is chosen in the paper's space, and the paper's plan under both
    readings."""
    asked = Case("7B", "256k").asked("InternEvo")
    ten = planning(PAPER, asked + SPACE).planner.answer().candidates
    chosen, free = ten[0], best(PAPER, asked)
    assert free
    alike = [one for one in ten if one.seconds < SAME * chosen.seconds and _like_theirs(one)]
    like = alike[0] if alike else None
    parameters = planning(PAPER, asked).planner.model.num_parameters
    readings = {"relative": (4, 4, 8), "nodes": (4, 4, 16)}
    told: dict[str, Candidate | None] = {}
    rows = _choices(chosen, asked)
    if like:
        rows.append(Row(name=NEAREST, value=f"{like.seconds:.2f} s, the first {chosen.seconds:.2f} s", note=_says(like),
                        command=command(PAPER, asked + SPACE)))  # fmt: skip
    for name, (params, grads, optim) in readings.items():
        given = asked + settings(
            strategy__dp=4, strategy__cp=32, strategy__recompute="none", strategy__shard__params=params,
            strategy__shard__grads=grads, strategy__shard__optim=optim, train__micro_batch_size=1,
        ) + ("strategy.slices.batch=1", "strategy.slices.columns=1")  # fmt: skip
        one = told[name] = predict(PAPER, given)
        value = f"{one.seconds:.1f} s" if one else "does not fit"
        rows.append(Row(name=f"the paper's plan, {READINGS[name]}", value=value, note=_optimizer(parameters, optim),
                        command=command(PAPER, given, "--evaluate")))  # fmt: skip
    whole, kept = ADAM * parameters / 2, chosen.memory.fullest.place.memory
    alone = "the paper's plan, os alone: over 2 ranks, fewer than parameters"
    rows.append(Row(name=alone, note=_optimizer(parameters, 2),
                    value=f"{whole / 1e9:.0f} GB of optimizer states beside "
                    f"{kept.activations / 1e9:.0f} GB of activations: does not fit"))  # fmt: skip
    rows.append(Row(name="Plait's own space (rings, selective recomputation)", value=f"{free.seconds:.1f} s",
                    command=command(PAPER, asked), note=_says(free)))  # fmt: skip
    relative = told["relative"]
    holds = {
        "no pipeline": chosen.point["pp"] == 1, "no recomputation": chosen.job.base_strategy.recompute == "none",
        "sequences over 32 ranks, of those that cannot be told from the first": like is not None,
        "the paper's sharding within 2 % of the chosen": bool(relative and relative.seconds < 1.02 * chosen.seconds),
    }  # fmt: skip
    return Found(rows=rows, claims={8: holds}, facts={
        "seconds": round(chosen.seconds, 1), "theirs": round(relative.seconds, 1) if relative else "-",
        "whole": round(ADAM * parameters / 1e9, 1), "half": round(whole / 1e9, 1),
        "sixteenth": round(ADAM * parameters / 16e9, 2), "free": round(free.seconds, 1),
    })  # fmt: skip


def _like_theirs(one: Candidate) -> bool:
    """No pipeline, no recomputation, sequences over 32 ranks."""
    own = one.job.base_strategy
    return one.point["pp"] == 1 and own.recompute == "none" and own.cp == 32


def _choices(chosen: Candidate, asked: Settings) -> list[Row]:
    where = command(PAPER, asked + SPACE)
    own, point = chosen.job.base_strategy, chosen.point
    told = {
        "pipeline stages": point["pp"], "recomputation": own.recompute, "sequence over (ranks)": own.cp,
        "parameters over": point["params"], "gradients over": point["grads"], "optimizer states over": point["optim"],
    }  # fmt: skip
    cut = f"and tensor parallelism over {own.tp}" if own.tp > 1 else ""
    return [Row(name=name, value=str(value), command=where, note=cut if name == "sequence over (ranks)" else "")
            for name, value in told.items()]  # fmt: skip


def _optimizer(parameters: int, ranks: int) -> str:
    return f"Adam's {ADAM * parameters / 1e9:.0f} GB become {ADAM * parameters / ranks / 1e9:.1f} GB"


def memory() -> Found:
    """7B, 32k tokens, 128 GPUs: bytes of a rank, and what it sends in a step, by system."""
    case = Case("7B", "32k")
    rows: list[Row] = []
    series: list[Series] = []
    for system in SYSTEMS:
        one = case.best(system)
        assert one is not None
        place = _sent(one)
        kept, sent = one.memory.fullest.place.memory, place.sent
        states, acts = kept.parameters + kept.gradients + kept.optimizer, kept.activations + kept.buffers
        across = {name: size / GIB for name, size in sent.items() if size}
        where = command(PAPER, case.asked(system))
        rows.append(Row(name=f"{system}: model states", value=round(states / GIB, 1), command=where, note=_says(one)))
        rows.append(Row(name=f"{system}: activations", value=round(acts / GIB, 1), command=where))
        rows.append(Row(name=f"{system}: sent in a step", value=round(sum(across.values()), 1), command=where,
                        note=", ".join(f"{name} {size:.1f}" for name, size in across.items())))  # fmt: skip
        points = {"states": states / GIB, "activations": acts / GIB, "sent": sum(across.values())}
        series.append(Series(name=system, points=[(kind, round(size, 1)) for kind, size in points.items()]))
    return Found(rows=rows, series=series)


def _sent(one: Candidate) -> PlaceEstimate:
    """Of the same strategy as Plait runs it: bytes on the wire do not hang on the framework."""
    values = one.job.to_dict()
    values["plan"] = {}
    planner = planning(PAPER, ()).planner
    step = planner.draft(type(one.job).from_dict(values))
    return max(estimate(step, gpu=True).places, key=lambda place: sum(place.sent.values()))


FIGURES: dict[str, Callable[[], Found]] = {"example": example, "lengths": lengths, "memory": memory}
