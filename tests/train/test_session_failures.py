"""What ends a run of one rank, or costs it a step or a checkpoint: numbers that are not finite,
steps without targets, a disk that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.api.logs import log_lines
from plait.api.runs import view_run
from plait.core.base.errors import CheckpointError, NotFinite
from plait.core.runs.history import TERMINAL
from plait.diagnose.verdicts.progress import loss_of
from plait.train import rank_run as module
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.data.stream import EvalSet
from plait.train.engine.feed import Feed, Rows
from plait.train.engine.inflight import MicroBatch, scale_of
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import Requests
from plait.train.model.embedding import IGNORED
from plait.train.session import Session
from tests.train.one_rank import NAN, Run, fails_at


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


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
    lost = mock.patch.object(Checkpoints, "newest", side_effect=(0, CheckpointError("the disk is gone")))
    with fails_at(1), lost, pytest.raises(NotFinite, match=r"the loss is nan\. the disk is gone$"):
        run.train(8)


def test_updates_that_are_left_out_cost_their_checkpoint(run: Run) -> None:
    """Step 2 and 3 are: the checkpoint of 2 is not written, that of 4 is."""
    real, calls = module.train_step, iter(range(1, 99))

    def skips(part: Any, optimizer: Optimizer, batches: Any, **named: Any) -> Any:
        if next(calls) not in (2, 3):
            return real(part, optimizer, batches, **named)
        with mock.patch("plait.train.engine.steps.totals", return_value=(math.nan, 1.0, Requests())):
            return real(part, optimizer, batches, **named)

    with mock.patch.object(module, "train_step", skips):
        assert run.train(5, checkpoint_every=2, keep_checkpoints=9, on_nan="skip") == 0
    assert "warning: no checkpoint after step 2: the last 1 updates were skipped" in run.said
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
    assert said.count("warning: step 2 has no loss: the weights of its targets add up to 0.") == 1
    assert "step 3 has no loss" not in said.replace("after step 3 has no loss", "")
    assert "warning: the evaluation after step 3 has no loss" in said
    assert "step 2/4 loss nan" in said and "the evaluation loss after" not in said
    (run.folder / "logs" / TERMINAL).unlink()  # without which steps are told from the metrics
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
