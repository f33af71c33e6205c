"""Train with a custom training loop, on ranks that torchrun (or any launcher that sets its
variables) has started:

    with Engine("job.toml") as engine:
        for tokens in engine.batches(loader):
            engine.step(tokens)

Every rank calls the same methods with the same values: whole batches, of which the engine computes
this rank's part. Plans, slices, pipelines, sharding, the recorder and checkpoints are the same as
in ``plait train``, whose loop runs the same steps (``rank_run``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError, LaunchError
from plait.core.base.numbers import shown
from plait.core.job.spec import Job
from plait.train.comm.wire import sum_over
from plait.train.engine.feed import micro_batches
from plait.train.engine.finite import check_state
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.machine.control import Control
from plait.train.own_values import check_loader, check_own, checked_batch, checked_number, named_states
from plait.train.rank_run import RankRun, evaluated
from plait.train.worker import joined_run, meet, run_plan

After = Callable[["Engine", dict[str, Any]], object]
"""A function called after a step with the engine and the step's metrics."""


class Engine:
    """One rank of a run. job: a job file, a Job, or its values as a plain mapping. overrides:
    settings of the form ``section.key=value``. data: a name of the training data; a checkpoint of
    other data is refused.

    Tokens are int64 [B, S + 1], the last of which is only a target. Alternatively tokens and
    ``labels`` are [B, S]: a label is the token that follows, or -100 if the target does not count.
    weights [B, S]: weights of the targets' losses. starts [B, S]: for each token the position of
    its document's first token, if attention must not cross documents. B is ``batch_size``.

    after: functions to call after every step. Raises JobError, LaunchError and CheckpointError with
    the messages that ``plait train`` prints.
    """

    def __init__(
        self,
        job: str | Path | Job | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        data: str = "a loop of its own",
    ) -> None:
        self._held = ExitStack()
        self.after: list[After] = []
        self.stopping = False
        """True if any rank was asked to stop: all ranks leave the loop after this step."""
        self._data, self._loader, self._position = data, None, 0
        self._begun = False
        """True once ``load`` was called, or the run's folder was seen to hold no checkpoint."""
        self._passed_over = 0
        """The number of a loader's batches still to be skipped, because steps before this start
        used them."""
        self._evaluators: dict[int, PipelineExecutor] = {}
        try:
            self._open(job, overrides)
        except BaseException:
            self._held.close()
            raise

    def _open(self, job: str | Path | Job | Mapping[str, Any], overrides: Sequence[str]) -> None:
        held, rank = self._held, RankEnv.read()
        control = held.enter_context(Control())
        overrides = [overrides] if isinstance(overrides, str) else overrides
        if isinstance(job, Mapping):
            job = Job.from_dict(dict(job))
        if isinstance(job, Job):
            file = Path(f".{job.run.name or 'run'}.rank-{rank.rank}.toml")
            file.write_text(job.named(job.run.name or "run").to_toml())
            held.callback(file.unlink, missing_ok=True)
        else:
            file = Path(job)
        store, folder = meet(rank, control, held, [str(file), *overrides])
        if folder is None:
            raise LaunchError("rank 0 has refused the job; its message says why")
        started, watchdog = held.enter_context(joined_run(run_plan(rank, folder), rank, control, folder, store))
        self.run = RankRun(started, self._sample)
        watchdog.record_finished = self.run.recorder.look
        held.callback(self.run.close)

    def _sample(self, part: Any) -> Sequence[MicroBatch]:
        """Return micro-batches of random tokens, to time candidates with."""
        work = part.plan.workload
        shape = work.micro_batch * work.num_micro_batches, work.sequence + 1
        tokens = torch.randint(part.plan.model.vocab, shape, generator=torch.Generator().manual_seed(0))
        return part.own(micro_batches(tokens[:, :-1], tokens[:, 1:], torch.arange(shape[0]), work.micro_batch, 0))

    # ---- state of the run ----

    @property
    def done(self) -> int:
        """The number of steps so far."""
        return self.run.done

    @property
    def batch_size(self) -> int:
        """Sequences of the next batch: ``train.global_batch_size``, or fewer during batch-size
        ramp-up. While ``batches`` skips the batches of earlier steps, the batch size of those
        steps."""
        return self.run.settings.train.batches.at(self.done - self._passed_over)

    @property
    def job(self) -> Job:
        """The job that the run's plan was made for."""
        job = self.run.part.plan.job
        assert job is not None
        return job

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.run.rank.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.run.rank.world_size

    # ---- training ----

    def step(
        self, tokens: Tensor, labels: Tensor | None = None, *, weights: Tensor | None = None,
        starts: Tensor | None = None, divisor: float | None = None, learning_rate: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run one optimizer step on a whole batch. Return its metrics (``loss``, ``norm``,
        ``learning_rate``, ``step``).

        divisor: divisor of the weighted sum of losses; by default the sum of weights (the number of
        targets). learning_rate: overrides the job's learning rate.
        """
        batches = self._batches(tokens, labels, weights, starts, divisor)
        size = self.batch_size
        if learning_rate is not None:
            learning_rate = checked_number("learning_rate", learning_rate, zero=True)
        elif self.done == self.run.settings.train.steps:
            self.run.report.warn(f"warning: train.steps = {self.done} are done: rates stay at their end from here on")
        if len(tokens) != size:
            ramps = self.run.settings.train.rampup_batch_size is not None
            fix = f"Give {size}" + ("" if ramps else f", or set train.global_batch_size = {len(tokens)}")
            raise JobError(f"a step has {size} sequences and got {len(tokens)}", key="train.global_batch_size", fix=fix)
        self._begin()
        metrics, self.stopping = self.run.step(lambda: self.run.part.own(batches), learning_rate)
        self._position += len(tokens)
        for function in self.after:
            function(self, metrics)
        every = self.run.settings.train.log_every
        self.run.report.step(metrics, show=self.done % every == 0 or self.stopping)
        return metrics

    def _begin(self) -> None:
        """Raise JobError, before the first step or save, if the folder has checkpoints that were
        not loaded: new ones would replace them."""
        if not self._begun and (newest := self.run.checkpoints.newest()):
            problem = f"has a checkpoint after step {newest}, and load() was not called: new ones would take its place"
            raise JobError(problem, file=str(self.run.folder), fix="Call load(), or give the run another run.name")
        self._begun = True

    @torch.no_grad()
    def evaluate(
        self, tokens: Tensor, labels: Tensor | None = None, *, weights: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> float:  # fmt: skip
        """Return the mean loss of a batch, without dropout; the same on every rank. B must be a
        multiple of the micro-batch size."""
        batches = self._batches(tokens, labels, weights, starts, None)
        evaluator = self._evaluator(len(batches), tokens)
        losses = self.run.evaluate(evaluator, lambda: {"": self.run.part.own(batches)})
        assert losses is not None
        return losses[""]

    @torch.no_grad()
    def logprobs(self, tokens: Tensor, labels: Tensor | None = None, *, starts: Tensor | None = None) -> Tensor:
        """Return the log-probability of each target, fp64 [B, S] in host memory, on every rank; 0
        for ignored targets."""
        batches, part = self._batches(tokens, labels, None, starts, None), self.run.part
        size, groups = part.plan.workload.micro_batch, part.groups
        found = torch.zeros(len(tokens), part.plan.workload.sequence, dtype=torch.float64)
        with self.run.recorder.paused():
            own = self._evaluator(len(batches), tokens).token_losses(part.own(batches))
        for number, losses in own.items() if groups.tp_rank == 0 else ():
            rows = found[number * size : (number + 1) * size][part.rows(size)]
            at = slice(None) if part.positions is None else part.positions
            rows[:, at] = -losses.cpu().double()
        return sum_over(groups.world, found.to(part.device.torch_device)).cpu()

    def _batches(
        self, tokens: Tensor, labels: Tensor | None, weights: Tensor | None, starts: Tensor | None,
        divisor: float | None,
    ) -> list[MicroBatch]:  # fmt: skip
        """Return the batch as micro-batches. Raises JobError for tensors of other shapes, token ids
        outside the vocabulary, and numbers that are not finite."""
        work = self.run.part.plan.workload
        one = checked_batch(
            tokens, labels, weights, starts, sequence=work.sequence, vocab=self.run.part.plan.model.vocab
        )
        if divisor is not None:
            divisor = checked_number("divisor", divisor, zero=False)
        samples = torch.arange(len(one.tokens)) + self._position
        found = micro_batches(
            one.tokens, one.labels, samples, work.micro_batch, self.done, weights=one.weights, starts=one.starts
        )
        return found if divisor is None else [replace(one, scale=1.0 / divisor) for one in found]

    def _evaluator(self, count: int, tokens: Tensor) -> PipelineExecutor:
        size = self.run.part.plan.workload.micro_batch
        if len(tokens) % size:
            problem = f"{len(tokens)} sequences are no multiple of a micro-batch's {size}"
            raise JobError(problem, key="train.micro_batch_size", fix="Pad the batch, its labels with -100")
        if count not in self._evaluators:
            evaluator = replace(self.run.part, eval_batches=count).evaluator
            assert evaluator is not None
            self._evaluators[count] = evaluator
        return self._evaluators[count]

    # ---- data and checkpoints ----

    def batches(self, loader: Iterable[Tensor]) -> Iterator[Any]:
        """Yield a loader's batches, epoch after epoch, until ``train.steps`` are done or a stop is
        requested. The position in the data is saved with checkpoints.

        A loader with ``state_dict`` and ``load_state_dict`` saves its own position, as plain
        values. For any other loader, as many batches are skipped as steps were done. During
        batch-size ramp-up the loader must read ``batch_size`` before each batch. Raises JobError
        for a loader that yields nothing.
        """
        check_loader(loader)
        self._loader, empty = loader, 0
        self._passed_over = 0 if hasattr(loader, "state_dict") else self.done
        while self.done < self.run.settings.train.steps and not self.stopping:
            empty += 1
            for batch in loader:
                empty = 0
                if self._passed_over:
                    self._passed_over -= 1
                    continue
                yield batch
                if self.done >= self.run.settings.train.steps or self.stopping:
                    return
            # A loader whose position was saved at the end of an epoch yields nothing more of that epoch.
            if empty > (1 if hasattr(loader, "state_dict") else 0):
                problem = f"gives nothing, and {self.done} of {self.run.settings.train.steps} steps are done"
                fix = "Give an iterable that can be gone through again, as a list or a DataLoader, and is not empty"
                raise JobError(problem, key="loader", fix=fix)

    def load(self, loader: Any = None) -> Mapping[str, Any] | None:
        """Resume from the newest checkpoint, if there is one. Return the ``own`` values that were
        saved with it; None if there is no checkpoint. loader: the data loader to restore, if it has
        ``load_state_dict``."""
        self._begun = True
        found = self.run.load(lambda _, state: state.get("data") == self._data, data_name=self._data)
        if found is None:
            return None
        self._position = found.get("position", 0)
        if loader is not None and hasattr(loader, "load_state_dict") and "loader" in found:
            loader.load_state_dict(found["loader"])
        return found.get("own", {})

    def save(self, own: Mapping[str, Any] | None = None, *, wait: bool = False, eval_loss: float | None = None) -> None:
        """Write a checkpoint in the background. own: plain values that ``load`` returns. wait:
        return only when the checkpoint is on disk. eval_loss: loss of an evaluation after this
        step; the checkpoint with the least loss is kept (``train.keep_best``)."""
        check_own(own)
        self._begin()
        beside: dict[str, Any] = {"data": self._data, "position": self._position, "own": dict(own or {})}
        beside |= evaluated(eval_loss)
        if hasattr(self._loader, "state_dict"):
            beside["loader"] = self._loader.state_dict()  # type: ignore[union-attr]
            check_own(beside["loader"], "loader.state_dict()")
        if wait:
            check_state(self.run.optimizer, self.run.part.groups, self.done)
            self.run.write(beside, wait=True)
        else:
            self.run.save(beside)

    def state_dict(self, kind: Literal["full", "sharded", "huggingface"] = "full") -> dict[str, Any]:
        """Return the master weights by name, in host memory. Called by all ranks. kind: ``full``
        gives whole tensors, on rank 0 only (an empty dict elsewhere). ``sharded`` gives this rank's
        boxes of each tensor, as (box, tensor) pairs. ``huggingface`` gives whole tensors under
        transformers' names, on rank 0 only."""
        if kind not in ("full", "sharded", "huggingface"):
            raise JobError(f"{shown(kind)} is no kind of state", key="kind", fix="full, sharded or huggingface")
        return named_states(self.run.part, self.run.optimizer, kind)

    # ---- the end ----

    def close(self) -> None:
        """Leave the run: stop background threads and release the process groups."""
        self._held.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.run.checkpoints.finish()
        self._held.__exit__(kind, error, trace)
