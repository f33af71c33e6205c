"""A run of one rank in this process, from its plan to its last checkpoint: what is due when, where it goes
on, and what ends it."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.api.logs import log_lines
from plait.api.runs import view_run
from plait.core.base.env import RankEnv
from plait.core.base.errors import CheckpointError, JobError, NotFinite
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.record.ring import read_ring
from plait.core.runs.channel import Stop
from plait.core.runs.host_memory import memory_of
from plait.core.runs.ring_calls import ring_path
from plait.diagnose.progress import loss_of
from plait.plan.make import make_plan
from plait.train import rank_run as module
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.whole import step_of
from plait.train.data.stream import EvalSet
from plait.train.engine.feed import Feed, Rows
from plait.train.engine.grad_sync import Wishes
from plait.train.engine.inflight import MicroBatch, scale_of
from plait.train.engine.optimizer import Optimizer
from plait.train.machine.control import Control
from plait.train.machine.device import RankDevice
from plait.train.model.kernels import EAGER
from plait.train.model.loss import IGNORED
from plait.train.record.peak import TIMES
from plait.train.report import Reporter
from plait.train.session import Session

MODEL: dict[str, Any] = {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "max_sequence": 8}
NAN = NotFinite("step 0: the loss is nan.")


class Asked(Control):
    """Is asked to stop when it says that it does so."""

    def __init__(self, when: str = "") -> None:
        super().__init__()
        self.when = when

    def doing(self, what: str, *, step: int = -1, patient: bool = False) -> None:
        super().doing(what, step=step, patient=patient)
        if what == self.when:
            self._stop = Stop(signal.SIGINT)


class Run:
    """A run's folder, and what its starts have said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder / "run", ""
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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def steps_said(said: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in said.splitlines() if line.startswith("step ")]


def test_checkpoints_of_every_so_many_steps_and_the_best_stay(run: Run) -> None:
    more = {"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 2, "keep_every": 4, "keep_best": True}
    assert run.train(10, learning_rate=0.3, warmup_steps=2, lr_decay_style="constant", **more) == 0
    losses = {step: line["eval_loss"] for step, line in run.metrics.items()}
    best = min(losses, key=lambda step: losses[step])
    assert run.checkpoints == [f"step-{step:08d}" for step in sorted({4, 8, 9, 10, best})]
    assert step_of(run.folder, "best") == best
    assert step_of(run.folder, "7") == 7 and step_of(run.folder, None) is None
    with pytest.raises(JobError, match=r"--step: .*is no step\. Write a number, or best"):
        step_of(run.folder, "newest")


def test_no_best_without_an_evaluation(run: Run) -> None:
    assert run.train(3, eval_every=0, checkpoint_every=1) == 0
    with pytest.raises(CheckpointError, match=r"train\.eval_every and train\.checkpoint_every"):
        step_of(run.folder, "best")


def test_what_is_due_after_which_step(run: Run) -> None:
    assert run.train(7, eval_every=3, checkpoint_every=2, keep_checkpoints=9) == 0
    found = run.metrics
    assert list(found) == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, line in found.items() if "eval_loss" in line] == [3, 6, 7]
    assert steps_said(run.said) == [2, 3, 4, 6, 7], "every second, every evaluation, the last"
    assert run.checkpoints == [f"step-{step:08d}" for step in (2, 4, 6, 7)]
    for line in found.values():
        assert line["seconds"] > 0 and math.isfinite(line["eval_loss"] if "eval_loss" in line else line["loss"])
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (7, 7 * 4 * 8)
    assert f"trained 7 steps in {summary['seconds']:.0f} s" in run.said
    told = [step for step, line in found.items() if any("memory" in key for key in line)]
    assert told[-1] == 7 and "warning" not in run.said


def test_a_peak_that_was_measured_too_low_makes_no_mfu_above_one(run: Run) -> None:
    """As when other work ran at the start: matrix products seem slower than the step's."""
    rates = iter([1.0, 2.0, 1e15, 1.0])
    with mock.patch.object(module, "matrix_rate", side_effect=lambda *_: next(rates)):
        assert run.train(7, run={"peak_flops": None}, log_every=1) == 0
    found = {step: line["mfu"] for step, line in run.metrics.items()}
    assert [step for step, mfu in found.items() if mfu is None] == [1, 2, 3, 4], "measured anew after steps 2 and 4"
    assert all(0 < mfu < 1e-3 for step, mfu in found.items() if step > 4)
    assert next(rates) == 1.0, "and not again"
    shown = [line for line in run.said.splitlines() if "MFU" in line]
    assert [line.split(",")[0] for line in shown[:1]] == ["MFU is left out where it would be above 100%"]
    assert "run.peak_flops says what it is" in " ".join(run.said.split()) and len(shown) == 4
    assert all(len(line) <= 100 for line in run.said.splitlines() if str(run.folder) not in line)


def test_a_peak_that_the_job_names_too_low_is_said_to_be(run: Run) -> None:
    assert run.train(2, run={"peak_flops": 10.0}) == 0
    assert [line["mfu"] for line in run.metrics.values()] == [None, None]
    assert run.said.count("MFU") == 1 and "run.peak_flops is 10 FLOPs a second" in " ".join(run.said.split())


def test_a_machine_that_stays_busy_is_measured_few_times(run: Run) -> None:
    with mock.patch.object(module, "matrix_rate", return_value=1.0) as measured:
        assert run.train(9, run={"peak_flops": None}) == 0
    assert measured.call_count == 1 + TIMES
    assert {line["mfu"] for line in run.metrics.values()} == {None} and run.said.count("MFU") == 1


def test_a_last_step_that_is_due_anyway_is_saved_once(run: Run) -> None:
    with mock.patch.object(Checkpoints, "save", autospec=True, side_effect=Checkpoints.save) as saved:
        assert run.train(4, checkpoint_every=2) == 0
    assert [(call.args[1], call.kwargs["wait"]) for call in saved.call_args_list] == [(2, False), (4, True)]


def test_a_run_goes_on_as_if_it_had_never_ended(run: Run, tmp_path: Path) -> None:
    assert run.train(3, lr_decay_steps=9) == 0
    assert run.train(6, lr_decay_steps=9) == 0
    assert "resuming after step 3" in run.said and steps_said(run.said) == [4, 6]
    (tmp_path / "straight").mkdir()
    straight = Run(tmp_path / "straight")
    straight.train(6, lr_decay_steps=9)
    assert run.losses == straight.losses and len(run.losses) == 6
    assert json.loads((run.folder / "summary.json").read_text())["tokens"] == 3 * 4 * 8, "since this start"
    assert run.train(6) == 0
    assert f"{run.folder} is already trained for 6 steps; raise train.steps to go on" in run.said


def test_a_run_that_is_asked_to_stop_saves_and_says_so(run: Run) -> None:
    assert run.train(6, control=Asked("step 3"), checkpoint_every=3, eval_every=1) == 128 + signal.SIGINT
    assert "stopped and saved after step 3" in run.said
    assert run.checkpoints == ["step-00000003"] and list(run.metrics) == [1, 2, 3]
    assert run.train(3) == 0 and "already trained for 3 steps" in run.said


def test_a_run_whose_last_step_was_asked_to_stop_is_over(run: Run) -> None:
    assert run.train(3, control=Asked("step 3")) == 0
    assert "trained 3 steps" in run.said


def test_checkpoints_of_other_data_are_not_gone_on_from(run: Run) -> None:
    run.train(2)
    shutil.rmtree(run.folder / "corpus")
    for file in run.text.iterdir():
        file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=r"checkpoints belongs to other data than .*text"):
        run.train(4)


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(run: Run) -> None:
    run.train(4, checkpoint_every=2)
    (run.folder / "checkpoints" / "step-00000004" / "manifest.json").write_text("")
    assert run.train(5) == 0
    assert "warning: " in run.said and "The checkpoint of step 2 is used instead" in run.said
    assert "resuming after step 2" in run.said and list(run.metrics) == [1, 2, 3, 4, 5]


def fails_at(step: int, error: Exception = NAN) -> Any:
    """The step of this number, counted from 1 over all that are made, does not end well."""
    real, calls = module.train_step, iter(range(1, 99))

    def train_step(*args: Any, **named: Any) -> Any:
        if next(calls) == step:
            raise error
        return real(*args, **named)

    return mock.patch.object(module, "train_step", train_step)


@pytest.mark.parametrize(
    ("step", "every", "says"),
    [
        (1, 2, "There is no checkpoint yet; the next start begins anew."),
        (3, 2, "No finite step was made from the checkpoint of step 2: it is now step-00000002.not-finite. There is no "
               "checkpoint before it; the next start begins anew."),
        (4, 2, "The last good checkpoint is that of step 2."),
        (5, 2, "No finite step was made from the checkpoint of step 4: it is now step-00000004.not-finite. The last "
               "good checkpoint is that of step 2."),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_end_the_run_and_say_where_it_goes_on(
    run: Run, step: int, every: int, says: str
) -> None:
    with fails_at(step), pytest.raises(NotFinite) as told:
        run.train(8, checkpoint_every=every)
    assert str(told.value) == f"{NAN} {says}"


def test_a_checkpoint_that_was_passed_over_is_told_at_the_next_start(run: Run) -> None:
    with fails_at(5), pytest.raises(NotFinite):
        run.train(8, checkpoint_every=2)
    assert run.train(6) == 0
    assert (
        "steps after step 4 were not finite: its checkpoint is passed over (step-00000004.not-finite), and the run "
        "goes on after step 2"
    ) in run.said
    assert run.train(7) == 0
    assert "passed over" not in run.said, "the run is beyond it"


def test_the_first_checkpoint_passed_over_begins_the_run_anew(run: Run) -> None:
    with fails_at(3), pytest.raises(NotFinite):
        run.train(4, checkpoint_every=2)
    assert run.train(4) == 0
    assert "the run goes on from the beginning" in run.said and list(run.metrics) == [1, 2, 3, 4]


def test_a_resumed_checkpoint_from_which_no_step_is_finite_is_passed_over(run: Run) -> None:
    run.train(4, checkpoint_every=2)
    with fails_at(1), pytest.raises(NotFinite, match="No finite step was made from the checkpoint of step 4"):
        run.train(8)


def test_where_the_disk_does_not_tell_the_error_says_so(run: Run) -> None:
    lost = mock.patch.object(Checkpoints, "newest", side_effect=CheckpointError("the disk is gone"))
    with fails_at(1), lost, pytest.raises(NotFinite, match=r"the loss is nan\. the disk is gone$"):
        run.train(8)


def test_updates_that_are_left_out_cost_their_checkpoint(run: Run) -> None:
    """Step 2 and 3 are: the checkpoint of 2 is not written, that of 4 is."""
    real, calls = module.train_step, iter(range(1, 99))

    def skips(part: Any, optimizer: Optimizer, batches: Any, **named: Any) -> Any:
        if next(calls) not in (2, 3):
            return real(part, optimizer, batches, **named)
        with mock.patch("plait.train.engine.steps.totals", return_value=(math.nan, 1.0, Wishes())):
            return real(part, optimizer, batches, **named)

    with mock.patch.object(module, "train_step", skips):
        assert run.train(5, checkpoint_every=2, keep_checkpoints=9, on_nan="skip") == 0
    assert "warning: no checkpoint after step 2: the last 1 updates were left out" in run.said
    assert run.checkpoints == ["step-00000004", "step-00000005"]
    assert [line.get("skipped") for line in run.metrics.values()] == [None, 1, 2, 2, 2]
    assert run.train(6) == 0
    assert run.metrics[6]["skipped"] == 2, "also after a resume"


def fails_to_save(session: Session, times: int) -> Any:
    real, left = session.run.checkpoints.save, [CheckpointError("no room.")] * times

    def save(*args: Any, **named: Any) -> None:
        real(*args, **named)
        if left:
            raise left.pop()

    return mock.patch.object(session.run.checkpoints, "save", save)


def test_a_checkpoint_that_cannot_be_written_costs_itself(run: Run) -> None:
    with run.opened(5, checkpoint_every=2) as session, fails_to_save(session, 1):
        assert session.train() == 0
    assert "warning: no room. Training goes on." in run.said and len(run.metrics) == 5


def test_or_the_run_if_the_job_says_so(run: Run) -> None:
    stops = run.opened(5, checkpoint_every=2, run={"on_save_failure": "stop"})
    with stops as session, fails_to_save(session, 1), pytest.raises(CheckpointError, match="no room"):
        session.train()


def test_checkpoints_that_were_removed_meanwhile_are_made_again(run: Run) -> None:
    def remove(control: Asked) -> bool:
        shutil.rmtree(run.folder / "checkpoints")
        return False

    with mock.patch.object(Asked, "__bool__", remove):
        assert run.train(1, control=Asked()) == 0
    assert f"warning: {run.folder / 'checkpoints'} was removed while the run was on: it is made again" in run.said
    assert run.checkpoints == ["step-00000001"]


def test_an_evaluation_that_is_not_finite_is_told(run: Run) -> None:
    with mock.patch.object(module, "evaluate", return_value=math.inf):
        assert run.train(2, eval_every=2) == 0
    assert "warning: the evaluation loss after step 2 is inf; the weights are finite" in run.said
    assert run.metrics[2]["eval_loss"] is None


@contextmanager
def without_targets(*steps: int) -> Iterator[None]:
    """No target of these steps, counted from 0, counts, and none of evaluations."""
    step, evaluation = Feed.step, Feed.evaluation

    def emptied(batches: list[MicroBatch]) -> list[MicroBatch]:
        return [replace(one, targets=torch.full_like(one.targets, IGNORED), scale=scale_of(0)) for one in batches]

    def stepped(feed: Feed, number: int, rows: Rows) -> list[MicroBatch]:
        found = step(feed, number, rows)
        return emptied(found) if number in steps else found

    def evaluated(feed: Feed, rows: Rows) -> list[tuple[str, list[MicroBatch]]]:
        return [(name, emptied(batches)) for name, batches in evaluation(feed, rows)]

    with mock.patch.object(Feed, "step", stepped), mock.patch.object(Feed, "evaluation", evaluated):
        yield


def test_a_step_without_targets_has_no_loss(run: Run) -> None:
    with without_targets(1, 2), mock.patch.object(EvalSet, "targets", 0):
        assert run.train(4, eval_every=3, log_every=1, keep_best=True, checkpoint_every=3) == 0
    found = run.metrics
    assert [line["loss"] is None for line in found.values()] == [False, True, True, False]
    assert found[3]["eval_loss"] is None, "nothing is 0 that is not known"
    said = " ".join(run.said.split())
    assert said.count("warning: step 2 has no loss: the weights of its targets are 0 in sum.") == 1
    assert "step 3 has no loss" not in said.replace("after step 3 has no loss", "")
    assert "warning: the evaluation after step 3 has no loss" in said
    assert "step 2/4 loss nan" in said and "the evaluation loss after" not in said
    shown = list(log_lines(run.folder))
    assert any("step 2  loss not known" in line for line in shown) and len(shown) == 4
    assert view_run(run.folder).loss is not None and loss_of(list(found.values())) is not None


def test_weights_that_are_not_finite_are_never_saved(run: Run) -> None:
    with run.opened(1) as session:
        session.run.optimizer.step = lambda *_, **__: spoil(session)  # type: ignore[method-assign]
        with pytest.raises(NotFinite, match="is not finite after this step"):
            session.train()
    assert run.checkpoints == []


def spoil(session: Session) -> None:
    for master in session.run.optimizer.masters.values():
        master[0] = math.nan


# ---- in the memory of hosts ----


def test_a_state_in_memory_is_gone_on_from_where_it_is_newer(run: Run) -> None:
    memory_of(run.folder).mkdir(parents=True)
    wanted = {"run": {"memory_every": 2}, "checkpoint_every": 3}
    with fails_at(6, RuntimeError("killed")), pytest.raises(RuntimeError, match="killed"):
        run.train(9, **wanted)
    assert run.train(9, **wanted) == 0
    assert "the state after step 4 is still in memory" in run.said and "resuming after step 4" in run.said
    with fails_at(4, RuntimeError("killed")), pytest.raises(RuntimeError, match="killed"):
        run.train(13, **wanted)  # step 12 is saved on disk and no copy is newer
    assert run.train(13, **wanted) == 0
    assert "still in memory" not in run.said and "resuming after step 12" in run.said


def test_without_a_launcher_nothing_is_kept_in_memory(run: Run) -> None:
    assert run.train(2, run={"memory_every": 1}) == 0
    assert "warning: run.memory_every has no effect here" in run.said


def test_memory_that_is_full_is_told(run: Run) -> None:
    memory_of(run.folder).mkdir(parents=True)
    full = mock.patch("plait.train.checkpoint.memory.MemoryCheckpoints._write", side_effect=OSError("no room"))
    with full:
        assert run.train(3, run={"memory_every": 2}) == 0
    assert "warning: the state after step 2 is not in memory (no room). Training goes on." in run.said


# ---- getting ready ----


def test_graphs_are_asked_of_a_device_that_has_them(run: Run) -> None:
    with pytest.raises(JobError, match=r"strategy\.cuda_graphs.*captures nothing"):
        run.train(2, strategy={"cuda_graphs": True})


def test_a_compiler_that_fails_is_a_mistake_of_the_job(run: Run) -> None:
    failed = mock.Mock(problem="no g++")
    eager = mock.patch("plait.train.engine.executor.kernels_of", return_value=EAGER)
    fails, says = mock.patch.object(module, "compile_ahead", return_value=failed), r"strategy\.compile.*no g\+\+"
    with eager, fails, pytest.raises(JobError, match=says):
        run.train(2, strategy={"compile": True})


def test_what_is_measured_before_training_is_in_the_plan(run: Run) -> None:
    assert run.train(2, strategy={"compile": "auto"}) == 0
    plan = Plan.read(run.folder / "plan.json")
    assert not plan.choices.any and not plan.strategy.compile
    assert "compile: not tried" in run.said
    assert read_ring(ring_path(run.folder, 0)).header.plan == plan.key


def test_a_run_begins_with_given_weights(run: Run, tmp_path: Path) -> None:
    loaded: list[Path] = []
    with mock.patch.object(module, "load_initial", lambda _, folder: loaded.append(folder)):
        run.train(1, init_from=str(tmp_path / "weights"))
        run.train(1)
    assert loaded == [tmp_path / "weights"]
