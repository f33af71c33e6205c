"""One rank of ``recorder.py``: a job's steps, recorded and not, in turns, over the same weights and wires;
the agent runs while they are recorded."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.core.base.env import RankEnv
from plait.core.base.process import process_memory
from plait.core.job.plan import Plan
from plait.core.record.ring import RECORD, RecordKind
from plait.core.runs.progress import Missing
from plait.train.comm.flight import LoggedWire
from plait.train.comm.wire import Wire
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.feed import micro_batches
from plait.train.engine.groups import Groups
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import train_step
from plait.train.machine.gpu import device_of
from plait.train.machine.rank_process import run_and_end
from plait.train.machine.threads import pin_cores
from plait.train.record.metrics import DeviceRates, Meter
from plait.train.record.recorder import Recorder, open_recorder

DEVICE = device_of(None)
WARM, LONG = 4, 120.0
"""Rounds before the first that counts, at least, and seconds, at most, in which the agent writes its first
files."""


def bare(wire: Wire) -> Wire:
    """Without its records."""
    return wire.wire if isinstance(wire, LoggedWire) else wire  # type: ignore[return-value]


def unrecorded(groups: Groups) -> Groups:
    """The same wires, bare."""
    shards = {axis: bare(wire) for axis, wire in groups.shards.items()}
    return replace(groups, tp=bare(groups.tp), world=bare(groups.world), tied=bare(groups.tied), shards=shards)


class Bench:
    """The job of a run's folder on this rank, which the host's agent watches."""

    def __init__(self, folder: Path, rank: RankEnv) -> None:
        plan = Plan.read(folder / "plan.json")
        assert plan.job is not None
        self.speaks = rank.rank == 0
        self.recorder = open_recorder(folder, rank, plan.key, DEVICE, Missing("the ring"))
        self.on = assemble(plan, rank.rank, DEVICE, recorder=self.recorder)
        self.off = replace(self.on, recorder=None, groups=unrecorded(self.on.groups))
        self.optimizer = Optimizer(self.on.models, self.on.gradients)
        work = plan.workload
        self.meter = Meter(plan, plan.job.train.global_batch_size, DeviceRates("cpu", "cpu", 1, 1e11, 1e11))
        torch.manual_seed(0)
        tokens = torch.randint(0, plan.model.vocab, (work.micro_batch * work.num_micro_batches, work.sequence))
        ids = torch.arange(len(tokens))
        self.batches = self.on.own(micro_batches(tokens, tokens.roll(-1, 1), ids, work.micro_batch, 0))
        self.done, self.records = 0, 0

    def run(self, *, recorded: bool) -> None:
        """A step, with all that it leaves under way."""
        part = self.on if recorded else self.off
        self._switch(part)
        if recorded:
            self.recorder.begin_step(self.done)
        part.pipeline.prefetch()
        train_step(part.step, self.optimizer, self.batches, learning_rate=1e-4, clip=1.0)
        if recorded and self.speaks:  # as a run's session
            records = self.recorder.records()
            self.meter.metrics(1.0, records)
            self.records = len(records.table)
        elif recorded:
            self.recorder.close_step()
        self.done += recorded
        if part.shards:
            part.shards.settle()

    def _switch(self, part: RankPart) -> None:
        """Shards and lanes are the same objects for both."""
        if shards := part.shards:
            shards.recorder, shards.wires = part.recorder, part.groups.wires
        for lane in part.lanes._lanes.values():
            if not hasattr(lane, "recorded"):
                lane.recorded = lane.messages  # type: ignore[attr-defined]
            lane.messages = lane.recorded if part.recorder else None  # type: ignore[attr-defined]

    def alone(self) -> float:
        """Seconds that a step's records take by themselves: written, read back, made metrics of. The least of
        several."""
        recorder, found = Recorder(DEVICE), list[float]()
        name = recorder.ring.name("alone")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(self.records):
                recorder.end(recorder.begin(RecordKind.COMPUTE, name))
            self.meter.metrics(1.0, recorder.records())
            found.append(time.perf_counter() - start)
        return min(found)

    def figures(self) -> dict[str, float]:
        """How much there is of everything."""
        return {
            "records_per_step": self.records,
            "steps": self.done,
            "alone_seconds_per_step": self.alone(),
            "ring_bytes_per_step": self.records * RECORD.size,
            "ring_bytes": self.recorder.ring.header.capacity * RECORD.size,
        }


class Agent:
    """That of these ranks, led by rank 0: it runs while steps are recorded."""

    def __init__(self, pid: int, timeline: Path, leads: bool) -> None:
        self.pid, self.timeline, self.leads = pid, timeline, leads

    def go(self, on: bool) -> float:
        """Let it run or stand still; its processor seconds so far."""
        if not self.leads:
            return 0.0
        os.kill(self.pid, signal.SIGCONT if on else signal.SIGSTOP)
        return self.seconds()

    def seconds(self) -> float:
        """Of all its threads (proc(5), schedstat)."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9 if self.leads else 0.0

    def largest_mib(self) -> float:
        """The most that was resident so far."""
        used = process_memory(self.pid)
        assert used, "the agent has ended"
        return used.peak / 2**20

    def has_written(self) -> bool:
        """Whether there are files; all ranks hear the same."""
        found = torch.tensor([float(any(self.timeline.glob("rank-*.parquet")))])
        dist.broadcast(found, 0)
        return bool(found.item())


def timed(bench: Bench, agent: Agent, *, recorded: bool) -> tuple[float, float, float]:
    """Seconds of a step on the slowest rank; processor seconds of both ranks; of the agent."""
    dist.barrier()
    before = agent.go(recorded)
    start, cpu = time.perf_counter(), time.process_time()
    bench.run(recorded=recorded)
    wall, spent = time.perf_counter() - start, time.process_time() - cpu
    both = torch.tensor([wall, spent], dtype=torch.float64)
    slowest = both.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(both)
    return slowest[0].item(), both[1].item(), agent.seconds() - before


def main() -> None:
    """Rank 0 writes what was measured to the file named first."""
    out, rounds, folder, pid = sys.argv[1:]
    torch.set_num_threads(1)
    rank = RankEnv.read()
    pin_cores(*rank.place_among_cores, threads=1)
    dist.init_process_group("gloo")
    bench = Bench(Path(folder), rank)
    agent = Agent(int(pid), Path(folder) / "timeline", rank.rank == 0)
    times: dict[str, list[Any]] = {"wall": [], "cpu": [], "agent_seconds": []}
    began, warm = time.monotonic(), 0
    while warm < WARM or not agent.has_written():
        bench.run(recorded=True)
        bench.run(recorded=False)
        warm += 1
        if time.monotonic() - began > LONG:
            raise SystemExit("the agent writes nothing")
    start, first = agent.seconds(), agent.largest_mib()
    for number in range(int(rounds)):
        both = {on: timed(bench, agent, recorded=on) for on in ((True, False) if number % 2 else (False, True))}
        for at, name in enumerate(("wall", "cpu")):
            times[name].append([both[True][at], both[False][at]])
        times["agent_seconds"].append(both[True][2])
    agent.go(True)
    bench.recorder.ring.close()
    result = {**times, "agent_start_seconds": start, "agent_first_mib": first, **bench.figures()}
    if bench.on.shards:
        bench.on.shards.stop()
    bench.on.lanes.close()
    if rank.rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    run_and_end(main)
