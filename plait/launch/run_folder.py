"""The folder of a run, as launchers keep it: what ranks read, and how starts of the run have fared."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from plait.core.errors import DO_NOT_RETRY as DO_NOT_RETRY
from plait.core.files import explained, replacing
from plait.core.history import newest_checkpoint
from plait.core.plan import Plan

WORKER = "plait.train.worker"
"""The module that every rank of a run is."""


def write_run(plan: Plan, folder: Path) -> None:
    """What ranks read, and what people read of it. The caller holds the run's lock."""
    assert plan.job is not None
    with explained(f"the run folder {folder} cannot be written", fix="Choose another with run.folder=FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "job.toml") as path:
            path.write_text(plan.job.to_toml())
        plan.write(folder / "plan.json")


STARTS = "starts.json"


def last_job(folder: Path) -> str:
    """The cluster manager's job of the last start that failed; empty if there was none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / STARTS).read_text())["job"])
    return ""


def starts_in_vain(folder: Path, job: str, before: int) -> int:
    """How many starts of the cluster manager's ``job`` in a row, this one last, saved no new checkpoint.
    before: the newest one when this start began."""
    file = folder / STARTS
    vain = 0
    with suppress(OSError, ValueError, KeyError):
        noted = json.loads(file.read_text())
        vain = int(noted["vain"]) if noted["job"] == job else 0
    vain = 0 if newest_checkpoint(folder) > before else vain + 1
    with replacing(file) as draft:
        draft.write_text(json.dumps({"job": job, "vain": vain}) + "\n")
    return vain
