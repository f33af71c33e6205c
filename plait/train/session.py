"""Run the training loop of ``plait train`` on one rank: the job's data, step after step;
evaluations, checkpoints and log lines when due."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.base.env import RankEnv
from plait.core.base.errors import NotFinite
from plait.core.job.plan import Plan
from plait.train.comm.world import run_on_rank_zero
from plait.train.data.sets import prepare_corpus
from plait.train.data.stream import Stream
from plait.train.engine.feed import Feed
from plait.train.engine.finite import check_state
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice
from plait.train.rank_run import RankRun, Started, evaluated
from plait.train.report import Reporter


class Session:
    """The training loop; ``train`` performs the whole run. Created by all ranks at the same
    point."""

    def __init__(
        self, plan: Plan, folder: Path, rank: RankEnv, device: RankDevice, report: Reporter, control: Control
    ) -> None:
        assert plan.settings is not None, "a run has a job"
        self.settings, self.folder, self.report, self.control = plan.settings, folder, report, control
        self._loss: float | None = None
        """The loss of the evaluation after the last step; None if that step had no evaluation."""
        self._due: dict[str, Any] | None = None
        """Metrics of the last step, if its evaluation was omitted because the run was asked to
        stop. The next start evaluates first."""
        control.set_activity("preparing the corpus", patient=True)
        self.feed = Feed(plan.settings, self._prepared())
        self.run = RankRun(
            Started(plan, folder, rank, device, report, control),
            lambda part: part.cut(self.feed.sample(part.rows)),
            evaluations=min(self.feed.evaluations, plan.workload.num_micro_batches),  # at most a step's at once
        )

    def train(self) -> int:
        """Train to the job's last step, or until a stop is requested. Return the exit status."""
        run, steps = self.run, self.settings.train.steps
        state = run.load(self._resume_data, data_name=self.settings.data.paths_text)
        self._due = state.get("evaluation_due") if state and run.part.evaluator else None
        start = run.done
        for line in self.feed.stream.train.summary_lines(self.settings.train.batches.before(steps)):
            self.report.say(line)
        if start >= steps and not self._due:
            self.report.say(f"{self.folder} is already trained for {start} steps; raise train.steps to go on")
            return 0
        began = time.perf_counter()
        try:
            self._steps()
            check_state(run.optimizer, run.part.groups, run.done)
        except NotFinite as error:
            raise NotFinite(f"{error} {run.resume_hint()}".rstrip()) from None
        run.write(self._data_state(), wait=True)
        run.end()
        tokens = (self.feed.position(run.done) - self.feed.position(start)) * self.settings.data.sequence_length
        stopped = run.done < steps or self._due is not None
        seconds = time.perf_counter() - began
        self.report.end(run.done, stopped=stopped, seconds=seconds, tokens=tokens, plan=run.part.plan)
        return self.control.status if stopped else 0

    def _resume_data(self, step: int, state: Mapping[str, Any]) -> bool:
        """Continue in the data after a checkpoint's position. Return False if the checkpoint
        belongs to other data."""
        position = self.feed.resumed_at(step, state.get("position")).position(step)
        stream = self.feed.stream.resumed(state.get("data"), position)
        if stream is not None:
            self.feed = replace(self.feed, stream=stream).resumed_at(step, position)
        return stream is not None

    def _prepared(self) -> Stream:
        """Have rank 0 prepare the corpus; open it on every rank."""
        corpus = self.folder / "corpus"
        run_on_rank_zero(
            lambda: prepare_corpus(self.settings.data, corpus, self.report.say, self.report.progress), "corpus"
        )
        return Stream.open(self.settings, corpus)

    def _steps(self) -> None:
        """Train until the last step, or until any rank is asked to stop."""
        run, part, asked = self.run, self.run.part, False
        run.begin(again=self._due is not None)
        if self._due is not None:  # also save its checkpoint again, now with the loss that selects the best checkpoint
            asked = self._after(self._due, asked)
        while run.done < self.settings.train.steps and not asked:
            metrics, asked = run.step(lambda: part.cut(self.feed.step(run.done, part.rows)))
            asked = self._after(metrics, asked)

    def _after(self, metrics: dict[str, Any], stopping: bool) -> bool:
        """Do what is due after a step: an evaluation, a log line, a checkpoint. Return True if any
        rank was asked to stop."""
        run, job, done = self.run, self.settings.train, self.run.done
        last = done == job.steps
        metrics |= run.peaks(end=last or stopping)
        is_due, self._loss, self._due = self._due is not None, None, None
        if run.part.evaluator and (is_due or done % job.eval_every == 0 or last):
            stopping = self._evaluate(metrics, stopping)
        self.report.step(metrics, show=done % job.log_every == 0 or last or "eval_loss" in metrics)
        if last or stopping:
            return stopping
        if job.checkpoint_every and done % job.checkpoint_every == 0:
            run.save(self._data_state())
        elif run.memory and run.saves and done % self.settings.run.memory_every == 0:
            run.copy(self._data_state())
        return stopping

    def _evaluate(self, metrics: dict[str, Any], stopping: bool) -> bool:
        """Evaluate and add the losses to the step's metrics, or record the evaluation as due at the
        next start. Return True if any rank was asked to stop."""
        evaluator, done = self.run.part.evaluator, self.run.done
        assert evaluator is not None
        if stopping or (found := self._evaluated(evaluator)) is None:
            self.report.say(f"the evaluation after step {done} is left out, and due at the next start: "
                            "the run was asked to stop")  # fmt: skip
            self._due = metrics
            return True
        metrics |= found
        self._loss = found["eval_loss"]
        return False

    def _evaluated(self, evaluator: PipelineExecutor) -> dict[str, float] | None:
        """Return the loss of every evaluation set, and the mean over all their targets; None if any
        rank was asked to stop during the evaluation."""
        part, counts = self.run.part, {one.name: one.targets for one in self.feed.stream.evaluation}

        def load() -> dict[str, list[MicroBatch]]:
            return {name: part.cut(batches) for name, batches in self.feed.evaluation(part.rows)}

        losses = self.run.evaluate(evaluator, load, stops=lambda: bool(self.control))
        if losses is None:
            return None
        total = sum(losses[name] * count for name, count in counts.items() if count)
        mean = total / targets if (targets := sum(counts.values())) else math.nan
        return {"eval_loss": mean} | {f"eval_loss/{name}": each for name, each in losses.items() if name}

    def _data_state(self) -> dict[str, Any]:
        """Return the data position, the evaluation loss and a due evaluation, as stored in a
        checkpoint."""
        due = {} if self._due is None else {"evaluation_due": self._due}
        position = self.feed.position(self.run.done)
        return {"data": self.feed.identity, "position": position, **evaluated(self._loss), **due}
