"""Recordings made up for tests: jobs of pipelines and replicas, simulated op by op, in both forms
that ``plait diagnose`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.step.schedules import Shape, generate
from plait.core.step.step import Step, Workload
from plait.diagnose.measured.recording import ROLLUP, SPANS, Recording, grid_of, meetings_of, rollup_of
from plait.plan.make import assemble_plan

TRANSFER = 1e-3
REDUCE = 2e-2
BUFFERED = 1e-4


class At(NamedTuple):
    """Where and when an op runs; forward or backward."""

    dp: int
    stage: int
    step: int
    micro_batch: int
    way: str


class Did(NamedTuple):
    """kind: compute, send, recv or reduce."""

    at: At
    kind: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """compute, launch, transfer: seconds of an op, before it, and of what it sends. blocking:
    whether a rank waits for what it sends. buffered: whether a send is over once it lies in a
    buffer."""

    dp: int = 4
    pp: int = 4
    micro_batches: int = 8
    steps: int = 20
    seed: int = 0
    jitter: float = 0.01
    compute: Callable[[At], float] = lambda at: 0.1 if at.way == "forward" else 0.2
    launch: Callable[[At], float] = lambda at: 0.0
    transfer: Callable[[At], float] = lambda at: TRANSFER
    blocking: bool = True
    buffered: bool = False

    def run(self) -> list[Did]:
        """Everything that every rank did; a step begins where the longest before it ended."""
        rng = np.random.default_rng(self.seed)
        done: list[Did] = []
        clock = 0.0
        for step in range(self.steps):
            replicas = [self._replica(dp, step, clock, rng) for dp in range(self.dp)]
            for stage in range(self.pp):
                last = [max(one.end for one in own if one.at.stage == stage) for own in replicas]
                for dp, begin in enumerate(last):
                    at = At(dp, stage, step, 0, "backward")
                    done.append(Did(at, "reduce", begin, max(last) + REDUCE))
            done += [one for own in replicas for one in own]
            clock = max(one.end for one in done) + 0.01
        return done

    def _replica(self, dp: int, step: int, begin: float, rng: np.random.Generator) -> list[Did]:
        """A pipeline of 1F1B, whose ranks wait for what they receive."""
        programs = [list(self._program(stage)) for stage in range(self.pp)]
        clocks, sent = [begin] * self.pp, dict[tuple[int, int, str], tuple[float, float]]()
        done: list[Did] = []
        while any(programs):
            for stage, program in enumerate(programs):
                while program:
                    micro_batch, way = program[0]
                    at = At(dp, stage, step, micro_batch, way)
                    source = stage - 1 if way == "forward" else stage + 1
                    if 0 <= source < self.pp:
                        if (source, micro_batch, way) not in sent:
                            break
                        start, length = sent[source, micro_batch, way]
                        here = clocks[stage]
                        arrives = max(here, start + length) if self.buffered else max(here, start) + length
                        done.append(Did(at, "recv", clocks[stage], arrives))
                        clocks[stage] = arrives
                    program.pop(0)
                    start = clocks[stage] + self.launch(at)
                    end = start + self.compute(at) * max(0.1, 1 + self.jitter * rng.standard_normal())
                    done.append(Did(at, "compute", start, end))
                    clocks[stage] = end
                    target = stage + 1 if way == "forward" else stage - 1
                    if 0 <= target < self.pp:
                        length = self.transfer(at)
                        sent[stage, micro_batch, way] = end, length
                        over = end + (BUFFERED if self.buffered else length)
                        done.append(Did(at, "send", end, over))
                        clocks[stage] = over if self.blocking else end
        return done

    def _program(self, stage: int) -> list[tuple[int, str]]:
        warm = min(self.pp - stage - 1, self.micro_batches)
        order = [(m, "forward") for m in range(warm)]
        for m in range(self.micro_batches - warm):
            order += [(warm + m, "forward"), (m, "backward")]
        return order + [(m, "backward") for m in range(self.micro_batches - warm, self.micro_batches)]


def operation_trace(job: Job, tp: int = 1) -> pl.DataFrame:
    """In the columns of published operation traces, with times as float32 from the start of each
    step."""
    kinds = {"compute": "{}-compute", "send": "{}-send", "recv": "{}-recv", "reduce": "grads-reduce-scatter"}
    done = job.run()
    starts: dict[int, float] = {}
    for one in done:
        starts[one.at.step] = min(starts.get(one.at.step, np.inf), one.start)
    rows = [
        (
            one.at.dp, one.at.stage, (one.at.stage * job.dp + one.at.dp) * tp, one.at.step,
            kinds[one.kind].format(one.at.way), one.start - starts[one.at.step], one.end - one.start,
            one.at.micro_batch, 0 if one.kind == "compute" else -1, one.at.micro_batch,
        )
        for one in done
    ]  # fmt: skip
    columns = {
        "dp_rank": pl.Int8, "stage": pl.Int8, "rank": pl.Int16, "step": pl.Int64, "optype": pl.String,
        "start_ts": pl.Float32, "duration": pl.Float32, "seq_id": pl.Int32, "mc": pl.Int8, "mb_id": pl.Int8,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=columns, orient="row").with_columns(pl.col("optype").cast(pl.Categorical))


def write_trace(folder: Path, job: Job) -> tuple[Path, Path]:
    """The trace and its meta file."""
    trace, meta = folder / "trace.parquet", folder / "meta.yaml"
    operation_trace(job).write_parquet(trace)
    meta.write_text(f"trial_name: made\ndp_size: {job.dp}\npp_size: {job.pp}\ntp_size: 1\nvpp_size: 1\n")
    return trace, meta


def plan_of(job: Job) -> Plan:
    """A plan of the job's shape."""
    model = ModelSpec(family="gpt", num_layers=job.pp, hidden=8, num_heads=2, vocab=9, max_sequence=16)
    workload = Workload(micro_batch=job.dp, num_micro_batches=job.micro_batches, sequence=16)
    schedule = generate("1f1b", Shape(ranks=job.pp, micro_batches=job.micro_batches))
    step = Step.of(model, workload, Strategy(), Layout.of(pp=job.pp, dp=job.dp), schedule)
    return assemble_plan(step, Hosts(ranks_per_host=1, rate=1e9))


def spans_of_job(job: Job) -> pl.DataFrame:
    """As Plait's recorder writes them: receives are waits, sends are under way on their own."""
    rows: list[tuple[object, ...]] = []
    for one in replace(job, blocking=False).run():
        at, letter = one.at, "F" if one.at.way == "forward" else "B"
        rank = at.stage * job.dp + at.dp
        name, kind, site = {
            "compute": (f"mlp{at.stage}.{letter}0", "compute", "mlp"),
            "send": (f"{at.stage}SEND_{letter}{at.micro_batch}", "transfer", "transfer"),
            "recv": (f"{at.stage}RECV_{letter}{at.micro_batch}", "idle", "transfer"),
            "reduce": (f"reduce mlp{at.stage}", "comm", "mlp"),
        }[one.kind]
        size = 64 if kind in ("transfer", "comm") else 0
        seq = at.micro_batch if kind == "compute" else 0
        rows.append((at.step, rank, kind, name, seq, site, at.stage, at.micro_batch, at.way, one.start, one.end, size))
    columns = {
        "step": pl.Int64, "rank": pl.Int64, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
        "layer": pl.Int64, "slice": pl.Int64, "direction": pl.String, "start": pl.Float64, "end": pl.Float64,
        "bytes": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=columns, orient="row")


def write_run(folder: Path, job: Job, *, hosts: int = 0) -> Path:
    """A run's folder: plan, spans in a file for each rank, metrics. hosts: in the rank table; 0:
    none."""
    from plait.core.topology.rank_table import RankTable

    plan = plan_of(job)
    plan.write(folder / "plan.json")
    spans = spans_of_job(job)
    (folder / "timeline").mkdir(parents=True)
    for (rank,), own in spans.group_by("rank"):
        own.write_parquet(
            folder / "timeline" / f"rank-{int(str(rank)):05d}-step-{job.steps:08d}.parquet",
            metadata={"plait.timeline.version": "1", "plait.plan": plan.key},
        )
    if hosts:
        names = tuple(f"h{n}" for n in range(hosts))
        RankTable(names, job.dp * job.pp // hosts).write(folder / "rank_table.json")
    return folder


def spans_of(*rows: Mapping[str, object]) -> pl.DataFrame:
    """Spans as a recording has them, of rows in which only what matters is told."""
    usual = {
        "step": 1, "rank": 0, "kind": "compute", "name": "mlp0.F0", "seq": 0, "site": "mlp", "layer": 0, "slice": 0,
        "direction": "forward", "start": 0.0, "end": 1.0, "bytes": 8, "axis": "", "group": "", "lane": "processor",
        "meeting": None,
    }  # fmt: skip
    return pl.DataFrame([{**usual, **row} for row in rows], schema=SPANS)


def recording_of(spans: pl.DataFrame, layout: Layout, **more: Any) -> Recording:
    """Those spans and the sums of them alone."""
    return Recording(
        grid=grid_of(layout), rollup=rollup_of(spans).cast(ROLLUP), meetings=meetings_of(spans),  # type: ignore[arg-type]
        spans=spans, **more,
    )  # fmt: skip
