"""The folder of a run, as launchers keep it: what ranks read, and how starts of the run have fared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DO_NOT_RETRY as DO_NOT_RETRY
from plait.core.base.errors import JobError
from plait.core.base.files import explained, replacing
from plait.core.job.plan import CHANGED, Plan
from plait.core.job.spec import Job
from plait.core.runs.epoch import Epoch
from plait.core.runs.history import newest_checkpoint
from plait.launch.watch import say


def write_run(plan: Plan, folder: Path) -> Plan:
    """Write what ranks read, and what people read of it. Returns the plan as it stands there: its note
    ``changed`` says which settings are others than at the start before. The caller holds the run's lock."""
    job = plan.job
    assert job is not None
    plan = _with_changes(plan, job, folder)
    with explained(f"the run folder {folder} cannot be written", fix="Choose another with run.folder=FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "job.toml") as path:
            path.write_text(job.to_toml())
        plan.write(folder / "plan.json")
    return plan


def keep_plan(plan: Plan, folder: Path) -> None:
    """Write the plan that a launcher holds again, if its run's file is damaged, gone or another's by now. One
    that ranks have refined from it stays. Raises OSError."""
    file = folder / "plan.json"
    with suppress(JobError):
        if (old := plan.of_the_same_job(file)) and old.intent == plan.intent:
            return
    say(f"{file} is not this run's plan any more; it is written again")
    plan.write(file)


def _with_changes(plan: Plan, job: Job, folder: Path) -> Plan:
    """The plan with a note on what has changed since the one in ``folder``, if that can be told."""
    notes = {key: note for key, note in plan.notes.items() if key != CHANGED}
    with suppress(JobError):  # there is none, or none that can be read
        old = Plan.read(folder / "plan.json").job
        if changed := "; ".join(map(str, job.changes(old))) if old else "":
            notes[CHANGED] = changed
            say(f"the run goes on with other settings: {changed}")
    return replace(plan, notes=notes)


STARTS = "starts.json"


def last_job(folder: Path) -> str:
    """The cluster manager's job of the last start that failed; empty if there was none."""
    job, _ = _starts(folder)
    return job


def starts_in_vain(folder: Path, job: str, before: int) -> int:
    """How many starts of the cluster manager's ``job`` in a row, this one last, saved no new checkpoint.
    before: the newest one when this start began."""
    noted, vain = _starts(folder)
    vain = 0 if newest_checkpoint(folder) > before else 1 + (vain if noted == job else 0)
    if Epoch.mine(folder).over:  # the start that took our place counts its own
        return vain
    with replacing(folder / STARTS) as draft:
        draft.write_text(json.dumps({"job": job, "vain": vain}) + "\n")
    return vain


LOST = "lost_hosts.json"


def give_up_hosts(folder: Path, job: str, hosts: Sequence[str]) -> None:
    """Leave word that a cluster manager's ``job`` gets others in place of these hosts of its rank table."""
    with replacing(folder / LOST) as draft:
        draft.write_text(json.dumps({"job": job, "hosts": sorted(hosts)}) + "\n")


def hosts_given_up(folder: Path, job: str) -> set[str]:
    """Hosts of its rank table that a job does not wait for any more."""
    with suppress(OSError, ValueError):
        said = read_table(folder / LOST)
        hosts = said.get("hosts")
        if said.get("job") == job and isinstance(hosts, list):
            return {str(host) for host in cast("list[object]", hosts)}
    return set()


def _starts(folder: Path) -> tuple[str, int]:
    """The job that ``starts.json`` tells of, and its starts in vain; a file that is damaged tells of none."""
    with suppress(OSError, ValueError):
        noted = read_table(folder / STARTS)
        job, vain = noted.get("job"), noted.get("vain")
        if isinstance(job, str) and isinstance(vain, int) and vain >= 0:
            return job, vain
    return "", 0


# ---- a stop that waits for whoever starts the run ----

STOP = "stop.json"


def ask_to_stop(folder: Path, job: str, *, signalled: bool = False) -> None:
    """Leave word that a cluster manager's ``job`` is to end. signalled: its launcher is sent a signal too,
    and needs the word only where that came before it could hear it. A folder that cannot be written has
    none."""
    with suppress(OSError), replacing(folder / STOP) as draft:
        draft.write_text(json.dumps({"job": job, "signalled": signalled}) + "\n")


def forget_stop(folder: Path) -> None:
    """A new job of the run is not to end for what an earlier one was told."""
    with suppress(OSError):
        (folder / STOP).unlink(missing_ok=True)


def asked_to_stop(folder: Path, job: str, *, running: bool = False) -> bool:
    """Whether the job is to end. running: whether its launcher has heard signals all the time."""
    with suppress(OSError, ValueError):
        said = read_table(folder / STOP)
        return said.get("job") == job and not (running and said.get("signalled"))
    return False
