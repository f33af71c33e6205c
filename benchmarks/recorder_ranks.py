"""One rank of ``recorder.py``: a job's steps, recorded and not, in turns, over the same weights and wires."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.core.cluster import Hosts
from plait.core.env import RankEnv
from plait.core.job import Job
from plait.core.ring import RECORD, Kind
from plait.core.timeline import Timeline
from plait.plan.make import make_plan
from plait.train.comm.log import LoggedWire
from plait.train.comm.wire import Wire
from plait.train.engine.assembly import Part, assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.groups import Groups
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.machine.device import open_device
from plait.train.machine.rank_process import run_and_end
from plait.train.machine.threads import take_cores
from plait.train.record.journal import MOST, PART, Journal
from plait.train.record.meter import Meter
from plait.train.record.missing import Missing
from plait.train.record.recorder import open_recorder

DEVICE = open_device("cpu", 0)
STEPS = 2  # in a row: what a step leaves under way belongs to the next
VOCAB = 256


def bare(wire: Wire) -> Wire:
    """Without its records."""
    return wire.wire if isinstance(wire, LoggedWire) else wire  # type: ignore[return-value]


def unrecorded(groups: Groups) -> Groups:
    """The same wires, bare."""
    shards = {axis: bare(wire) for axis, wire in groups.shards.items()}
    return replace(groups, tp=bare(groups.tp), world=bare(groups.world), tied=bare(groups.tied), shards=shards)


class Bench:
    """A job on this rank. folder: of its ring and timeline."""

    def __init__(self, values: dict[str, Any], rank: RankEnv, folder: Path) -> None:
        job = Job.from_dict(values)
        plan = make_plan(job, Hosts(ranks_per_host=1, rate=1e9), vocab=VOCAB)
        self.missing, self.folder = Missing("the timeline"), folder
        self.recorder = open_recorder(folder, rank, plan.hash, DEVICE, self.missing)
        self.on = assemble(plan, rank.rank, DEVICE, recorder=self.recorder)
        self.off = replace(self.on, recorder=None, groups=unrecorded(self.on.groups))
        self.optimizer = Optimizer(self.on.models, self.on.gradients)
        self.journal = Journal(folder / "timeline", rank=rank.rank, plan_hash=plan.hash, keep_steps=200, sample=100)
        work = plan.workload
        self.meter = Meter.of(plan, job.train.global_batch_size, 1e11)
        torch.manual_seed(0)
        tokens = torch.randint(0, VOCAB, (work.micro_batch * work.num_micro_batches, work.sequence))
        ids = torch.arange(len(tokens))
        self.batches = self.on.own(micro_batches(tokens, tokens.roll(-1, 1), ids, work.micro_batch, 0))
        self.done, self.records = 0, 0

    def run(self, *, recorded: bool) -> None:
        """Some steps."""
        part = self.on if recorded else self.off
        self._switch(part)
        for _ in range(STEPS):
            if recorded:
                self.recorder.begins(self.done)
            start = time.perf_counter()
            part.pipeline.ahead()
            train_step(part.step, self.optimizer, self.batches, learning_rate=1e-4, clip=1.0)
            if recorded:
                records = self.recorder.records()
                self.meter.metrics(1.0, records)
                self.journal.add(self.done, records, time.perf_counter() - start)
                self.done, self.records = self.done + 1, len(records.table)
        if part.shards:
            part.shards.settle()

    def _switch(self, part: Part) -> None:
        """Shards and lanes are the same objects for both."""
        if shards := part.shards:
            shards.recorder, shards.wires = part.recorder, dict(part.groups.shards)
        for lane in part.lanes._lanes.values():
            if not hasattr(lane, "recorded"):
                lane.recorded = lane.messages  # type: ignore[attr-defined]
            lane.messages = lane.recorded if part.recorder else None  # type: ignore[attr-defined]

    def alone(self) -> float:
        """Seconds that a step's records take by themselves: written, read back, made metrics of. The least of
        several."""
        name, found = self.recorder.ring.name("alone"), list[float]()
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(self.records):
                self.recorder.end(self.recorder.begin(Kind.COMPUTE, name))
            self.meter.metrics(1.0, self.recorder.records())
            found.append(time.perf_counter() - start)
        return min(found)

    def written(self) -> dict[str, float]:
        """What the journal's thread costs a step, and bytes on the disk, once there is a part's worth."""
        steps = len(self.journal._steps)
        Timeline(()).write_parquet(self.folder / "warm.parquet")  # imports what writing needs
        start = time.process_time()
        self.journal.close()
        seconds = (time.process_time() - start) / steps
        timeline = self.folder / "timeline"
        spans = sum(path.stat().st_size for path in timeline.glob("*.parquet"))
        sums = sum(path.stat().st_size for path in timeline.glob("rollup/*/*.parquet"))
        row = RECORD.size + 8
        return {
            "records_per_step": self.records,
            "alone_seconds_per_step": self.alone(),
            "ring_bytes_per_step": self.records * RECORD.size,
            "span_file_bytes_per_step": spans / steps,
            "sums_file_bytes_per_step": sums / steps,
            "writing_seconds_per_step": seconds,
            "memory_bytes_at_most": self.recorder.ring.header.capacity * RECORD.size
            + (MOST + 2) * PART * self.records * row,
        }


def main() -> None:
    """Rank 0 writes what was measured to the file named first."""
    out, rounds, text = sys.argv[1:]
    torch.set_num_threads(1)
    rank = RankEnv.read()
    take_cores(*rank.place_among_cores, threads=1)
    dist.init_process_group("gloo")
    times: dict[str, list[list[float]]] = {"wall": [], "cpu": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(json.loads(text), rank, Path(folder))
        for number in range(int(rounds) + 2):
            pair: dict[bool, list[float]] = {}
            for recorded in (True, False) if number % 2 else (False, True):
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                bench.run(recorded=recorded)
                spent = torch.tensor(
                    [time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64
                ) / STEPS  # fmt: skip
                slowest = spent.clone()
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                dist.all_reduce(spent)
                pair[recorded] = [slowest[0].item(), spent[1].item()]
            if number >= 2:
                for at, name in enumerate(times):
                    times[name].append([pair[True][at], pair[False][at]])
        result = {**times, **bench.written(), "missing": bench.missing.steps}
        if bench.on.shards:
            bench.on.shards.stop()
        bench.on.lanes.close()
    if rank.rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    run_and_end(main)
