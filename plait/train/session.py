"""One run on one rank, from a job file to its last checkpoint: prepare, plan, tune, resume, train."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.core.dry_run import peak_activations
from plait.core.env import RankEnv
from plait.core.errors import CheckpointError, JobError
from plait.core.job import Job
from plait.core.pipeline_plan import PipelinePlan
from plait.core.plan import Plan
from plait.core.segment_costs import SegmentCosts
from plait.core.strategy import Strategy
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.huggingface import load as load_huggingface
from plait.train.comm.wire import Wire
from plait.train.data.corpus import Batches, Corpus
from plait.train.data.prepare import prepare
from plait.train.data.tokenizer import load_tokenizer
from plait.train.engine.assembly import assemble
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import one_place
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import LearningRate, Optimizer
from plait.train.engine.steps import Run, evaluate, make_executor, micro_batches, train_step, whole
from plait.train.machine.device import Device
from plait.train.model.transformer import Share, Transformer
from plait.train.record.journal import Journal
from plait.train.record.recorder import Recorder
from plait.train.report import Reporter
from plait.train.tune.pipeline import choose_pipeline_slices, choose_shard_overlap, choose_slack
from plait.train.tune.slices import Candidate, agree, choose_slices, matrix_rate

DTYPES = {"fp32": torch.float32, "bf16-mixed": torch.bfloat16, "fp64": torch.float64}
STOPPED = 130  # the shell's status for Ctrl-C


class Flag(Protocol):
    """Something that may turn true at any moment."""

    def __bool__(self) -> bool: ...


class Session:
    """Everything one rank needs; ``train`` is the whole run."""

    def __init__(self, folder: Path, rank: RankEnv) -> None:
        self.folder, self.rank = folder, rank
        self.job = Job.read(folder / "job.toml")
        if self.job.world_size != rank.world_size:
            raise JobError(
                f"the job needs {self.job.world_size} ranks, and {rank.world_size} were started", key="strategy"
            )
        self.pipeline = PipelinePlan.read(folder / "pipeline.json") if self.job.pipelined else None

    def train(self, device: Device, wire: Wire, stop: Flag) -> int:
        """Train to the job's last step, or until asked to stop. Returns the exit status."""
        self.device, self.wire = device, wire
        job = self.job
        with Reporter(self.folder, speaks=self.rank.rank == 0, steps=job.train.steps) as self.report:
            self._build()
            self.plan = self._make_plan()
            start = self._resume()
            if start >= job.train.steps:
                self.report.say(f"{self.folder} is already trained for {start} steps; raise train.steps to go on")
                return 0
            return self._steps(start, stop)

    # ---- getting ready ----

    def _build(self) -> None:
        job, device = self.job, self.device.torch_device
        tokenizer = load_tokenizer(job.data.tokenizer)
        corpus = self._corpus()
        spec = job.model_spec(tokenizer.vocab)
        settings: dict[str, Any] = {"sequence": job.data.sequence_length, "seed": job.data.seed}
        self.batches = Batches(corpus, "train", batch=job.train.global_batch_size, **settings)
        self.eval_batches = Batches(corpus, "eval", batch=job.micro_batch, **settings) if job.train.eval_every else None
        self.recorder, self.part = Recorder(self.device), None
        dtype, seed = DTYPES[job.train.precision], job.train.seed
        if self.pipeline:
            self.part = assemble(
                spec,
                job.base_strategy,
                self.pipeline,
                self.rank.rank,
                self.device,
                micro_batch=job.micro_batch,
                sequence=job.data.sequence_length,
                dtype=dtype,
                seed=seed,
                recorder=self.recorder,
                eval_batches=len(self._evaluation()) if self.eval_batches else 0,
            )
            self.share: Share = self.part.models
            self.gradients, self.groups = self.part.gradients, self.part.groups
        else:
            self.model = Transformer(
                spec, job.base_strategy, tp_rank=self.rank.rank, seed=seed, dtype=dtype, device=device
            )
            self.share, self.groups = self.model, one_place(self.wire)
            self.gradients = Gradients(self.model)
        if job.train.init_from:
            load_huggingface(self.share, Path(job.train.init_from))
        self.optimizer = Optimizer(
            self.share, self.gradients, betas=job.train.betas, eps=job.train.eps, weight_decay=job.train.weight_decay
        )

    def _corpus(self) -> Corpus:
        """Prepared by rank 0 of every machine's folder, opened by all."""
        data, out = self.job.data, self.folder / "corpus"
        if self.rank.rank == 0:
            self.report.say(f"preparing {', '.join(data.sources)}")
            prepare(
                data.sources,
                load_tokenizer(data.tokenizer),
                out,
                pattern=data.pattern,
                eval_fraction=data.eval_fraction,
            )
        if dist.is_initialized():
            dist.barrier()
        return Corpus.open(out)

    def _make_plan(self) -> Plan:
        """The run's plan: what an earlier start wrote, or a new one after measuring the slicings."""
        path = self.folder / "plan.json"
        if agree(path.is_file()):
            plan = Plan.of_job(path, self.job.fingerprint)
            pipeline = self.pipeline.to_dict() if self.pipeline else None
            if _shape(plan.pipeline, self.job) == _shape(pipeline, self.job) and self.job.allows(plan.strategy):
                self._follow(plan)
                return plan  # otherwise the run goes on in another shape
        strategy, costs, note = self.job.base_strategy, None, "as the job says"
        tunes = "auto" in (self.job.strategy.slices, self.job.strategy.sequence_parallel)
        if tunes and any(tp > 1 for _, tp in self.job.degrees):
            strategy, costs, note = self._tune()
        if self.part and self.part.shards and self.job.tunes_sharding:
            self.part = self.part.changed(strategy, costs)
            timed = choose_shard_overlap(self.part, self._micro_batches(0))
            self._forget()
            strategy = min(timed, key=lambda one: one.seconds).strategy
            self.report.choice(timed, strategy)
        if self.part:
            self._settle(strategy, costs)
        plan = Plan(
            job=self.job.to_dict(),
            job_fingerprint=self.job.fingerprint,
            model=self.share.spec,
            strategy=strategy,
            layout=self.job.layout,
            costs=costs,
            pipeline=self.part.plan.to_dict() if self.part else None,
            notes={"slices": note, "device": self.device.description},
        )
        if self.rank.rank == 0:
            plan.write(path)
        return plan

    def _follow(self, plan: Plan) -> None:
        """Take over what an earlier start has measured."""
        if self.part and plan.pipeline:
            self.part = self.part.changed(plan.strategy, plan.costs, PipelinePlan.from_dict(plan.pipeline).schedule)

    def _tune(self) -> tuple[Strategy, SegmentCosts, str]:
        timed, costs = self._timed()
        self._forget()
        best = min(timed, key=lambda one: one.seconds).strategy
        self.report.choice(timed, best)
        return best, costs, f"fastest of {len(timed)} timed candidates"

    def _timed(self) -> tuple[list[Candidate], SegmentCosts]:
        if self.part:
            return choose_pipeline_slices(self.part, self._micro_batches(0), self.recorder)
        asked = self.job.strategy
        sequence_parallel = (False, True) if asked.sequence_parallel == "auto" else (asked.sequence_parallel,)
        slices = None if asked.slices == "auto" else (self.job.base_strategy.p1, self.job.base_strategy.p2)
        batch = self._micro_batches(0)[0]
        return choose_slices(
            self._executor,
            self.job.base_strategy,
            batch,
            sequence_parallel=sequence_parallel,
            slices=slices,
            recorder=self.recorder,
        )

    def _forget(self) -> None:
        """Gradients of steps that were only timed, also those that are still being reduced."""
        if self.part and self.part.shards:
            self.part.shards.complete()
        self.gradients.zero()
        self.recorder.take()  # what was timed belongs to no step

    def _settle(self, strategy: Strategy, costs: SegmentCosts | None) -> None:
        """Put the part in its final order: its slices, and the slack of a schedule that leaves it open."""
        assert self.part is not None
        self.part = self.part.changed(strategy, costs)
        if self.job.measures_slack:
            schedule = choose_slack(self.part, self._micro_batches(0), self.recorder)
            self._forget()
            self.part = self.part.changed(strategy, costs, schedule)
            alive = ", ".join(str(peak) for peak in peak_activations(schedule).values())
            self.report.say(
                f"slack from measured times: at most {alive} micro-batches alive on the stages, one after the other"
            )

    def _resume(self) -> int:
        """Load the newest usable checkpoint, if there is one; returns the number of steps already done."""
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        assert not isinstance(group, int)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", self.optimizer.held, keep=self.job.train.keep_checkpoints, group=group
        )
        step = self.checkpoints.latest()
        if step is None:
            return 0
        state = self.checkpoints.load(step, self.optimizer.state())
        if state["data"] != self.batches.identity:
            raise CheckpointError(
                f"{self.folder / 'checkpoints'} belongs to other data than {', '.join(self.job.data.sources)}"
            )
        self.optimizer.loaded(step)
        if self.part and self.part.shards:
            self.part.shards.publish()
        self.report.say(f"resuming after step {step}")
        return step

    def _executor(
        self,
        strategy: Strategy,
        *,
        costs: SegmentCosts | None = None,
        recorder: Recorder | None = None,
        train: bool = True,
    ) -> SegmentExecutor:
        return make_executor(
            self.model,
            strategy,
            self.wire,
            gradients=self.gradients if train else None,
            device=self.device,
            costs=costs,
            batch=self.job.micro_batch,
            sequence=self.job.data.sequence_length,
            recorder=recorder,
            seed=self.job.train.seed,
        )

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        tokens, targets = self.batches.batch_at(step)
        return self._own(
            micro_batches(tokens, targets, torch.from_numpy(self.batches.sample_ids(step)), self.job.micro_batch, step)
        )

    def _own(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return self.part.own(batches) if self.part else batches

    def _runs(self) -> tuple[Run, Run]:
        """What trains on micro-batches, and what evaluates them."""
        plan, part = self.plan, self.part
        if part:
            return part.pipeline.run, (part.evaluator or part.pipeline).run
        small = replace(plan.strategy, p1=min(plan.strategy.p1, self.job.micro_batch))
        return (
            whole(self._executor(plan.strategy, costs=plan.costs, recorder=self.recorder)),
            whole(self._executor(small, costs=plan.costs, train=False)),
        )

    # ---- training ----

    def _steps(self, start: int, stop: Flag) -> int:
        job, plan = self.job.train, self.plan
        run, self._evaluator = self._runs()
        rate = LearningRate.of(job)
        tokens = job.global_batch_size * self.job.data.sequence_length
        peak = self.job.run.peak_flops or matrix_rate(self.device, DTYPES[job.precision])
        work = self.share.spec.step_flops(self.job.data.sequence_length, job.global_batch_size) / self.rank.world_size
        journal = Journal(
            self.folder / "timeline", rank=self.rank.rank, plan_hash=plan.hash, keep_steps=self.job.run.timeline_steps
        )
        asked, began = False, time.perf_counter()
        self.report.begin(start)
        for step in range(start, job.steps):
            if self.part:
                self.part.pipeline.ahead()  # parameters are gathered while data are loaded
            result = train_step(
                run,
                self.optimizer,
                self.groups,
                self._micro_batches(step),
                sequence_parallel=plan.strategy.sequence_parallel,
                learning_rate=rate(step),
                clip=job.clip_norm,
                stop=bool(stop),
                shards=self.part.shards if self.part else None,
            )
            spans = self.recorder.take()
            comm = journal.add(step, spans)
            done = step + 1
            metrics: dict[str, Any] = {
                "step": done,
                "loss": result.loss,
                "norm": result.norm,
                "learning_rate": rate(step),
                "seconds": result.seconds,
                "tokens_per_second": tokens / result.seconds,
                "mfu": work / result.seconds / peak,
                "communication_seconds": comm.total,
                "hidden": comm.fraction,
            }
            if self.part:
                metrics["idle"] = sum(span.end - span.start for span in spans if span.kind == "idle") / result.seconds
            if self.eval_batches and (done % job.eval_every == 0 or done == job.steps):
                metrics["eval_loss"] = self._evaluate()
            asked = result.stop
            self.report.step(metrics, show=done % job.log_every == 0 or done == job.steps or "eval_loss" in metrics)
            if job.checkpoint_every and done % job.checkpoint_every == 0 and done < job.steps and not asked:
                self._save(done)
            if asked:
                break
        else:
            done = job.steps
        self.checkpoints.save(done, self.optimizer.state(), self._state(), wait=True)
        journal.close()
        self.report.end(
            done,
            stopped=asked and done < job.steps,
            seconds=time.perf_counter() - began,
            tokens=(done - start) * tokens,
            plan=plan,
        )
        return STOPPED if asked and done < job.steps else 0

    def _evaluate(self) -> float:
        return evaluate(self._evaluator, self.groups, self._own(self._evaluation()))

    def _evaluation(self) -> list[MicroBatch]:
        """The evaluation's micro-batches, always the same."""
        assert self.eval_batches is not None
        found: list[MicroBatch] = []
        for tokens, targets in self.eval_batches.eval_batches(self.job.train.eval_batches):
            found += micro_batches(tokens, targets, torch.arange(len(tokens)), len(tokens), 0)
        return found

    def _save(self, done: int) -> None:
        """Start a checkpoint; if the one before could not be written (a full disk), that costs the
        checkpoint, not the run."""
        try:
            self.checkpoints.save(done, self.optimizer.state(), self._state())
        except CheckpointError as error:
            self.report.say(f"warning: {error} Training goes on; older checkpoints are intact.")

    def _state(self) -> dict[str, Any]:
        return {"data": self.batches.identity, "plan": self.plan.hash}


def _shape(pipeline: dict[str, Any] | None, job: Job) -> dict[str, Any] | None:
    """What must be the same for a run to go on by its plan; slack that was measured need not be."""
    return {**pipeline, "schedule": None} if pipeline and job.measures_slack else pipeline
