"""A run of one rank in this process, from its plan to its last checkpoint: what is due when, where
it goes on, and what ends it."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.core.base.errors import CheckpointError, JobError
from plait.core.job.plan import Plan
from plait.core.record.ring import read_ring
from plait.core.runs.evidence import ring_path
from plait.core.runs.host_memory import memory_of
from plait.train import rank_run as module
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import LOSS, CheckpointFolder
from plait.train.checkpoint.whole import step_of
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.pipeline import PipelineExecutor
from plait.train.machine.device import RankDevice
from plait.train.model.kernels import EAGER
from tests.train.one_rank import Asked, Run, fails_at


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


def test_once_a_plan_is_made_a_rank_asks_its_job_for_nothing(run: Run) -> None:
    run.job_refuses = True
    fixed: Any = {"strategy": {"slices": {"batch": 1, "columns": 1}}, "run": {"memory_every": 1}, "eval_every": 2}
    assert run.train(4, checkpoint_every=2, **fixed) == 0
    assert run.train(6, **fixed) == 0, "and goes on"
    assert len(run.metrics) == 6


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


def test_without_a_known_peak_there_is_no_mfu(run: Run) -> None:
    """As on a processor; the rate of matrix products is another figure, in no line for people."""
    with mock.patch.object(module, "matrix_rate", return_value=1e12):
        assert run.train(3, run={"peak_flops": None}, log_every=1) == 0
    assert {line["mfu"] for line in run.metrics.values()} == {None} and "MFU" not in run.said
    for line in run.metrics.values():
        assert line["device"]["peak_flops"] is None and line["device"]["kind"] == "cpu"
        work = run.job(3, {}, {}).model_spec(257).causal_step_flops(8, 4)
        assert line["device"]["matmul_rate_share"] == pytest.approx(work / line["seconds"] / 1e12)


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 494.7e12), ("NVIDIA H200 NVL", None)])
def test_mfu_is_of_the_peak_of_the_device_by_its_name(run: Run, name: str, peak: float | None) -> None:
    """A rank that believes to compute on a GPU, in fp32 that is rounded to TF32."""
    with (
        run.opened(2, run={"peak_flops": None}) as session,
        mock.patch.multiple(RankDevice, name=name, tf32=True, sharing=lambda *_: 2),
        mock.patch.object(session.run.part.device, "torch_device", torch.device("cuda")),
        mock.patch.object(module, "matrix_rate", return_value=1e12),
    ):
        rates = session.run._device_rates()
    assert (rates.name, rates.kind, rates.ranks, rates.peak) == (name, "cuda", 2, peak)
    said = " ".join(run.said.split())
    assert ("MFU is of TF32's peak, 4.947e+14 FLOP/s" in said) == (peak is not None)
    assert (f"no cluster description has the dense peak of {name} in TF32" in said) == (peak is None)


def test_a_peak_that_the_job_names_too_low_is_said_to_be(run: Run) -> None:
    assert run.train(2, run={"peak_flops": 10.0}) == 0
    assert [line["mfu"] for line in run.metrics.values()] == [None, None]
    said = " ".join(run.said.split())
    assert run.said.count("MFU") == 1 and "above 100%, as in step 1: 10 FLOP/s (run.peak_flops) is not" in said


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
    assert run.train(3) == 0 and "eval_loss" in run.metrics[3]  # the evaluation that was left out
    assert run.train(3) == 0 and "already trained for 3 steps" in run.said


def test_a_run_whose_last_step_was_asked_to_stop_is_over(run: Run) -> None:
    assert run.train(3, control=Asked("step 3"), eval_every=0) == 0
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


def test_checkpoints_that_were_removed_meanwhile_are_made_again(run: Run) -> None:
    def remove(control: Asked) -> bool:
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # asked in an evaluation, too
        return False

    with mock.patch.object(Asked, "__bool__", remove):
        assert run.train(1, control=Asked()) == 0
    assert f"warning: {run.folder / 'checkpoints'} was removed during the run: it is created again" in run.said
    assert run.checkpoints == ["step-00000001"]


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


def evaluations(run: Run) -> list[object]:
    """Losses of all steps, and the evaluations' in the record and beside every checkpoint."""
    kept = [(one.step, one.state.get(LOSS)) for one in CheckpointFolder(run.folder / "checkpoints").complete()]
    return [kept, *((step, line["loss"], line.get("eval_loss")) for step, line in run.metrics.items())]


def test_a_checkpoint_that_is_made_again_costs_no_older_one(run: Run) -> None:
    """From the newest no step was made yet: it may lead to NaN."""
    more = {"eval_every": 2, "checkpoint_every": 2, "keep_checkpoints": 1}
    for _ in range(2):
        assert run.train(6, control=Asked("evaluating after step 4"), **more) == 130
    assert run.checkpoints == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("step", [3, 6])
def test_a_wish_to_stop_in_an_evaluation_is_heard_within_a_batch(run: Run, step: int) -> None:
    """And the run is saved. The next start makes the evaluation first, whatever it evaluates
    otherwise: the record, and what checkpoints say, is that of a run which nobody has stopped."""
    control, batches = Asked(f"evaluating after step {step}"), list[int]()
    real = PipelineExecutor.run

    def forwards(one: PipelineExecutor, given: Sequence[MicroBatch]) -> Tensor:
        if control.activity.startswith("evaluating"):
            batches.append(control.step)
        return real(one, given)

    with mock.patch.object(PipelineExecutor, "run", forwards):
        assert run.train(6, control=control, eval_every=3, eval_batches=5, checkpoint_every=3) == 130
    assert batches == [3] * (1 if step == 3 else 5) + [6] * (step == 6)
    assert f"the evaluation after step {step} is left out" in run.said
    assert run.checkpoints[-1] == f"step-{step:08d}"
    assert [at for at, line in run.metrics.items() if "eval_loss" in line] == ([3] if step == 6 else [])
    assert run.train(6, eval_every=7, eval_batches=5, checkpoint_every=3) == 0
    found = evaluations(run)
    assert run.train(6, eval_every=3, eval_batches=5) == 0 and "already trained" in run.said
    shutil.rmtree(run.folder)
    run.folder.mkdir()
    run.train(6, eval_every=3, eval_batches=5, checkpoint_every=3)
    assert found == evaluations(run)
