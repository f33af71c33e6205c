"""MegaScale's figures by the planner and the simulator: 175B on 256 to 12,288 GPUs as Megatron-LM ran it,
and with what Plait has of MegaScale; what decoupled sends gain; what of a step's first gather the loading of
its data hides.

Of MegaScale Plait has the parallel block (``model.parallel_block``), communication of all three axes
beside computation, interleaving with sends that nobody awaits, and its own choice of layout. It has no
sliding window for a GPT (whose FLOPs the printed utilisation counts), and the kernels that constants were
fitted to, not MegaScale's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import cache

from benchmarks.as_trained import Run, runs
from benchmarks.papers import lab
from benchmarks.papers.found import HERE, Found, Row, Series
from benchmarks.papers.planned import Settings, best, command, full_mfu, planning, predict, settings, stage_costs
from benchmarks.papers.verdicts import MEASURED
from plait.core.base.codec.toml_text import read_toml
from plait.core.step.clock.pipeline_clock import PipelineCosts, dry_run
from plait.core.step.schedule import Schedule
from plait.plan.search.candidate import Candidate

PAPER = "megascale"
OWN = settings(model__parallel_block="true")
LAYOUT = (*settings(
    strategy__tp=8, strategy__pp=8, strategy__schedule="interleaved", strategy__virtual_stages=6,
    strategy__sequence_parallel="true", strategy__shard="zero1", strategy__overlap="async",
    train__micro_batch_size=1,
), "strategy.slices.batch=1", "strategy.slices.columns=1")  # fmt: skip
"""The paper's."""
BATCHES = {256: 768, 512: 768, 768: 768, 1024: 768, 3072: 6144, 6144: 6144, 8192: 6144, 12288: 6144}


@cache
def trained() -> Mapping[int, Run]:
    """By GPUs: the Megatron-LM baseline, as in ``benchmarks/as_trained.py``."""
    return {run.planner.job.world_size: run for run in runs() if run.name == "175B"}


def _asked(gpus: int) -> Settings:
    return settings(cluster__ranks=gpus, train__global_batch_size=BATCHES[gpus])


def _ours(gpus: int) -> Candidate:
    found = best(PAPER, OWN + _asked(gpus))
    assert found is not None
    return found


def megatron_command(gpus: int) -> str:
    """What predicts the baseline, which hides nothing of data parallelism's communication."""
    overlap = settings(strategy__overlap__tp="async", strategy__overlap__shard="none")
    layout = tuple(one for one in LAYOUT if not one.startswith("strategy.overlap"))
    degrees = settings(strategy__dp=gpus // 64, plan__framework="megatron")
    return command(PAPER, _asked(gpus) + layout + overlap + degrees, "--evaluate")


def steps() -> Found:
    """Table 2: seconds of a step and utilisation, Megatron-LM's and ours in the paper's layout, and their
    ratio; by a reading in Plait's own layout."""
    rows: list[Row] = []
    curves = ("Megatron-LM, predicted", "Megatron-LM, published", "MegaScale, predicted", "MegaScale, published",
              "in Plait's own layout")  # fmt: skip
    points: dict[str, list[tuple[float | str, float]]] = {name: [] for name in curves}
    gains: list[Row] = []
    table = _published()
    for gpus in BATCHES:
        base, theirs, ours = trained()[gpus].predicted, _in_their_layout(gpus), _ours(gpus)
        for system, one in (("Megatron-LM", base), ("MegaScale", theirs)):
            points[f"{system}, predicted"].append((gpus, round(full_mfu(one), 4)))
            alike = full_mfu(base) * base.seconds / table[f"{gpus:,} GPUs, {system}"]  # as many FLOPs a step
            points[f"{system}, published"].append((gpus, round(alike, 4)))
        points["in Plait's own layout"].append((gpus, round(full_mfu(ours), 4)))
        own = ours.job.strategy
        note = f"Plait's own layout: pp {own.pp}, tp {own.tp}, micro-batches of {ours.job.train.micro_batch_size}"
        rows.append(
            Row(name=f"{gpus:,} GPUs, Megatron-LM", value=round(base.seconds, 2), command=megatron_command(gpus))
        )
        rows.append(
            Row(
                name=f"{gpus:,} GPUs, MegaScale",
                value=round(theirs.seconds, 2),
                note=note,
                reading=round(ours.seconds, 2),
                command=command(PAPER, _as_theirs(gpus), "--evaluate"),
            )
        )
        gains.append(
            Row(
                name=f"{gpus:,} GPUs, times as fast",
                value=round(base.seconds / theirs.seconds, 3),
                reading=round(base.seconds / ours.seconds, 3),
                command=command(PAPER, OWN + _asked(gpus)),
            )
        )
    rows.append(Row(name=f"{gpus:,} GPUs, utilisation", value=round(full_mfu(theirs), 4),
                    reading=round(full_mfu(ours), 4)))  # fmt: skip
    return Found(
        rows=[*rows, *gains], series=[Series(name=name, points=own) for name, own in points.items()],
        facts={"base": round(full_mfu(base), 3), "theirs": round(full_mfu(theirs), 3),
               "gain": round(base.seconds / theirs.seconds, 2)},
    )  # fmt: skip


def _published() -> Mapping[str, float]:
    """Seconds of a step of table 2, by the name of the row."""
    figures = read_toml(HERE / "published" / f"{PAPER}.toml")["figures"]
    rows = next(one["rows"] for one in figures if one["id"] == "steps")
    return {row["name"]: row["published"] for row in rows}


def _as_theirs(gpus: int) -> Settings:
    """Parallel blocks and Plait's overlap in the paper's layout."""
    return OWN + _asked(gpus) + LAYOUT + settings(strategy__dp=gpus // 64)


def _in_their_layout(gpus: int) -> Candidate:
    found = predict(PAPER, _as_theirs(gpus))
    assert found is not None
    return found


def decoupled() -> Found:
    """Section 3.2: sends that nobody awaits, under interleaving."""
    rows: list[Row] = []
    gains: dict[str, float] = {}
    points: list[tuple[float | str, float]] = []
    for gpus in (256, 12288):
        batch = 256 if gpus == 256 else BATCHES[gpus]  # table 3's
        wanted = settings(cluster__ranks=gpus, train__global_batch_size=batch, strategy__dp=gpus // 64)
        asked = planning(PAPER, OWN + wanted + LAYOUT, evaluate=True)
        schedule, costs = stage_costs(asked)
        for slower in (1, 2, 4, 16):
            taken = _interleaved(schedule, costs, slower)
            gain = gains[f"{gpus} GPUs, {slower}"] = taken[True] / taken[False]
            name = f"{gpus:,} GPUs" + (f", transfers {slower} times as slow" if slower > 1 else "")
            points.append((name, round(gain, 4)))
            words = ["plait", "schedule", "interleaved", "pp=8", f"micro_batches={schedule.num_micro_batches}",
                     "virtual_stages=6", f"transfer={slower * max(costs.edges.values()):.4g}",
                     f"costs={costs.forward[1]:.4g},{costs.input_gradient[1]:.4g},0"]  # fmt: skip
            rows.append(Row(name=name, value=round(gain, 4), command=shlex.join(words)))
    return Found(
        rows=rows, series=[Series(name="times as fast", points=points)],
        facts={"sent": round(gains["256 GPUs, 1"], 3), "twice": round(gains["256 GPUs, 2"], 3)},
    )  # fmt: skip


def _interleaved(schedule: Schedule, costs: PipelineCosts, slower: float) -> dict[bool, float]:
    """Seconds of a step; True: a stage is busy until what it has made is with the next one."""
    edges = {edge: slower * seconds for edge, seconds in costs.edges.items()}
    stages = range(schedule.num_stages)
    sent = [edges.get((stage, stage + 1), 0.0) for stage in (-1, *stages)]
    awaited = PipelineCosts(
        tuple(costs.forward[at] + sent[at + 1] for at in stages),
        tuple(costs.input_gradient[at] + sent[at] for at in stages), costs.weight_gradient,
    )  # fmt: skip
    free = PipelineCosts(costs.forward, costs.input_gradient, costs.weight_gradient, edges)
    return {True: dry_run(schedule, awaited).makespan, False: dry_run(schedule, free).makespan}


def loading_on_lab(*, again: bool) -> Found:
    """Section 3.2: what a step reads first is gathered while its data are loaded, or only then."""
    found = lab.measured("loading", again=again)
    (case,) = found["cases"]
    seconds = {name: one["seconds"] for name, one in case["variants"].items()}
    names = {
        "after": "gathered when the batch is there: a step",
        "beside": "gathered while it is loaded: a step",
        "gather": "the first gather alone",
    }
    low, high = case["spread"]
    rows = [Row(name=name, value=round(seconds[key], 3), command=lab.shown("loading")) for key, name in names.items()]
    rows.append(Row(name="a step is shorter where the gather overlaps loading", command=rows[0].command,
                    value=seconds["after"] > (1 + MEASURED) * seconds["beside"],
                    note=f"{low:.0%} to {high:.0%} of the gather saved in {case['rounds']} rounds"))  # fmt: skip
    return Found(rows=rows, facts={"load": f"{case['load']:g}", "nic": case["nic"], "measured": lab.dates("loading")})


EMULATED: dict[str, Callable[..., Found]] = {"loading": loading_on_lab}
FIGURES: dict[str, Callable[[], Found]] = {"steps": steps, "decoupled": decoupled}
