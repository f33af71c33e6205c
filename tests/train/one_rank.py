"""A run of one rank in this process, from its plan to its last checkpoint, for tests."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plait.core.base.env import RankEnv
from plait.core.base.errors import CheckpointError, NotFinite
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.runs.channel import Stop
from plait.plan.make import make_plan
from plait.train import rank_run as module
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice
from plait.train.report import Reporter
from plait.train.session import Session

MODEL: dict[str, Any] = {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "max_sequence": 8}
NAN = NotFinite("step 0: the loss is nan.")


class Asked(Control):
    """Is asked to stop when it says that it does so."""

    def __init__(self, when: str = "") -> None:
        super().__init__()
        self.when = when

    def set_activity(self, what: str, *, step: int = -1, patient: bool = False) -> None:
        super().set_activity(what, step=step, patient=patient)
        if what == self.when:
            self._stop = Stop(signal.SIGINT)


class RefusesToBeRead:
    """A job of which a plan was made: whoever asks it fails."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the job is asked for {name!r} after its plan was made")


class Run:
    """A run's folder, and what its starts have said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.job_refuses = folder / "run", "", False
        self.folder.mkdir()
        self.text = folder / "text"
        self.text.mkdir()
        for number in range(12):
            (self.text / f"{number}.txt").write_bytes(bytes(32 + i * i % (50 + number) for i in range(300)))

    def job(self, steps: int, run: dict[str, Any], strategy: dict[str, Any], **train: Any) -> Job:
        return Job.from_dict(
            {
                "model": MODEL,
                "data": {"text": [str(self.text)], "sequence_length": 8, "eval_fraction": 0.3},
                "train": {
                    "steps": steps,
                    "global_batch_size": 4,
                    "micro_batch_size": 0,
                    "log_every": 2,
                    "eval_batches": 1,
                    **train,
                },
                "run": {"peak_flops": 1e9, **run},
                "strategy": strategy,
            }
        )

    @contextmanager
    def opened(
        self, steps: int, *, control: Control | None = None, run: Any = (), strategy: Any = (), **train: Any
    ) -> Iterator[Session]:
        out, job = io.StringIO(), self.job(steps, dict(run), dict(strategy), **train)
        try:
            with Reporter(self.folder, speaks=True, steps=steps, out=out) as report:
                plan = make_plan(job, HERE, vocab=257)
                if self.job_refuses and plan.hash:  # which the plan's file has
                    object.__setattr__(plan, "job", RefusesToBeRead())
                device = RankDevice(torch.device("cpu"))
                asked = Control() if control is None else control
                session = Session(plan, self.folder, RankEnv(), device, report, asked)
                try:
                    yield session
                finally:
                    with suppress(CheckpointError):  # threads end with their process
                        session.run.checkpoints.finish()
        finally:
            self.said = out.getvalue()

    def train(self, steps: int, **more: Any) -> int:
        with self.opened(steps, **more) as session:
            return session.train()

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line for line in lines}

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics.values()]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


def fails_at(step: int, error: Exception = NAN) -> Any:
    """The step of this number, counted from 1 over all that are made, does not end well."""
    real, calls = module.train_step, iter(range(1, 99))

    def train_step(*args: Any, **named: Any) -> Any:
        if next(calls) == step:
            raise error
        return real(*args, **named)

    return mock.patch.object(module, "train_step", train_step)
