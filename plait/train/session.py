"""``plait train`` on one rank: the job's data, step after step, and what is due between them."""

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
from plait.train.comm.world import first_does
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
    """The loop; ``train`` is the whole run. Made by all ranks at the same point."""

    def __init__(
        self, plan: Plan, folder: Path, rank: RankEnv, device: RankDevice, report: Reporter, control: Control
    ) -> None:
        assert plan.job is not None, "a run has a job"
        self.job, self.folder, self.report, self.control = plan.job, folder, report, control
        self._loss: float | None = None
        """Of the evaluation after the last step, if there was one."""
        self._due: dict[str, Any] | None = None
        """Metrics of the last step, where its evaluation was left out since the run was to stop: the next
        start makes it first."""
        control.doing("preparing the corpus", patient=True)
        self.feed = Feed(plan.job, self._prepared())
        self.run = RankRun(
            Started(plan, folder, rank, device, report, control),
            lambda part: part.cut(self.feed.sample(part.rows)),
            evaluations=min(self.feed.evaluations, plan.job.num_micro_batches),  # at a time, as a step
        )

    def train(self) -> int:
        """Train to the job's last step, or until asked to stop. Returns the exit status."""
        run, steps = self.run, self.job.train.steps
        state = run.load(self._goes_on, of=self.job.data.told)
        self._due = state.get("evaluation_due") if state and run.part.evaluator else None
        start = run.done
        for line in self.feed.stream.train.told(self.job.train.batches.before(steps)):
            self.report.say(line)
        if start >= steps and not self._due:
            self.report.say(f"{self.folder} is already trained for {start} steps; raise train.steps to go on")
            return 0
        began = time.perf_counter()
        try:
            self._steps()
            check_state(run.optimizer, run.part.groups, run.done)
        except NotFinite as error:
            raise NotFinite(f"{error} {run.where_to_go_on()}".rstrip()) from None
        run.write(self._beside(), wait=True)
        run.end()
        tokens = (self.feed.position(run.done) - self.feed.position(start)) * self.job.data.sequence_length
        stopped = run.done < steps or self._due is not None
        seconds = time.perf_counter() - began
        self.report.end(run.done, stopped=stopped, seconds=seconds, tokens=tokens, plan=run.part.plan)
        return self.control.status if stopped else 0

    def _goes_on(self, step: int, state: Mapping[str, Any]) -> bool:
        """Go on in the data where a checkpoint was made; whether it is of these data."""
        position = self.feed.going_on(step, state.get("position")).position(step)
        stream = self.feed.stream.resumed(state.get("data"), position)
        if stream is not None:
            self.feed = replace(self.feed, stream=stream).going_on(step, position)
        return stream is not None

    def _prepared(self) -> Stream:
        """The corpus, prepared by rank 0, opened by all."""
        corpus = self.folder / "corpus"
        first_does(lambda: prepare_corpus(self.job.data, corpus, self.report.say, self.report.progress), "corpus")
        return Stream.open(self.job, corpus)

    def _steps(self) -> None:
        """Train from where the run is."""
        run, part, asked = self.run, self.run.part, False
        run.begin(again=self._due is not None)
        if self._due is not None:  # its checkpoint is made again, too, with the loss by which the best is found
            asked = self._after(self._due, asked)
        while run.done < self.job.train.steps and not asked:
            metrics, asked = run.step(lambda: part.cut(self.feed.step(run.done, part.rows)))
            asked = self._after(metrics, asked)

    def _after(self, metrics: dict[str, Any], asked: bool) -> bool:
        """What is due after a step: an evaluation, a line, a checkpoint; whether any rank was asked to stop
        by now."""
        run, job, done = self.run, self.job.train, self.run.done
        last = done == job.steps
        metrics |= run.peaks(end=last or asked)
        is_due, self._loss, self._due = self._due is not None, None, None
        if run.part.evaluator and (is_due or done % job.eval_every == 0 or last):
            asked = self._evaluate(metrics, asked)
        self.report.step(metrics, show=done % job.log_every == 0 or last or "eval_loss" in metrics)
        if last or asked:
            return asked
        if job.checkpoint_every and done % job.checkpoint_every == 0:
            run.save(self._beside())
        elif run.memory and run.saves and done % self.job.run.memory_every == 0:
            run.copy(self._beside())
        return asked

    def _evaluate(self, metrics: dict[str, Any], asked: bool) -> bool:
        """Evaluate, and add to the step's metrics what that finds, or note it as due. Returns whether any
        rank was asked to stop by now."""
        evaluator, done = self.run.part.evaluator, self.run.done
        assert evaluator is not None
        if asked or (found := self._evaluated(evaluator)) is None:
            self.report.say(f"the evaluation after step {done} is left out, and due at the next start: "
                            "the run was asked to stop")  # fmt: skip
            self._due = metrics
            return True
        metrics |= found
        self._loss = found["eval_loss"]
        return False

    def _evaluated(self, evaluator: PipelineExecutor) -> dict[str, float] | None:
        """The loss of every set, and the mean over all their targets; None if any rank was asked to stop
        meanwhile."""
        part, counts = self.run.part, {one.name: one.targets for one in self.feed.stream.evaluation}

        def load() -> dict[str, list[MicroBatch]]:
            return {name: part.cut(batches) for name, batches in self.feed.evaluation(part.rows)}

        losses = self.run.evaluate(evaluator, load, stops=lambda: bool(self.control))
        if losses is None:
            return None
        total = sum(losses[name] * count for name, count in counts.items() if count)
        mean = total / targets if (targets := sum(counts.values())) else math.nan
        return {"eval_loss": mean} | {f"eval_loss/{name}": each for name, each in losses.items() if name}

    def _beside(self) -> dict[str, Any]:
        """What a checkpoint says of the data."""
        due = {} if self._due is None else {"evaluation_due": self._due}
        position = self.feed.position(self.run.done)
        return {"data": self.feed.identity, "position": position, **evaluated(self._loss), **due}
