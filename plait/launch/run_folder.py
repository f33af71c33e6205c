"""The folder of a run, as maintained by launchers: the ranks' input, and the outcome of the run's
starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import is_list, read_table
from plait.core.base.errors import DO_NOT_RETRY as DO_NOT_RETRY
from plait.core.base.errors import JobError
from plait.core.base.files import explained, replacing
from plait.core.job.plan import CHANGED, Plan
from plait.core.job.spec import Job
from plait.core.runs.attempts import Epoch
from plait.core.runs.history import newest_checkpoint
from plait.launch.watch import say


def write_run(plan: Plan, folder: Path) -> Plan:
    """Write the plan and the job's settings to the run's folder. Returns the written plan: its note
    ``changed`` lists the settings that differ from the previous start. The caller holds the run's
    lock. Raises JobError if the folder cannot be written."""
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
    """Write the launcher's plan again, if the run's file is damaged, missing or of another job. A
    version that ranks have refined from the launcher's plan stays. Raises OSError."""
    file = folder / "plan.json"
    with suppress(JobError):
        if (old := plan.of_the_same_job(file)) and old.intent == plan.intent:
            return
    say(f"{file} is not this run's plan any more; it is written again")
    plan.write(file)


def _with_changes(plan: Plan, job: Job, folder: Path) -> Plan:
    """Return the plan with a note on the changes since the plan in ``folder``, if there is one."""
    notes = {key: note for key, note in plan.notes.items() if key != CHANGED}
    with suppress(JobError):  # there is no plan, or an unreadable one
        old = Plan.read(folder / "plan.json").job
        if changed := "; ".join(map(str, job.changes(old))) if old else "":
            notes[CHANGED] = changed
            say(f"the run goes on with other settings: {changed}")
    return replace(plan, notes=notes)


# ---- notes between the starts of a cluster manager's job and its followers ----

STARTS, LOST, STOP = "starts.json", "lost_hosts.json", "stop.json"


def write_note(folder: Path, name: str, **values: Any) -> None:
    """Write values as a small JSON file (a note) into the run's folder. Raises OSError."""
    with replacing(folder / name) as draft:
        draft.write_text(json.dumps(values) + "\n")


def read_note(folder: Path, name: str) -> dict[str, Any]:
    """Return the values of a note that ``write_note`` has written; empty if it is missing or
    damaged."""
    with suppress(OSError, ValueError):
        return read_table(folder / name)
    return {}


def last_job(folder: Path) -> str:
    """Return the number or name of the cluster manager's job whose start of the run failed last;
    empty if there was none."""
    return _starts(folder)[0]


def starts_in_vain(folder: Path, job: str, before: int) -> int:
    """Return how many consecutive starts of the cluster manager's ``job``, with this one, saved no
    new checkpoint, and write the number into the folder. before: the newest checkpoint's step when
    this start began."""
    noted, vain = _starts(folder)
    vain = 0 if newest_checkpoint(folder) > before else 1 + (vain if noted == job else 0)
    if not Epoch.mine(folder).over:  # a start that superseded this one keeps the count
        write_note(folder, STARTS, job=job, vain=vain)
    return vain


def _starts(folder: Path) -> tuple[str, int]:
    """Return (the cluster manager's job of the last failed starts, their number without a new
    checkpoint), as noted in the folder."""
    noted = read_note(folder, STARTS)
    job, vain = noted.get("job"), noted.get("vain")
    return (job, vain) if isinstance(job, str) and isinstance(vain, int) and vain >= 0 else ("", 0)


def give_up_hosts(folder: Path, job: str, hosts: Sequence[str]) -> None:
    """Write a note that a cluster manager's ``job`` gets replacements for these hosts of its rank
    table. Raises OSError."""
    write_note(folder, LOST, job=job, hosts=sorted(hosts))


def abandoned_hosts(folder: Path, job: str) -> set[str]:
    """Return the hosts of its rank table that the cluster manager's ``job`` does not wait for any
    more."""
    noted = read_note(folder, LOST)
    hosts: Any = noted.get("hosts")
    return set(map(str, hosts)) if noted.get("job") == job and is_list(hosts) else set()


def request_stop(folder: Path, job: str, *, signalled: bool = False) -> None:
    """Write a note that a cluster manager's ``job`` has to end. signalled: the launcher is sent a
    signal as well, and needs the note only if the signal came before it could be handled. A folder
    that cannot be written gets no note."""
    with suppress(OSError):
        write_note(folder, STOP, job=job, signalled=signalled)


def forget_stop(folder: Path) -> None:
    """Remove the note that asks a job to end: a new job of the run does not obey an earlier job's
    note."""
    with suppress(OSError):
        (folder / STOP).unlink(missing_ok=True)


def stop_requested(folder: Path, job: str, *, running: bool = False) -> bool:
    """Return True if a note in the folder asks the cluster manager's ``job`` to end. running: True
    if its launcher has handled signals all the time, so that a note for a signal does not count."""
    noted = read_note(folder, STOP)
    return noted.get("job") == job and not (running and noted.get("signalled"))
