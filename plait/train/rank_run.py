"""Manage one run on one rank: its part of the plan, candidate measurements, resuming, steps,
evaluations, checkpoints. The caller decides what is due when: ``plait train`` (``session``), or a
custom training loop (``own_loop``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv
from plait.core.base.errors import CheckpointError, JobError
from plait.core.cluster.mfu import dense_peak, known_device
from plait.core.job.plan import Plan
from plait.core.job.refine import refine
from plait.core.record.ring import RecordKind
from plait.core.record.ring_writer import NATIVE
from plait.core.runs.attempts import Epoch
from plait.core.runs.host_memory import memory_of
from plait.core.runs.memory_peaks import PROCESS, TENSORS, format_peaks
from plait.train.checkpoint.checkpoints import Checkpoints, Restored
from plait.train.checkpoint.folder import LOSS, Keep
from plait.train.checkpoint.initial import load_initial
from plait.train.checkpoint.memory import MemoryCheckpoints
from plait.train.comm.tree import gather
from plait.train.comm.world import new_group
from plait.train.engine.agreement import agree, compile_ahead
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.finite import check_state
from plait.train.engine.inflight import MicroBatch, has_mean
from plait.train.engine.optimizer import LearningRate, Optimizer
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.engine.steps import Requests, evaluate, train_step
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice, torch_dtype
from plait.train.model.expert_layer import ExpertLayer, router_metrics
from plait.train.record.metrics import DeviceRates, Meter
from plait.train.record.recorder import open_recorder
from plait.train.report import Reporter
from plait.train.tune.measure import measure
from plait.train.tune.timing import matrix_rate

Sample = Callable[[RankPart], Sequence[MicroBatch]]
"""Function that returns a rank's micro-batches of one step, on which candidates are timed."""


NO_TARGETS = "the weights of its targets add up to 0"
"""The reason why a mean loss is unknown, and not 0."""


def evaluated(loss: float | None) -> dict[str, float]:
    """Return the evaluation loss as an entry of a checkpoint's state; an empty dict without a
    finite loss."""
    return {} if loss is None or not math.isfinite(loss) else {LOSS: loss}


class Started(NamedTuple):
    """A rank that has joined the others: its plan, the run's folder, its ranks and world size, its
    device, its log output, and the control that receives stop requests."""

    plan: Plan
    folder: Path
    rank: RankEnv
    device: RankDevice
    report: Reporter
    control: Control


class RankRun:
    """Everything that one rank needs to train. Created by all ranks at the same point. sample:
    returns the micro-batches of a step. evaluations: the number of micro-batches in an evaluation.
    done: steps so far."""

    def __init__(self, started: Started, sample: Sample, *, evaluations: int = 0) -> None:
        plan, folder, rank, device, report, control = started
        assert plan.settings is not None, "a run has a job"
        self.settings, train = plan.settings, plan.settings.train
        self.folder, self.rank, self.report, self.control = folder, rank, report, control
        self.done = 0
        self._begins("building the model")
        self._meter = device.memory_meter()
        self._reported_peaks: list[Any] = []
        self.recorder = open_recorder(folder, rank, plan.key, device, report.missing("the ring"))
        if not NATIVE:
            report.say(
                "records are written in Python, which takes two to four times as long: the C writer was not compiled"
            )
        part = assemble(plan, rank.rank, device, recorder=self.recorder, eval_batches=evaluations)
        agree(part)
        if train.init_from:
            report.say(f"loading the weights of {train.init_from}")
            load_initial(part.models, Path(train.init_from))
        self.optimizer = Optimizer(part.models, part.gradients, train, part.matrices)
        self.part = self._settled(part, sample)
        self.rate = LearningRate.of(train)
        self._rates: DeviceRates | None = None
        """Reference rates of the device; None before ``begin``."""
        self._first = 0
        self._warned_no_targets = self._noted_no_mfu = False
        self._doubtful = 0
        """Step of the newest checkpoint, until a finite step was made from it; 0 afterwards."""
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            self.optimizer.held,
            keep=Keep(train.keep_checkpoints, train.keep_every, train.keep_best),
            group=new_group() if dist.is_initialized() else None,
            statistics=self._meter.peaks,
            epoch=Epoch.mine(folder),
        )
        self.checkpoints.before_commit = report.sync
        control.writing = lambda: self.checkpoints.writing
        self.memory = self._memory()

    # ---- getting ready ----

    def _begins(self, stage: str, *, patient: bool = False) -> None:
        """Tell the launcher and the user of a stage before the first step. patient: as for
        ``Control.set_activity``."""
        self.control.set_activity(stage, patient=patient)
        self.report.say(stage)

    def _settled(self, part: RankPart, sample: Sample) -> RankPart:
        """Return the part under a plan without open choices, after measuring the candidates. The
        plan is written to the run's folder, and its hash becomes the run's."""
        if part.plan.strategy.compile:
            self._compile(part)
        if part.plan.strategy.cuda_graphs and not part.device.captures:
            raise JobError(f"true, and {part.device.description} captures nothing", key="strategy.cuda_graphs",
                           fix='Use "auto" or false')  # fmt: skip
        if not part.plan.choices.any:
            return part
        open_choices = [name for name, is_open in vars(part.plan.choices).items() if is_open]
        self._begins(f"timing steps to choose {', '.join(open_choices)}".replace("strategies", "slices"))
        found = measure(part, sample(part), self.settings.train.steps)
        plan = refine(part.plan, found)
        self.report.choice(found, plan)
        if self.rank.rank == 0:
            plan.write(self.folder / "plan.json")
        settled = part.under(plan)
        agree(settled)
        self.recorder.ring.obeys(plan.key)
        return settled

    def _compile(self, part: RankPart) -> None:
        """Compile before anything is timed. Raises JobError if compiling fails."""
        self._begins("compiling the model", patient=True)
        done = compile_ahead(part)
        if done.problem:
            raise JobError(f"true, and compiling fails ({done.problem})", key="strategy.compile",
                           fix='Use "auto", which goes on without, or false')  # fmt: skip
        self.report.say(str(done))

    def _memory(self) -> MemoryCheckpoints | None:
        """Return the copies of the state in host memory; None if the job does not want them, or no
        launcher keeps them."""
        if not self.settings.run.memory_every:
            return None
        if not all(gather(memory_of(self.folder).is_dir())):  # created by a launcher on this machine or in a lab
            self.report.say("warning: run.memory_every has no effect here")
            return None
        rank = self.rank
        several = rank.world_size > rank.local_world_size and self.settings.run.memory_neighbour
        return MemoryCheckpoints(
            memory_of(self.folder) / this_host(), plan=self.part.plan.key,
            neighbour=rank.local_world_size if several else 0, group=new_group() if dist.is_initialized() else None,
        )  # fmt: skip

    # ---- resuming ----

    def load(
        self, can_continue: Callable[[int, Mapping[str, Any]], bool], *, data_name: str
    ) -> Mapping[str, Any] | None:
        """Load the newest usable state, and return what was saved with it; None if there is no
        checkpoint. can_continue: function of the step and the saved state; True if the data can
        continue from there. data_name: a name of the data, for the error message. Raises
        CheckpointError if the data cannot continue."""
        self.control.set_activity("resuming", patient=True)
        restored = self._restored()
        for step, name in self.checkpoints.not_finite:
            if step > (restored.step if restored else 0):
                where = f"after step {restored.step}" if restored else "from the beginning"
                self.report.say(f"steps after step {step} were not finite: its checkpoint is passed over ({name}), and "
                                f"the run goes on {where}")  # fmt: skip
        if restored is None:
            return None
        for warning in restored.warnings:
            self.report.say(f"warning: {warning}")
        if not can_continue(restored.step, restored.state):
            raise CheckpointError(
                f"{self.folder / 'checkpoints'} belongs to other data than {data_name}: a source that was trained on "
                "is gone, or has other tokens now (its files, or the part that is kept for evaluation, have changed). "
                "Sources may be added and weights changed; for all else name another run with run.name=NAME"
            )
        self.done = self._doubtful = restored.step
        self.optimizer.loaded(self.done, skipped=restored.state.get("skipped", 0))
        self.recorder.begin_step(self.done)
        if self.part.shards:
            self.part.shards.publish()
        self.report.say(f"resuming after step {self.done}")
        return restored.state

    def _restored(self) -> Restored | None:
        """Load the newest state: from host memory, or from disk."""
        step, saved = self.memory.newest() if self.memory else 0, self.checkpoints.newest()
        if self.memory and step > saved:
            self.report.say(f"the state after step {step} is still in memory")
            return Restored(step, self.memory.restore(step, self.optimizer.state()), ())
        if saved:
            self.report.say(f"loading the checkpoint of step {saved}")
        return self.checkpoints.restore(self.optimizer.state())

    def resume_hint(self) -> str:
        """Return a sentence on the checkpoint from which the next start resumes. A checkpoint from
        which no finite step was made would give the same numbers again, and is set aside. The
        sentence is the error's text if the disk fails."""
        aside = ""
        try:
            if self._doubtful and (name := self.checkpoints.mark_not_finite(self._doubtful)):
                aside = f"No finite step was made from the checkpoint of step {self._doubtful}: it is now {name}. "
            newest = self.checkpoints.newest()
        except CheckpointError as error:
            return str(error)
        if newest:
            return f"{aside}The last good checkpoint is that of step {newest}."
        return f"{aside}There is no checkpoint {'before it' if aside else 'yet'}; the next start begins anew."

    # ---- training ----

    def begin(self, *, again: bool = False) -> None:
        """Prepare the first step of this start. again: the last step's metrics will be written
        anew."""
        part = self.part
        self._rates = self._device_rates()
        self._first = self.done
        part.device.synchronize()
        part.device.anchor(anew=True)  # the last anchor may be hours old
        self.report.begin(self.done - again)
        self.control.save_from_now_on()

    def _device_rates(self) -> DeviceRates:
        """Return the device's reference rates. Print which peak MFU refers to where that may
        surprise."""
        device, precision, stated = self.part.device, self.settings.train.precision, self.settings.run.peak_flops
        kind, name = device.torch_device.type, device.name
        tf32 = precision == "fp32" and device.tf32
        known = known_device(name, self.settings.devices) if self.report.speaks else None
        peak = stated or dense_peak(known, precision, tf32=tf32)
        if kind != "cpu" and not peak:
            self.report.note(
                f"MFU is not shown: no cluster description has the dense peak of {name} in "
                f"{'TF32' if tf32 else precision}; set it with run.peak_flops"
            )
        elif tf32 and not stated:
            self.report.note(f"fp32 products are rounded to TF32 here: MFU is of TF32's peak, {peak:.4g} FLOP/s")
        ranks = device.sharing(self.rank.local_world_size) if kind != "cpu" else 1
        return DeviceRates(name, kind, ranks, peak, matrix_rate(device, torch_dtype(precision)))

    def step(
        self, load: Callable[[], Sequence[MicroBatch]], learning_rate: float | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Run one step on this rank's micro-batches, which ``load`` returns. Return its metrics,
        and True if any rank was asked to stop. learning_rate: overrides the job's learning rate."""
        part, number, rate = self.part, self.done, learning_rate
        rate = self.rate(number) if rate is None else rate
        if self._rates is None:
            self.begin()
        assert self._rates is not None
        self.control.set_activity(f"step {number + 1}", step=number)
        is_measured = number == self._first + 1  # the first step also allocates memory that stays
        if is_measured:
            self._meter.begin(part, self.optimizer)
        began = time.perf_counter()  # includes loading the data, like the step's record
        self.recorder.begin_step(number)
        part.pipeline.prefetch()  # parameters are gathered while data are loaded
        with self.recorder.during(RecordKind.DATA, "data"):
            batches = load()
        result = train_step(
            replace(part.step, on_nan=self.settings.train.on_nan),
            self.optimizer,
            batches,
            learning_rate=rate,
            clip=self.settings.train.clip_grad,
            requests=Requests(stop=bool(self.control)),
        )
        seconds = time.perf_counter() - began
        if not has_mean(batches):
            self._say_no_loss(number + 1)
        self._doubtful = self._doubtful if self.optimizer.skipped_in_a_row else 0
        if is_measured:
            self._meter.end()
        metrics = {"step": number + 1, **result.metrics, "learning_rate": rate, **self._router_metrics()}
        if self.report.speaks:
            meter = Meter(part.plan, self.settings.train.batches.at(number), self._rates)
            metrics |= meter.metrics(seconds, self.recorder.records())
            if self._rates.peak and metrics["mfu"] is None:
                self._say_no_mfu(number + 1, self._rates.peak)
        else:  # only rank 0 reports; the host's agent reads the ring
            self.recorder.close_step()
        self.done = number + 1
        return metrics, result.requests.stop

    def _router_metrics(self) -> dict[str, float]:
        """Return the metrics of this rank's expert layers; empty if it has none."""
        layers = [layer for model in self.part.models.stages for layer in model.moe.values()]
        return router_metrics(cast("list[ExpertLayer]", layers)) if layers else {}

    def _say_no_mfu(self, step: int, peak: float) -> None:
        if not self._noted_no_mfu:
            self._noted_no_mfu = True
            self.report.note(
                f"MFU is left out where it would be above 100%, as in step {step}: {peak:.3g} FLOP/s "
                f"({'run.peak_flops' if self.settings.run.peak_flops else 'its maker'}) is not what the device reaches"
            )

    def _say_no_loss(self, step: int) -> None:
        if not self._warned_no_targets:
            self._warned_no_targets = True
            self.report.note(
                f"warning: step {step} has no loss: {NO_TARGETS}. Its gradients are 0, so that only momentum and "
                "weight decay move the weights. This is said once; metrics.jsonl has null for the loss of each."
            )

    def peaks(self, *, end: bool) -> dict[str, Any]:
        """Return the ranks' peak memory (``PeakMemory``) as metrics, in bytes: the values gathered
        with the last checkpoint, if they are new. end: gather current values from all ranks, as no
        further step waits."""
        if end:
            found: Sequence[Sequence[int | None]] = gather(self._meter.peaks())
        else:
            known, self._reported_peaks = self._reported_peaks, self.checkpoints.gathered_statistics
            found = [] if self._reported_peaks is known else self._reported_peaks
        ranks = [mesh.ranks for mesh in self.part.plan.layout.meshes]
        columns = zip(*found, strict=True)
        return {name: format_peaks(sizes, ranks) for name, sizes in zip((TENSORS, PROCESS), columns, strict=False)}

    def evaluate(
        self, evaluator: PipelineExecutor, load: Callable[[], Mapping[str, Sequence[MicroBatch]]], *,
        stops: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:  # fmt: skip
        """Return the mean loss of each set of micro-batches; None if ``stops`` returned True on any
        rank meanwhile. load: returns this rank's part of the sets."""
        done, losses = self.done, dict[str, float]()
        self.control.set_activity(f"evaluating after step {done}", step=done)
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
        """True if the last step updated the weights: a state after a skipped update is not
        saved."""
        return not self.optimizer.skipped_in_a_row

    def save(self, extra_state: Mapping[str, Any]) -> None:
        """Start a checkpoint. extra_state: values to save with it. If the checkpoint before could
        not be written (a full disk), print a warning, or raise CheckpointError if the job demands
        it."""
        if not self.saves:
            skipped = self.optimizer.skipped_in_a_row
            self.report.say(f"warning: no checkpoint after step {self.done}: the last {skipped} updates were skipped")
            return
        check_state(self.optimizer, self.part.groups, self.done)
        try:
            self.write(extra_state)
        except CheckpointError as error:
            if self.settings.run.on_save_failure == "stop" or not self.folder.is_dir():
                raise
            self.report.say(f"warning: {str(error).rstrip('.')}. Training goes on.")

    def write(self, extra_state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Start writing a checkpoint. wait: return when it is complete."""
        done = self.done
        self.control.set_activity(f"saving after step {done}", step=done, patient=True)
        if self.folder.is_dir() and not (self.folder / "checkpoints").is_dir():
            self.report.say(f"warning: {self.folder / 'checkpoints'} was removed during the run: it is created again")
        prune = self.saves and not self._doubtful  # keep older ones until a finite step was made from the newest
        with self.recorder.during(RecordKind.CHECKPOINT, "checkpoint", step=done - 1):
            self.checkpoints.save(done, self.optimizer.state(), self._state(extra_state), wait=wait, prune=prune)
        self._doubtful = done

    def copy(self, extra_state: Mapping[str, Any]) -> None:
        """Copy the state to host memory."""
        assert self.memory is not None
        done = self.done
        self.control.set_activity(f"copying the state after step {done}", step=done)
        check_state(self.optimizer, self.part.groups, done)
        self.memory.keep(done, self.optimizer.state(), self._state(extra_state))
        if problem := self.memory.failure:
            self.report.warn(f"warning: the state after step {done} is not in memory ({problem}). Training goes on.")

    def _state(self, extra_state: Mapping[str, Any]) -> dict[str, Any]:
        skipped = self.optimizer.skipped  # not included in the optimizer's count of updates
        return {**extra_state, "plan": self.part.plan.key, "skipped": skipped}

    def end(self) -> None:
        """Finish the copies in host memory and close the recording."""
        if self.memory:
            self.memory.finish()
        self.recorder.ring.close()

    def close(self) -> None:
        """Stop background threads and close the recording, whether or not the run has ended
        well."""
        self.recorder.ring.close()
        if self.part.shards:
            self.part.shards.stop()
        self.optimizer.close()
        self.part.lanes.close()
