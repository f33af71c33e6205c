"""One run on one rank: its part of the plan, measured where that leaves something open; the state it goes on
from; steps, evaluations, checkpoints. What is due when is its caller's: ``plait train`` (``session``), or a
loop of one's own (``own_loop``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.base.errors import CheckpointError, JobError
from plait.core.cluster.mfu import dense_peak, known_device
from plait.core.job.plan import Plan
from plait.core.job.refine import refine
from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import NATIVE
from plait.core.runs.epoch import Epoch
from plait.core.runs.host_memory import memory_of
from plait.core.runs.memory_peaks import PROCESS, TENSORS, told
from plait.train.checkpoint.checkpoints import Checkpoints, Restored
from plait.train.checkpoint.folder import LOSS, Keep
from plait.train.checkpoint.initial import load_initial
from plait.train.checkpoint.memory import MemoryCheckpoints
from plait.train.comm.objects import gather
from plait.train.comm.world import new_group
from plait.train.engine.agreement import agree
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.compiling import compile_ahead
from plait.train.engine.finite import check_state
from plait.train.engine.grad_sync import Wishes
from plait.train.engine.inflight import MicroBatch, has_mean
from plait.train.engine.learning_rate import LearningRate
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.steps import evaluate, train_step
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.record.metrics import DeviceRates, Meter
from plait.train.record.recorder import open_recorder
from plait.train.report import Reporter
from plait.train.tune.measure import measure
from plait.train.tune.timing import matrix_rate

Sample = Callable[[RankPart], Sequence[MicroBatch]]
"""A rank's micro-batches of a step, to time candidates with."""


NO_TARGETS = "the weights of its targets are 0 in sum"
"""Of a mean over nothing, which is unknown and not 0."""


def evaluated(loss: float | None) -> dict[str, float]:
    """What a checkpoint says of the evaluation after its step; nothing where there was none."""
    return {} if loss is None or not math.isfinite(loss) else {LOSS: loss}


class Started(NamedTuple):
    """A rank that has joined the others: its plan, the run's folder, who it is, its device, its voice, and
    what it hears."""

    plan: Plan
    folder: Path
    rank: RankEnv
    device: RankDevice
    report: Reporter
    control: Control


class RankRun:
    """Everything one rank needs to train. Made by all ranks at the same point. sample: of a step.
    evaluations: micro-batches of an evaluation. done: steps so far."""

    def __init__(self, started: Started, sample: Sample, *, evaluations: int = 0) -> None:
        plan, folder, rank, device, report, control = started
        assert plan.job is not None, "a run has a job"
        job = plan.job
        self.job, self.folder, self.rank, self.report, self.control = job, folder, rank, report, control
        self.done = 0
        control.doing("building the model")
        self._meter = device.memory_meter()
        self._told: list[Any] = []
        self.recorder = open_recorder(folder, rank, plan.key, device, report.missing("the ring"))
        if not NATIVE:
            report.say("records are written in Python, two to four times as slowly: no compiler built the writer in C")
        part = assemble(plan, rank.rank, device, recorder=self.recorder, eval_batches=evaluations)
        agree(part)
        if job.train.init_from:
            load_initial(part.models, Path(job.train.init_from))
        self.optimizer = Optimizer(part.models, part.gradients, job.train, part.matrices)
        self.part = self._settled(part, sample)
        self.rate = LearningRate.of(job.train)
        self._rates: DeviceRates | None = None
        """Nothing before ``begin``."""
        self._first = 0
        self._told_of_no_targets = self._told_of_no_mfu = False
        self._doubtful = 0
        """Step of the newest checkpoint, as long as no finite step was made from it."""
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            self.optimizer.held,
            keep=Keep(job.train.keep_checkpoints, job.train.keep_every, job.train.keep_best),
            group=new_group() if dist.is_initialized() else None,
            beside=self._meter.taken,
            epoch=Epoch.mine(folder),
        )
        self.checkpoints.before_it_counts = report.sync
        control.writing = lambda: self.checkpoints.writing
        self.memory = self._memory()

    # ---- getting ready ----

    def _settled(self, part: RankPart, sample: Sample) -> RankPart:
        """The part under a plan that leaves nothing open; the plan is kept, and its hash is the run's."""
        if part.plan.strategy.compile:
            self._compile(part)
        if part.plan.strategy.cuda_graphs and not part.device.captures:
            raise JobError(f"true, and {part.device.description} captures nothing", key="strategy.cuda_graphs",
                           fix='Use "auto" or false')  # fmt: skip
        if not part.plan.choices.any:
            return part
        self.control.doing("measuring")
        found = measure(part, sample(part), self.job.train.steps)
        plan = refine(part.plan, found)
        self.report.choice(found, plan)
        if self.rank.rank == 0:
            plan.write(self.folder / "plan.json")
        settled = part.under(plan)
        agree(settled)
        self.recorder.ring.obeys(plan.key)
        return settled

    def _compile(self, part: RankPart) -> None:
        """Before anything is timed. Raises JobError where it is not possible."""
        self.control.doing("compiling", patient=True)
        done = compile_ahead(part)
        if done.problem:
            raise JobError(f"true, and compiling fails ({done.problem})", key="strategy.compile",
                           fix='Use "auto", which goes on without, or false')  # fmt: skip
        self.report.say(str(done))

    def _memory(self) -> MemoryCheckpoints | None:
        """Copies in the memory of hosts, where the job wants them and a launcher keeps them."""
        if not self.job.run.memory_every:
            return None
        if not all(gather(memory_of(self.folder).is_dir())):  # made by the launcher of a run here or in a lab
            self.report.say("warning: run.memory_every has no effect here")
            return None
        rank = self.rank
        several = rank.world_size > rank.local_world_size and self.job.run.memory_neighbour
        return MemoryCheckpoints(
            memory_of(self.folder) / this_host(), plan=self.part.plan.key,
            neighbour=rank.local_world_size if several else 0, group=new_group() if dist.is_initialized() else None,
        )  # fmt: skip

    # ---- going on ----

    def load(self, goes_on: Callable[[int, Mapping[str, Any]], bool], *, of: str) -> Mapping[str, Any] | None:
        """Load the newest usable state, if there is one; what was saved beside it. goes_on: whether the data
        can go on after so many steps, by that; of: which data, for people. Raises CheckpointError if they
        cannot."""
        self.control.doing("resuming", patient=True)
        restored = self._restored()
        for step, name in self.checkpoints.passed_over:
            if step > (restored.step if restored else 0):
                where = f"after step {restored.step}" if restored else "from the beginning"
                self.report.say(f"steps after step {step} were not finite: its checkpoint is passed over ({name}), and "
                                f"the run goes on {where}")  # fmt: skip
        if restored is None:
            return None
        for warning in restored.warnings:
            self.report.say(f"warning: {warning}")
        if not goes_on(restored.step, restored.state):
            raise CheckpointError(
                f"{self.folder / 'checkpoints'} belongs to other data than {of}: a source that was trained on "
                "is gone, or has other tokens now (its files, or the part that is kept for evaluation, have changed). "
                "Sources may be added and weights changed; for all else name another run with run.name=NAME"
            )
        self.done = self._doubtful = restored.step
        self.optimizer.loaded(self.done, skipped=restored.state.get("skipped", 0))
        self.recorder.begins(self.done)
        if self.part.shards:
            self.part.shards.publish()
        self.report.say(f"resuming after step {self.done}")
        return restored.state

    def _restored(self) -> Restored | None:
        """The newest state there is: of the hosts' memory, or on disk."""
        step = self.memory.newest() if self.memory else 0
        if self.memory and step > self.checkpoints.newest():
            self.report.say(f"the state after step {step} is still in memory")
            return Restored(step, self.memory.restore(step, self.optimizer.state()), ())
        return self.checkpoints.restore(self.optimizer.state())

    def where_to_go_on(self) -> str:
        """From which checkpoint the next start goes on, in a sentence. One from which no finite step was made
        would lead to the same numbers and is set aside. Empty where a disk in trouble does not tell."""
        aside = ""
        try:
            if self._doubtful and (name := self.checkpoints.pass_over(self._doubtful)):
                aside = f"No finite step was made from the checkpoint of step {self._doubtful}: it is now {name}. "
            newest = self.checkpoints.newest()
        except CheckpointError as error:
            return str(error)
        if newest:
            return f"{aside}The last good checkpoint is that of step {newest}."
        return f"{aside}There is no checkpoint {'before it' if aside else 'yet'}; the next start begins anew."

    # ---- training ----

    def begin(self, *, again: bool = False) -> None:
        """Before the first step of this start. again: the last step's metrics are to be written anew."""
        part = self.part
        self._rates = self._device_rates()
        self._first = self.done
        part.device.synchronize()
        part.device.anchor(anew=True)  # what came before may have taken hours
        self.report.begin(self.done - again)
        self.control.save_from_now_on()

    def _device_rates(self) -> DeviceRates:
        """The device's rates; says on which peak MFU rests where that may surprise."""
        device, precision, stated = self.part.device, self.job.train.precision, self.job.run.peak_flops
        kind, name = device.torch_device.type, device.name
        tf32 = precision == "fp32" and device.tf32
        known = known_device(name, self.job.cluster.file) if self.report.speaks else None
        peak = stated or dense_peak(known, precision, tf32=tf32)
        if kind != "cpu" and not peak:
            self.report.note(
                f"MFU is not shown: no description of a cluster has {name}'s dense peak in "
                f"{'TF32' if tf32 else precision}; run.peak_flops says what it is"
            )
        elif tf32 and not stated:
            self.report.note(f"fp32 products are rounded to TF32 here: MFU is of TF32's peak, {peak:.4g} FLOP/s")
        ranks = device.sharing(self.rank.local_world_size) if kind != "cpu" else 1
        return DeviceRates(name, kind, ranks, peak, matrix_rate(device, torch_dtype(precision)))

    def step(
        self, load: Callable[[], Sequence[MicroBatch]], learning_rate: float | None = None
    ) -> tuple[dict[str, Any], bool]:
        """One step on the micro-batches that ``load`` gives, this rank's part of them: its metrics, and
        whether any rank was asked to stop. learning_rate: in place of the job's."""
        part, number, rate = self.part, self.done, learning_rate
        rate = self.rate(number) if rate is None else rate
        if self._rates is None:
            self.begin()
        assert self._rates is not None
        self.control.doing(f"step {number + 1}", step=number)
        is_measured = number == self._first + 1  # the first also makes what stays
        if is_measured:
            self._meter.begin(part, self.optimizer)
        began = time.perf_counter()  # with its data, as the step's record
        self.recorder.begins(number)
        part.pipeline.ahead()  # parameters are gathered while data are loaded
        with self.recorder.during(RecordKind.DATA, "data"):
            batches = load()
        result = train_step(
            replace(part.step, on_nan=self.job.train.on_nan),
            self.optimizer,
            batches,
            learning_rate=rate,
            clip=self.job.train.clip_grad,
            wishes=Wishes(stop=bool(self.control)),
        )
        seconds = time.perf_counter() - began
        if not has_mean(batches):
            self._say_no_loss(number + 1)
        self._doubtful = self._doubtful if self.optimizer.skipped_in_a_row else 0
        if is_measured:
            self._meter.end()
        metrics = {"step": number + 1, **result.metrics, "learning_rate": rate}
        if self.report.speaks:
            meter = Meter(part.plan, self.job.train.batches.at(number), self._rates)
            metrics |= meter.metrics(seconds, self.recorder.records())
            if self._rates.peak and metrics["mfu"] is None:
                self._say_no_mfu(number + 1, self._rates.peak)
        else:  # nobody hears it here; the host's agent reads the ring
            self.recorder.close_step()
        self.done = number + 1
        return metrics, result.wishes.stop

    def _say_no_mfu(self, step: int, peak: float) -> None:
        if not self._told_of_no_mfu:
            self._told_of_no_mfu = True
            self.report.note(
                f"MFU is left out where it would be above 100%, as in step {step}: {peak:.3g} FLOP/s "
                f"({'run.peak_flops' if self.job.run.peak_flops else 'its maker'}) is not what the device reaches"
            )

    def _say_no_loss(self, step: int) -> None:
        if not self._told_of_no_targets:
            self._told_of_no_targets = True
            self.report.note(
                f"warning: step {step} has no loss: {NO_TARGETS}. Its gradients are 0, so that only momentum and "
                "weight decay move the weights. This is said once; metrics.jsonl has null for the loss of each."
            )

    def peaks(self, *, end: bool) -> dict[str, Any]:
        """What memory ranks have taken at most (``Taken``), as metrics, if that is news: what they said
        beside a checkpoint, and at the end, when nobody waits for another step, what they say now."""
        if end:
            found: Sequence[Sequence[int | None]] = gather(self._meter.taken())
        else:
            known, self._told = self._told, self.checkpoints.told
            found = [] if self._told is known else self._told
        ranks = [mesh.ranks for mesh in self.part.plan.layout.meshes]
        columns = zip(*found, strict=True)
        return {name: told(sizes, ranks) for name, sizes in zip((TENSORS, PROCESS), columns, strict=False)}

    def evaluate(
        self, evaluator: PipelineExecutor, load: Callable[[], Mapping[str, Sequence[MicroBatch]]], *,
        stops: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:  # fmt: skip
        """Mean losses over sets of micro-batches, which ``load`` gives, this rank's part of them; None if any
        rank ``stops`` meanwhile."""
        done, losses = self.done, dict[str, float]()
        self.control.doing(f"evaluating after step {done}", step=done)
        with self.recorder.during(RecordKind.EVALUATION, "evaluation", step=done - 1), self.recorder.paused():
            sets = load()
            for name, batches in sets.items():
                if (loss := evaluate(evaluator, self.part.groups, batches, stops)) is None:
                    return None
                losses[name] = loss
        if empty := [name for name, batches in sets.items() if not has_mean(batches)]:
            of = f" of {', '.join(empty)}" if any(empty) else ""
            self.report.say(f"warning: the evaluation{of} after step {done} has no loss: {NO_TARGETS}")
        if wrong := [loss for name, loss in losses.items() if name not in empty and not math.isfinite(loss)]:
            check_state(self.optimizer, self.part.groups, done)
            self.report.say(f"warning: the evaluation loss after step {done} is {wrong[0]}; the weights are finite")
        return losses

    # ---- saving ----

    @property
    def saves(self) -> bool:
        """Whether the last update was made: what was left out is not saved."""
        return not self.optimizer.skipped_in_a_row

    def save(self, beside: Mapping[str, Any]) -> None:
        """Start a checkpoint, with what stands beside it; if the one before could not be written (a full
        disk), that costs the checkpoint, or the run if the job says so."""
        if not self.saves:
            skipped = self.optimizer.skipped_in_a_row
            self.report.say(f"warning: no checkpoint after step {self.done}: the last {skipped} updates were left out")
            return
        check_state(self.optimizer, self.part.groups, self.done)
        try:
            self.write(beside)
        except CheckpointError as error:
            if self.job.run.on_save_failure == "stop" or not self.folder.is_dir():
                raise
            self.report.say(f"warning: {str(error).rstrip('.')}. Training goes on.")

    def write(self, beside: Mapping[str, Any], *, wait: bool = False) -> None:
        """Begin to write a checkpoint; wait: and end."""
        done = self.done
        self.control.doing(f"saving after step {done}", step=done, patient=True)
        if self.folder.is_dir() and not (self.folder / "checkpoints").is_dir():
            self.report.say(
                f"warning: {self.folder / 'checkpoints'} was removed while the run was on: it is made again"
            )
        prune = self.saves and not self._doubtful  # of one from which no step was made yet nobody knows
        with self.recorder.during(RecordKind.CHECKPOINT, "checkpoint", step=done - 1):
            self.checkpoints.save(done, self.optimizer.state(), self._state(beside), wait=wait, prune=prune)
        self._doubtful = done

    def copy(self, beside: Mapping[str, Any]) -> None:
        """Copy the state to the memory of hosts."""
        assert self.memory is not None
        done = self.done
        self.control.doing(f"copying the state after step {done}", step=done)
        check_state(self.optimizer, self.part.groups, done)
        self.memory.keep(done, self.optimizer.state(), self._state(beside))
        if problem := self.memory.failure:
            self.report.warn(f"warning: the state after step {done} is not in memory ({problem}). Training goes on.")

    def _state(self, beside: Mapping[str, Any]) -> dict[str, Any]:
        skipped = self.optimizer.skipped  # updates are counted without them
        return {**beside, "plan": self.part.plan.key, "skipped": skipped}

    def end(self) -> None:
        """What copies and records is over."""
        if self.memory:
            self.memory.finish()
        self.recorder.ring.close()

    def close(self) -> None:
        """End what runs beside it, whether or not the run has ended well."""
        self.recorder.ring.close()
        if self.part.shards:
            self.part.shards.stop()
        self.optimizer.close()
        self.part.lanes.close()
