"""Bad numbers and damaged data in a whole run: it ends or goes on as documented, and never saves
them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.support.runs import metrics, train, write_job

pytestmark = pytest.mark.slow

SABOTAGE = """
import os, sys
if "plait.train.worker" in sys.orig_argv:
    from dataclasses import replace
    from plait.train.engine import steps
    train_step = steps.train_step
    def sabotaged(work, optimizer, batches, **more):
        def spoiled(batches):
            loss = work.run(batches)
            if batches[0].step + 1 == int(os.environ["SPOIL_STEP"]) and os.environ["RANK"] == "1":
                optimizer.gradients.shards["mlp", 1][5] = float("nan")
            return loss
        return train_step(replace(work, run=spoiled), optimizer, batches, **more)
    steps.train_step = sabotaged
"""


def sabotage(folder: Path, step: int) -> dict[str, str]:
    """An environment in which rank 1 has a NaN among its gradients in a step."""
    (folder / "sabotage").mkdir()
    (folder / "sabotage" / "sitecustomize.py").write_text(SABOTAGE)
    before = os.environ.get("PYTHONPATH")
    paths = [str(folder / "sabotage"), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(paths), "SPOIL_STEP": str(step)}


@pytest.mark.parametrize("every", [1, 0], ids=["at a checkpoint", "at the end"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, every: int) -> None:
    job = write_job(tmp_path, steps=1 if every == 0 else 3, every=every)
    done = train(
        job, "train.learning_rate=1e300", "train.warmup_steps=0", "strategy.tp=1", "train.eval_every=0", status=1
    )
    text = " ".join(done.stderr.split())
    assert "step 1: the weight embedding.weight on rank 0 is not finite after this step" in text
    assert "There is no checkpoint yet" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "runs" / "job" / "checkpoints").glob("step-*"))


def test_a_nan_stops_the_run_by_name_and_the_last_good_checkpoint_goes_on(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=8)
    done = train(job, environ=sabotage(tmp_path, 7), status=1)
    text = " ".join(done.stderr.split())
    assert "step 7: the loss is" in text
    assert "is the gradient of layers.1.mlp.up.weight on rank 1. The update was not made" in text
    assert "The last good checkpoint is that of step 4." in text
    assert [m["step"] for m in metrics(job)] == [1, 2, 3, 4, 5, 6]
    again = train(job)
    assert "resuming after step 4" in again.stdout
    assert [m["step"] for m in metrics(job)] == list(range(1, 9))
    assert all(math.isfinite(m["loss"]) for m in metrics(job))


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_what_is_advised_after_nan_works_in_the_folder(tmp_path: Path, on_nan: str) -> None:
    """The first update is finite and far too large: its checkpoint leads to NaN at any rate."""
    job = write_job(tmp_path, steps=30, every=1)
    run = tmp_path / "runs" / "job"
    asked = ("strategy.tp=1", "train.eval_every=0", "train.keep_checkpoints=1", "train.warmup_steps=0",
             f"train.on_nan={on_nan}")  # fmt: skip
    done = train(job, *asked, "train.learning_rate=1e15", status=1)
    text = " ".join(done.stderr.split())
    assert "No finite step was made from the checkpoint of step 1: it is now step-00000001.not-finite" in text
    assert "Lower train.learning_rate" in text and "the next start begins anew" in text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001.not-finite"]
    assert json.loads((run / "attempts.jsonl").read_text())["cause"] == "NotFinite"
    again = train(job, *asked, "train.learning_rate=1e-3", "train.steps=4")
    assert (
        "its checkpoint is passed over (step-00000001.not-finite), and the run goes on from the beginning"
        in again.stdout
    )
    assert "with other settings: train.learning_rate was 1000000000000000.0 and is 0.001" in " ".join(
        again.stderr.split()
    )
    assert [m["step"] for m in metrics(job)] == [1, 2, 3, 4]
    changed = [json.loads(line)["changed"] for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert changed == ["", "train.learning_rate was 1000000000000000.0 and is 0.001"]


def test_an_update_may_be_left_out(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=6)
    done = train(job, "train.on_nan=skip", environ=sabotage(tmp_path, 3))
    assert "1 updates skipped" in done.stdout
    assert [m.get("skipped") for m in metrics(job)] == [None, None, 1, 1, 1, 1]
    lines = (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [m["norm"] is None for m in found] == [False, False, True, False, False, False]


def test_a_flipped_byte_in_a_token_shard_is_found_and_the_corpus_prepared_again(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=2)
    train(job, "strategy.tp=1")
    shard = tmp_path / "runs" / "job" / "corpus" / "text" / "train-00000.bin"
    intact = shard.read_bytes()
    shard.write_bytes(intact[:99] + bytes([intact[99] ^ 1]) + intact[100:])
    done = train(job, "strategy.tp=1")
    said = " ".join(done.stdout.split())
    assert "train-00000.bin: damaged (checksum" in said
    assert "Its sources are unchanged, so the corpus is prepared again" in said
    assert shard.read_bytes() == intact
