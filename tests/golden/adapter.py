"""Plait's internals as plain values, for the golden files. A redesign edits this module and no
other here.

Every function takes an input of ``inputs.json.xz`` and gives numbers and texts in words of the
field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.published_trace import read_meta, read_operations
from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.record.timeline import Timeline
from plait.core.reshard.plan import messages
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, StrategyTable
from plait.core.step.memory.closed_memory import MemoryColumns, step_memory
from plait.core.step.memory.estimate import estimate
from plait.core.step.memory.memory_options import MatrixBytes, MemoryOptions
from plait.core.step.seconds.closed_form import step_seconds
from plait.diagnose.measured.reading import recorded
from plait.diagnose.measured.recording import Recording
from plait.diagnose.report import explain
from plait.diagnose.verdicts.hang import localise
from plait.formats.base.frameworks import MEMORY_OPTIONS
from plait.place.placing import place
from plait.place.solve.problem import Problem
from plait.plan.answer import Planner
from plait.plan.make import make_plan
from plait.plan.search.candidate import Candidate
from plait.plan.search.simulate import simulate_plan
from tests.support.recordings import made
from tests.support.recordings.planted import draw_case
from tests.support.recordings.standstill import DEADLINE

Values = dict[str, Any]
VOCABULARY = 32_000
MANY = 1500
"""Spans of a job that are kept one by one, at most."""
SLOWER = 1.3
CASES = range(5, 8)
"""Seeds of runs that stand still, of each kind."""
DUST = 1e-9


# ---- a job: its lists, schedule, messages, timeline and estimate ----


def of_job(values: Values) -> Values:
    """Everything that follows from a job."""
    job = Job.from_dict(_as_now(values))
    on = Cluster.preset(job.cluster.preset) if "cluster" in values else None
    plan = make_plan(job, Hosts(ranks_per_host=8 if on else 1, rate=1e9), vocab=VOCABULARY if on else 1)
    return {
        "schedule": str(plan.schedule).splitlines(),
        "lists": _lists(plan, on),
        "messages": _messages(plan),
        "estimate": estimate(plan, gpu=on is not None).to_dict(),
        **_simulated(plan, on),
    }


def _as_now(values: Values) -> Values:
    """A job that was kept when keys had other names."""
    strategy = dict(values["strategy"])
    if "cp_kind" in strategy:
        strategy["cp_comm_type"] = strategy.pop("cp_kind")
    if "p1" in (slices := strategy.get("slices", "")):
        strategy["slices"] = {"batch": slices["p1"], "columns": slices["p2"]}
    return values | {"strategy": strategy}


def _lists(plan: Plan, on: Cluster | None) -> Values:
    """The list of every kind of stage and phase, by pipeline rank, stage and phase."""
    simulation = simulate_plan(plan, on).simulation
    found = Values()
    for own, lists in zip(simulation.pipeline_ranks, simulation.lists, strict=True):
        if lists.pipeline_rank is own:  # others of its kind run the same
            for at, phase in own.phases:
                listed = " ".join(map(str, lists.listed(at, phase)))
                found[f"pipeline rank {own.index}, stage {at}, {phase}"] = listed
    return found


def _messages(plan: Plan) -> Values:
    """What crosses every boundary: tensor, layouts, and messages as source > destination:
    elements."""
    return {
        f"{'sequence-parallel ' if parallel else ''}{a}>{b} {name}": {
            "source": str(one.source), "destination": str(one.destination), "predicted": one.predicted,
            "messages": [f"{each.src}>{each.dst} {each.step}[{each.start}:{each.stop}]" for each in messages(one)],
        }
        for parallel, edges in plan.reshards.items()
        for (a, b), named in edges.items()
        for name, one in named.items()
    }  # fmt: skip


def _simulated(plan: Plan, on: Cluster | None) -> Values:
    """Seconds of a step by axis, and the spans of each pipeline rank's first rank."""
    found = simulate_plan(plan, on)
    firsts = [mesh.ranks[0] for mesh in plan.layout.meshes]
    return {
        "seconds": {"step": found.seconds, "exposed": found.exposed, "places": [dict(one) for one in found.pp_ranks]},
        "timeline": _spans(found.timeline(ranks=firsts)),
    }


def _spans(timeline: Timeline) -> Values:
    """Columns, in the order of begin. Those of a large job are summed by kind, or the file would be
    large."""
    spans = sorted(timeline.spans, key=lambda span: (span.rank, span.start, span.end, span.kind, span.name))
    if len(spans) > MANY:
        sums: dict[str, list[float]] = {}
        for span in spans:
            word = span.name.rpartition(".")[2].rstrip("0123456789")
            one = sums.setdefault(f"{span.rank} {span.kind} {span.direction} {word}", [0, 0.0, 0])
            one[:] = one[0] + 1, one[1] + span.seconds, one[2] + span.bytes
        return {"count": len(spans), "sums": sums}
    return {
        "spans": [f"{one.rank} {one.kind} {one.direction} {one.seq} {one.name} {one.bytes}" for one in spans],
        "start": [span.start for span in spans],
        "end": [span.end for span in spans],
    }


# ---- columns of strategies ----


def of_points(name: str, rows: Sequence[Values]) -> Values:
    """Seconds and bytes of strategies in closed form, by part. name: a model and a cluster."""
    model, _, preset = name.partition(" on ")
    spec, cluster = ModelSpec.preset(model, specs_folder() / "models"), Cluster.preset(preset)
    points = StrategyTable.of([_row(one) for one in rows])
    seconds = step_seconds(spec, points, cluster, sequence=2048)
    memory = step_memory(spec, points, sequence=2048)
    return {"seconds": _columns(asdict(seconds)), "memory": _memory(memory)}


def of_variants(model: str, rows: Sequence[Values]) -> Values:
    """Seconds and bytes of strategies of a model under the options of every framework, and rare
    ones."""
    preset, changed, on = ODD.get(model, (model, {}, "h100"))
    spec, cluster = replace(ModelSpec.preset(preset, specs_folder() / "models"), **changed), Cluster.preset(on)
    points = StrategyTable.of([_row(one) for one in rows])
    told: Any = {"precision": "fp32" if on == "lab" else "bf16-mixed"}
    variants = dict(MEMORY_OPTIONS) | RARE
    if spec.levels or changed:
        variants = {"megatron": MEMORY_OPTIONS["megatron"]} if changed else {}
        variants |= {"plait": MEMORY_OPTIONS["plait"], "cpu": RARE["cpu"]}
    found = Values()
    for name, options in variants.items():
        seconds = step_seconds(spec, points, cluster, sequence=2048, options=options, **told)
        memory = step_memory(spec, points, sequence=2048, options=options, **told)
        found[name] = {"seconds": _columns(asdict(seconds)), "memory": _memory(memory)}
    return found


ODD: Mapping[str, tuple[str, Values, str]] = {
    "blocks": ("llama3-8b", {"parallel_block": True}, "v100"),
    "dropping": ("gpt3-125m", {"dropout": 0.1, "attention_dropout": 0.1}, "lab"),
}
"""Models with fields that presets leave, on a device without bf16, and on one that ranks share."""
_QUANTISED = MatrixBytes(whole=3.0, share=1.0, gathered=2.0)
RARE: Values = {
    "cpu": MemoryOptions(gpu=False),
    "muon": MemoryOptions(optimizer="muon", muon_steps=5, moment_bytes=2.0, reduced_bytes=2.0, gradient_bytes=2.0),
    "sgd": MemoryOptions(gpu=False, optimizer="sgd"),
    "moved": MemoryOptions(states_on_host=0.5, kept_on_host=0.5, states_moved=0.8, optimizer_bytes=6.0),
    "ends": replace(MEMORY_OPTIONS["megatron"], ends_shared=True, steps_overlap=True, more_alive=1),
    "experts": replace(
        MEMORY_OPTIONS["megatron"], experts_whole=True, dispatch_once=True, exchange_hidden=True, more_alive=1,
        matrices=_QUANTISED, input_bytes=1.0, quantised=0.5,
    ),
    "quantised": replace(MEMORY_OPTIONS["fsdp"], matrices=_QUANTISED, input_bytes=1.0),
    "chunks": replace(MEMORY_OPTIONS["torchtitan"], loss_chunks=8),
}  # fmt: skip
"""Options that jobs' keys set."""


def _row(values: Values) -> dict[str, int]:
    """Words as numbers of the columns."""
    words = {"schedule": SCHEDULES, "recompute": RECOMPUTES, "overlap": OVERLAPS, "shard_overlap": SHARD_OVERLAPS}
    return {key: words[key].index(value) if key in words else value for key, value in values.items()}


def _memory(columns: MemoryColumns) -> dict[str, Any]:
    """Columns by the names that the files have: ``place`` is the pp rank."""
    return _columns({{"pp_rank": "place"}.get(key, key): np.asarray(value) for key, value in asdict(columns).items()})


def _columns(found: Values) -> Values:
    return {name: np.asarray(column).tolist() for name, column in found.items()}


# ---- the planner's answers ----


def of_question(asked: Values) -> list[Values]:
    """The ten best strategies, with what is predicted of each."""
    job = Job.from_dict(
        {
            "model": {"preset": asked["model"], "vocab": VOCABULARY},
            "data": {"sequence_length": asked["sequence"]},
            "train": {"global_batch_size": asked["batch"], "precision": "bf16-mixed"},
            "cluster": {"preset": asked["cluster"], "ranks": asked["ranks"]},
            "plan": {"top": 10},
        }
    )
    answer = Planner(job, Cluster.preset(asked["cluster"]), VOCABULARY).answer()
    return [_candidate(one) for one in answer.candidates]


def _candidate(one: Candidate) -> Values:
    return {
        "point": dict(one.point), "seconds": one.seconds, "low": one.low, "high": one.high,
        "closed_form": one.closed_form, "parts": dict(one.parts), "memory": one.most_memory, "mfu": one.mfu_full,
    }  # fmt: skip


# ---- placements ----

PATIENT = 600.0
"""Seconds of the clock."""


def of_problem(values: Values) -> Values:
    """The minipod of every cell, its score and bound."""
    problem = Problem.plain(values["rows"], values["columns"], values["free"], alpha=values["alpha"])
    found = place(replace(problem, limit=PATIENT))  # work is limited, not time: a busy machine finds the same
    return {"minipods": " ".join(found.minipods), "score": found.score, "bound": found.bound}


# ---- verdicts ----


def of_standstill(kind: str) -> list[Values]:
    """Who is said to hold up runs that stand still, why, and who waits for whom."""
    cases = [draw_case(kind, seed) for seed in CASES]
    return [asdict(localise(case.evidence, world=case.world, deadline=DEADLINE)) for case in cases]


def of_slow_run(kind: str) -> Values:
    """All that is said of a recorded run: who is slow, since when, by how much, and where the time
    goes."""
    slow = {
        "clean": made.Job(dp=4, pp=2, steps=30),
        "processor": made.Job(dp=4, pp=2, steps=30, compute=_slow_processor),
        "link": made.Job(dp=4, pp=4, steps=30, transfer=_slow_link),
        "late": made.Job(dp=4, pp=2, steps=30, launch=_late),
        "noisy": made.Job(dp=4, pp=2, steps=30, jitter=0.1),
        "host": made.Job(dp=4, pp=2, steps=30, compute=_slow_host),
        "path": made.Job(dp=4, pp=2, steps=30, transfer=_slow_path),
        "drift": made.Job(dp=2, pp=2, steps=41, compute=_drifting),
        "uneven": made.Job(dp=3, pp=2, steps=12, compute=_uneven),
        "trace": made.Job(dp=3, pp=2, steps=12, compute=_slow_processor),
    }[kind]
    job = replace(slow, seed=11)
    if kind == "trace":
        with TemporaryDirectory() as folder:
            trace, meta = made.write_trace(Path(folder), job)
            return _said(read_operations(trace, read_meta(meta)))
    spans = made.spans_of_job(job)
    hosts = {rank: f"h{rank // 2}" for rank in range(job.dp * job.pp)} if kind in ("host", "path") else None
    return _said(recorded(spans, spans.clear().select("step", "rank"), made.plan_of(slow), hosts=hosts))


def _said(recording: Recording) -> Values:
    """What stands in a report. What is next to nothing is nothing: differences of equal numbers."""
    report = explain(recording, "run").to_dict()
    return {key: _without_dust(report[key]) for key in report.keys() - {"version", "run", "passed_over"}}


def _without_dust(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dust(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_dust(each) for each in value]
    return 0.0 if isinstance(value, float) and abs(value) < DUST else value


def _slow_processor(at: made.At) -> float:
    return _length(at) * (SLOWER if (at.dp, at.stage) == (1, 1) else 1.0)


def _slow_host(at: made.At) -> float:
    return _length(at) * (SLOWER if at.stage == 1 and at.dp >= 2 and at.step >= 8 else 1.0)


def _drifting(at: made.At) -> float:
    return _length(at) * (1 + at.step / 100)


def _uneven(at: made.At) -> float:
    return _length(at) * (0.6 + 0.2 * ((7 * at.step + 3 * at.dp + 5 * at.micro_batch) % 5))


def _length(at: made.At) -> float:
    return 0.1 if at.way == "forward" else 0.2


def _slow_link(at: made.At) -> float:
    return made.TRANSFER * (40.0 if (at.dp, at.stage) == (2, 1) else 1.0)


def _slow_path(at: made.At) -> float:
    return made.TRANSFER * (40.0 if at.dp >= 2 else 1.4 if at.dp == 1 else 1.0)


def _late(at: made.At) -> float:
    return 0.03 if (at.dp, at.stage) == (3, 0) else 0.0
