"""Checkpoints and metrics of an attempt that was given up and goes on all the same: none of it is
seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import RunLost
from plait.core.runs.attempts import Epoch
from plait.core.runs.progress import Missing
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.folder import CheckpointFolder, Keep
from plait.train.record.metrics import MetricsFile


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAIT_EPOCH", "")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_of_an_attempt_that_is_over_is_refused(run: Path) -> None:
    old = Checkpoints(run / "checkpoints", {}, epoch=Epoch.begin(run))
    old.save(1, {}, {"by": "old"}, wait=True)
    new = Checkpoints(run / "checkpoints", {}, epoch=Epoch.begin(run))
    with pytest.raises(RunLost, match="was given up"):
        old.save(2, {}, {"by": "old"}, wait=True)
    new.save(2, {}, {"by": "new"}, wait=True)
    with pytest.raises(RunLost):
        old.mark_not_finite(2)
    assert names(run) == ["step-00000001", "step-00000002"]
    restored = new.restore({})
    assert restored and (restored.step, restored.state["by"]) == (2, "new")


def stages(folder: CheckpointFolder, step: int) -> list[Callable[[], object]]:
    """What writing a checkpoint does, one after the other."""
    return [lambda: folder.begin(step, 0), lambda: folder.commit(step, {}, {"by": "old"}),
            lambda: folder.prune(Keep(0))]  # fmt: skip


@pytest.mark.parametrize("stopped_before", [0, 1, 2])
def test_whenever_it_was_stopped_what_it_does_later_leaves_no_checkpoint(run: Path, stopped_before: int) -> None:
    old = CheckpointFolder(run / "checkpoints", Epoch.begin(run))
    old.open()
    old.begin(1, 0)
    old.commit(1, {}, {"by": "old"})
    work = stages(old, 2)
    for stage in work[:stopped_before]:
        stage()
    new = CheckpointFolder(run / "checkpoints", Epoch.begin(run))
    new.open()
    before = names(run)
    assert not any("partial" in name for name in before)
    new.begin(3, 0)
    for stage in work[stopped_before:]:
        with pytest.raises(RunLost):
            stage()
    new.commit(3, {}, {"by": "new"})
    assert names(run) == sorted([*before, "step-00000003"])


def test_one_that_has_compared_its_word_already_finds_nothing_to_give_a_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between the comparison and the renaming, the only moment that no comparison
    covers."""
    old = CheckpointFolder(run / "checkpoints", Epoch.begin(run))
    old.open()
    old.begin(2, 0)
    new: list[CheckpointFolder] = []

    def check(epoch: Epoch) -> None:
        if not new and (old.partial(2) / "manifest.json").exists():
            new.append(CheckpointFolder(run / "checkpoints", Epoch.begin(run)))
            new[0].open()
            new[0].begin(2, 0)  # the same step

    with monkeypatch.context() as patch:
        patch.setattr(Epoch, "check", check)
        with pytest.raises(FileNotFoundError):
            old.commit(2, {}, {"by": "old"})
    new[0].commit(2, {}, {"by": "new"})
    assert names(run) == ["step-00000002"]
    assert new[0].read(2).state["by"] == "new"


def test_its_metrics_are_refused(run: Path) -> None:
    Epoch.begin(run)
    old = MetricsFile(run, Missing("metrics.jsonl"))
    old.add({"step": 1})
    Epoch.begin(run)
    new = MetricsFile(run, Missing("metrics.jsonl"))
    new.remove_after(0)
    new.add({"step": 1, "by": "new"})
    with pytest.raises(RunLost):
        old.add({"step": 2})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "by": "new"}]
