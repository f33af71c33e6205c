"""InternEvo's figures by the planner: its example of 7B with 256k tokens, memory and traffic of 7B with 32k,
and the share of the peak of 7B to 65B by length, beside DeepSpeed's Ulysses and Megatron-LM at their own
best.

Ulysses is DeepSpeed as Plait plans for it (``plan.framework``) without a pipeline and tensor parallelism;
Megatron-LM has no context parallelism, as when the paper was written. InternEvo's space is a part of Plait's,
the whole of which is shown apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.papers.found import Found, Row, Series, spread
from benchmarks.papers.planned import Settings, best, command, full_mfu, planning, predict, settings
from benchmarks.papers.verdicts import NOISE
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.estimate import PipelineRankEstimate, estimate
from plait.plan.search.candidate import Candidate

PAPER = "internevo"
GPUS, TOKENS, GIB = 128, 1 << 22, 2**30
MODELS = {"7B": "llama2-7b", "13B": "llama2-13b", "30B": "llama-30b", "65B": "llama-65b"}
LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072, "256k": 262144}
SPACE = (
    "plan.constraints=['recompute in none, layer', 'ring = 1', 'batch_slices = 1', 'column_slices = 1', "
    "'secondary = 0', 'schedule in 1f1b, interleaved']",
)
"""InternEvo's own: it keeps all activations or the inputs of layers, and has no rings, no slices, no second
copy of parameters, and none of the schedules that came after it."""
SYSTEMS: dict[str, Settings] = {
    "InternEvo": SPACE, "Ulysses": ("plan.framework=deepspeed", "plan.constraints=['pp = 1', 'tp = 1']"),
    "Megatron-LM": ("plan.framework=megatron", "plan.constraints=['cp = 1']"),
}  # fmt: skip
WIDER = "Plait's own space"
RELATIVE = "os on top of ps: optimizer states over 4 x 2 = 8 ranks"
RANKS = {RELATIVE: 8, "os counts nodes: over 2 x 8 = 16 ranks": 16}
"""Readings of "os = 2", and the ranks that share out optimizer states."""
BATCHES, OVER = (4, 8, 16, 32, 64), "over steps of 1M, 2M, 4M, 8M and 16M tokens"
"""Sequences of 256k of a step, which the paper does not print."""
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
        ) + SYSTEMS.get(system, ())  # fmt: skip

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
    ratios: dict[str, list[float]] = {"InternEvo": [], WIDER: []}
    for model in MODELS:
        points: dict[str, list[tuple[float | str, float]]] = {system: [] for system in (*SYSTEMS, WIDER)}
        for length in LENGTHS:
            case = Case(model, length)
            best_of = {system: case.best(system) for system in points}
            for system, one in best_of.items():
                if one:
                    points[system].append((length, round(full_mfu(one), 4)))
                note = f"{one.tokens_per_second / GPUS:,.0f} tokens a GPU and second; {_says(one)}" if one else ""
                rows.append(Row(name=f"{case}, {system}", value=round(full_mfu(one), 4) if one else "nothing fits",
                                command=command(PAPER, case.asked(system)), note=note))  # fmt: skip
            others = [one.seconds for name in ("Ulysses", "Megatron-LM") if (one := best_of[name])]
            for system, own in ratios.items():
                if others:
                    own.append(min(others) / one.seconds if (one := best_of[system]) else 0.0)
        series += [Series(name=f"{model}, {system}", points=own) for system, own in points.items()]
    ours, wider = (spread(own) for own in ratios.values())
    rows += [
        Row(name="over the better of both, 16 models and lengths", value=ours, reading=wider, note=WIDER),
        Row(name="over the better of both, the most", value=ours[1], reading=wider[1], note=WIDER),
    ]
    return Found(rows=rows, series=series, facts={"ours": f"{ours[0]:.2f} to {ours[1]:.2f}",
                                                  "wider": f"{wider[0]:.2f} to {wider[1]:.2f}"})  # fmt: skip


def example() -> Found:
    """7B, 256k tokens, 128 GPUs: what is chosen in InternEvo's space, by batch; the paper's plan under both
    readings."""
    asked = Case("7B", "256k").asked(WIDER)
    by_batch = {batch: asked + settings(train__global_batch_size=batch) for batch in BATCHES}
    own = {batch: one for batch, each in by_batch.items() if (one := best(PAPER, each + SPACE))}
    chosen, free = own[TOKENS // LENGTHS["256k"]], best(PAPER, asked)
    assert free
    parameters = planning(PAPER, asked).planner.model.num_parameters
    theirs = {name: predict(PAPER, asked + _published(ranks)) for name, ranks in RANKS.items()}
    relative, kept = theirs[RELATIVE], chosen.memory.fullest.estimate.memory
    ratios = [round(one.seconds / own[batch].seconds, 4) for batch, each in by_batch.items()
              if (one := predict(PAPER, each + _published(RANKS[RELATIVE])))]  # fmt: skip
    near = _choices(relative) if relative and relative.seconds < chosen.seconds * (1 + NOISE) else {}
    rows = [
        Row(name=name, over=[_choices(one)[name] for one in own.values()], reading=near.get(name),
            command=command(PAPER, asked + SPACE), note=OVER)
        for name in _choices(chosen)
    ]  # fmt: skip
    rows += [
        Row(name="GB of optimizer states a rank", value=round(ADAM * parameters / 2e9, 1),
            reading=round(ADAM * parameters / 16e9, 2), note="2 ranks; 2 nodes of 8"),
        Row(name="the paper's plan over the chosen, seconds", over=ratios, note=OVER),
        *(Row(name=f"the paper's plan, {name}", value=f"{one.seconds:.1f} s" if one else "does not fit",
              command=command(PAPER, asked + _published(RANKS[name]), "--evaluate")) for name, one in theirs.items()),
        Row(name=WIDER, value=f"{free.seconds:.1f} s", command=command(PAPER, asked), note=_says(free)),
    ]  # fmt: skip
    return Found(rows=rows, facts={
        "seconds": round(chosen.seconds, 1), "theirs": round(relative.seconds, 1) if relative else "-",
        "activations": round(kept.activations / 1e9), "free": round(free.seconds, 1), "chosen": _says(chosen),
        "small": _says(own[BATCHES[0]]), "longer": f"{ratios[0] - 1:.1%}",
    })  # fmt: skip


def _published(ranks: int) -> Settings:
    """The paper's plan; ranks: that share out optimizer states."""
    return settings(
        strategy__dp=4, strategy__cp=32, strategy__recompute="none", strategy__shard__params=4,
        strategy__shard__grads=4, strategy__shard__optim=ranks, train__micro_batch_size=1,
        strategy__slices__batch=1, strategy__slices__columns=1,
    )  # fmt: skip


def _choices(one: Candidate) -> dict[str, str]:
    own, point = one.job.base_strategy, one.point
    choices = {"pipeline stages": point["pp"], "recomputation": own.recompute, "sequences over (ranks)": own.cp,
               "parameters over (ranks)": point["params"], "gradients over (ranks)": point["grads"],
               "optimizer states over (ranks)": point["optim"]}  # fmt: skip
    return {name: str(value) for name, value in choices.items()}


def memory() -> Found:
    """7B, 32k tokens, 128 GPUs: bytes of a rank, and what it sends in a step, by system."""
    case = Case("7B", "32k")
    rows: list[Row] = []
    series: list[Series] = []
    for system in SYSTEMS:
        one = case.best(system)
        assert one is not None
        sent_most = _sent(one)
        kept, sent = one.memory.fullest.estimate.memory, sent_most.sent
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


def _sent(one: Candidate) -> PipelineRankEstimate:
    """Of the same strategy as Plait runs it: bytes on the wire do not hang on the framework."""
    values = one.job.to_dict()
    values["plan"] = {}
    planner = planning(PAPER, ()).planner
    step = planner.draft(type(one.job).from_dict(values))
    return max(estimate(step, gpu=True).places, key=lambda each: sum(each.sent.values()))


FIGURES: dict[str, Callable[[], Found]] = {"example": example, "lengths": lengths, "memory": memory}
