"""One run on one rank, from its plan to its last checkpoint: measure what the plan leaves open, resume,
train."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plait.core.base.env import RankEnv, this_host
from plait.core.base.errors import CheckpointError, JobError, NotFinite
from plait.core.job.plan import Plan
from plait.core.job.refine import refine
from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import NATIVE
from plait.core.runs.epoch import Epoch
from plait.core.runs.host_memory import memory_of
from plait.core.runs.memory_peaks import PROCESS, TENSORS, told
from plait.train.checkpoint.checkpoints import Checkpoints, Restored
from plait.train.checkpoint.huggingface import load as load_huggingface
from plait.train.checkpoint.memory import MemoryCheckpoints
from plait.train.comm.objects import gather
from plait.train.comm.world import first_does, new_group
from plait.train.data.sets import prepare_corpus
from plait.train.data.stream import Stream
from plait.train.engine.agreement import agree
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.compiling import compile_ahead
from plait.train.engine.feed import Feed
from plait.train.engine.finite import check_state
from plait.train.engine.learning_rate import LearningRate
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.steps import evaluate, train_step
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.record.metrics import Meter
from plait.train.record.recorder import open_recorder
from plait.train.report import Reporter
from plait.train.tune.measure import measure
from plait.train.tune.timing import matrix_rate


class Session:
    """Everything one rank needs; ``train`` is the whole run. Made by all ranks at the same point."""

    def __init__(
        self, plan: Plan, folder: Path, rank: RankEnv, device: RankDevice, report: Reporter, control: Control
    ) -> None:
        assert plan.job is not None, "a run has a job"
        job = plan.job
        self.job, self.folder, self.rank, self.report, self.control = job, folder, rank.rank, report, control
        control.doing("preparing the corpus", patient=True)
        self.feed = Feed(job, self._prepared())
        control.doing("building the model")
        self._meter = device.memory_meter()
        self._told: list[Any] = []
        self.recorder = open_recorder(folder, rank, plan.key, device, report.missing("the ring"))
        if not NATIVE:
            report.say("records are written in Python, two to four times as slowly: no compiler built the writer in C")
        part = assemble(plan, rank.rank, device, recorder=self.recorder, eval_batches=self.feed.evaluations)
        agree(part)
        if job.train.init_from:
            load_huggingface(part.models, Path(job.train.init_from))
        self.optimizer = Optimizer(part.models, part.gradients, job.train, part.matrices)
        self.part = self._settled(part)
        self._doubtful = 0
        """Step of the newest checkpoint, as long as no finite step was made from it."""
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            self.optimizer.held,
            keep=job.train.keep_checkpoints,
            group=new_group() if dist.is_initialized() else None,
            beside=self._meter.taken,
            epoch=Epoch.mine(folder),
        )
        self.checkpoints.before_it_counts = report.sync
        control.writing = lambda: self.checkpoints.writing
        self.memory = self._memory(rank)

    def train(self) -> int:
        """Train to the job's last step, or until asked to stop. Returns the exit status."""
        self.control.doing("resuming", patient=True)
        start, steps = self._resume(), self.job.train.steps
        for line in self.feed.stream.train.told(steps * self.job.train.global_batch_size):
            self.report.say(line)
        if start >= steps:
            self.report.say(f"{self.folder} is already trained for {start} steps; raise train.steps to go on")
            return 0
        began = time.perf_counter()
        try:
            done = self._steps(start)
            check_state(self.optimizer, self.part.groups, done)
        except NotFinite as error:
            raise NotFinite(f"{error} {self._where_to_go_on()}".rstrip()) from None
        self._write(done, wait=True)
        if self.memory:
            self.memory.finish()
        self.recorder.ring.close()
        tokens = (done - start) * self.job.train.global_batch_size * self.job.data.sequence_length
        stopped = done < steps
        seconds = time.perf_counter() - began
        self.report.end(done, stopped=stopped, seconds=seconds, tokens=tokens, plan=self.part.plan)
        return self.control.status if stopped else 0

    # ---- getting ready ----

    def _prepared(self) -> Stream:
        """The corpus, prepared by rank 0, opened by all."""
        corpus = self.folder / "corpus"
        first_does(lambda: prepare_corpus(self.job.data, corpus, self.report.say), "corpus")
        return Stream.open(self.job, corpus)

    def _settled(self, part: RankPart) -> RankPart:
        """The part under a plan that leaves nothing open; the plan is kept, and its hash is the run's."""
        if part.plan.strategy.compile:
            self._compile(part)
        if part.plan.strategy.cuda_graphs and not part.device.captures:
            raise JobError(f"true, and {part.device.description} captures nothing", key="strategy.cuda_graphs",
                           fix='Use "auto" or false')  # fmt: skip
        if not part.plan.choices.any:
            return part
        self.control.doing("measuring")
        found = measure(part, part.cut(self.feed.step(0, part.rows)), self.job.train.steps)
        plan = refine(part.plan, found)
        self.report.choice(found, plan)
        if self.rank == 0:
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

    def _memory(self, rank: RankEnv) -> MemoryCheckpoints | None:
        """Copies in the memory of hosts, where the job wants them and a launcher keeps them."""
        if not self.job.run.memory_every:
            return None
        if not all(gather(memory_of(self.folder).is_dir())):  # made by the launcher of a run here or in a lab
            self.report.say("warning: run.memory_every has no effect here")
            return None
        several = rank.world_size > rank.local_world_size and self.job.run.memory_neighbour
        return MemoryCheckpoints(
            memory_of(self.folder) / this_host(), plan=self.part.plan.key,
            neighbour=rank.local_world_size if several else 0, group=new_group() if dist.is_initialized() else None,
        )  # fmt: skip

    def _restored(self) -> Restored | None:
        """The newest state there is: of the hosts' memory, or on disk."""
        step = self.memory.newest() if self.memory else 0
        if self.memory and step > self.checkpoints.newest():
            self.report.say(f"the state after step {step} is still in memory")
            return Restored(step, self.memory.restore(step, self.optimizer.state()), ())
        return self.checkpoints.restore(self.optimizer.state())

    def _resume(self) -> int:
        """Load the newest usable state, if there is one; returns the number of steps already done."""
        restored = self._restored()
        for step, name in self.checkpoints.passed_over:
            if step > (restored.step if restored else 0):
                where = f"after step {restored.step}" if restored else "from the beginning"
                self.report.say(f"steps after step {step} were not finite: its checkpoint is passed over ({name}), and "
                                f"the run goes on {where}")  # fmt: skip
        if restored is None:
            return 0
        for warning in restored.warnings:
            self.report.say(f"warning: {warning}")
        step = restored.step
        position = self.feed.going_on(step, restored.state.get("position")).position(step)
        stream = self.feed.stream.resumed(restored.state.get("data"), position)
        if stream is None:
            raise CheckpointError(f"{self.folder / 'checkpoints'} belongs to other data than {self.job.data.told}")
        self.feed = replace(self.feed, stream=stream).going_on(step, position)
        self.optimizer.loaded(step, skipped=restored.state.get("skipped", 0))
        self.recorder.begins(step)
        if self.part.shards:
            self.part.shards.publish()
        self.report.say(f"resuming after step {step}")
        self._doubtful = step
        return step

    # ---- training ----

    def _steps(self, start: int) -> int:
        """Train from ``start``; returns how many steps are done."""
        job, part, rate = self.job.train, self.part, LearningRate.of(self.job.train)
        peak = self.job.run.peak_flops or matrix_rate(part.device, torch_dtype(job.precision))
        meter = Meter.of(part.plan, job.global_batch_size, peak)
        part.device.synchronize()
        part.device.anchor(anew=True)  # what came before may have taken hours
        self.report.begin(start)
        self.control.save_from_now_on()
        done, asked = start, False
        while done < job.steps and not asked:
            self.control.doing(f"step {done + 1}", step=done)
            is_measured = done == start + 1  # the first also makes what stays
            if is_measured:
                self._meter.begin(part, self.optimizer)
            began = time.perf_counter()  # with its data, as the step's record
            self.recorder.begins(done)
            part.pipeline.ahead()  # parameters are gathered while data are loaded
            with self.recorder.during(RecordKind.DATA, "data"):
                batches = part.cut(self.feed.step(done, part.rows))
            result = train_step(
                replace(part.step, on_nan=job.on_nan),
                self.optimizer,
                batches,
                learning_rate=rate(done),
                clip=job.clip_grad,
                stop=bool(self.control),
            )
            asked, seconds = result.stop, time.perf_counter() - began
            self._doubtful = self._doubtful if self.optimizer.skipped_in_a_row else 0
            if is_measured:
                self._meter.end()
            metrics = {"step": done + 1, **result.metrics, "learning_rate": rate(done)}
            if self.report.speaks:
                metrics |= meter.metrics(seconds, self.recorder.records())
            else:  # nobody hears it here; the host's agent reads the ring
                self.recorder.close_step()
            done += 1
            self._after(done, metrics, asked)
        return done

    def _after(self, done: int, metrics: dict[str, Any], asked: bool) -> None:
        """What is due after a step: an evaluation, a line, a checkpoint."""
        job, last = self.job.train, done == self.job.train.steps
        if peaks := self._peaks(end=last or asked):
            for name, sizes in zip((TENSORS, PROCESS), zip(*peaks, strict=True), strict=True):
                metrics[name] = told(sizes, [mesh.ranks for mesh in self.part.plan.layout.meshes])
        if self.part.evaluator and (done % job.eval_every == 0 or last):
            metrics |= self._evaluate(self.part.evaluator, done)
        self.report.step(metrics, show=done % job.log_every == 0 or last or "eval_loss" in metrics)
        skipping = self.optimizer.skipped_in_a_row
        if job.checkpoint_every and done % job.checkpoint_every == 0 and not last and not asked:
            if skipping:
                self.report.say(f"warning: no checkpoint after step {done}: the last {skipping} updates were left out")
            else:
                self._save(done)
        elif self.memory and not skipping and done % self.job.run.memory_every == 0 and not last and not asked:
            self.control.doing(f"copying the state after step {done}", step=done)
            check_state(self.optimizer, self.part.groups, done)
            self.memory.keep(done, self.optimizer.state(), self._state(done))
            if problem := self.memory.failure:
                self.report.warn(
                    f"warning: the state after step {done} is not in memory ({problem}). Training goes on."
                )

    def _peaks(self, *, end: bool) -> Sequence[Sequence[int | None]]:
        """What memory ranks have taken at most (``Taken``), if that is news: what they said beside a
        checkpoint, and at the end, when nobody waits for another step, what they say now."""
        if end:
            return gather(self._meter.taken())
        known, self._told = self._told, self.checkpoints.told
        return [] if self._told is known else self._told

    def _evaluate(self, evaluator: PipelineExecutor, done: int) -> dict[str, float]:
        """The loss of every set, and the mean over all their targets."""
        self.control.doing(f"evaluating after step {done}", step=done)
        with self.recorder.during(RecordKind.EVALUATION, "evaluation", step=done - 1), self.recorder.paused():
            losses = {name: evaluate(evaluator.run, self.part.groups, self.part.cut(batches))
                      for name, batches in self.feed.evaluation(self.part.rows)}  # fmt: skip
        counts = {one.name: one.count for one in self.feed.stream.evaluation}
        loss = sum(losses[name] * count for name, count in counts.items()) / sum(counts.values())
        if not math.isfinite(loss):
            check_state(self.optimizer, self.part.groups, done)
            self.report.say(f"warning: the evaluation loss after step {done} is {loss}; the weights are finite")
        return {"eval_loss": loss} | {f"eval_loss/{name}": each for name, each in losses.items() if name}

    def _save(self, done: int) -> None:
        """Start a checkpoint; if the one before could not be written (a full disk), that costs the
        checkpoint, or the run if the job says so."""
        check_state(self.optimizer, self.part.groups, done)
        try:
            self._write(done)
        except CheckpointError as error:
            if self.job.run.on_save_failure == "stop" or not self.folder.is_dir():
                raise
            self.report.say(f"warning: {str(error).rstrip('.')}. Training goes on.")

    def _write(self, done: int, *, wait: bool = False) -> None:
        """Begin to write a checkpoint; wait: and end."""
        self.control.doing(f"saving after step {done}", step=done, patient=True)
        if self.folder.is_dir() and not (self.folder / "checkpoints").is_dir():
            self.report.say(
                f"warning: {self.folder / 'checkpoints'} was removed while the run was on: it is made again"
            )
        finite = not self.optimizer.skipped_in_a_row
        with self.recorder.during(RecordKind.CHECKPOINT, "checkpoint", step=done - 1):
            self.checkpoints.save(done, self.optimizer.state(), self._state(done), wait=wait, prune=finite)
        self._doubtful = done

    def _where_to_go_on(self) -> str:
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

    def _state(self, done: int) -> dict[str, Any]:
        skipped, position = self.optimizer.skipped, self.feed.position(done)  # updates are counted without those
        return {"data": self.feed.identity, "position": position, "plan": self.part.plan.key, "skipped": skipped}
