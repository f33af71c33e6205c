"""``plait stop``: ends a run wherever it runs, by request or at once.

====================  ============================================  =======================================
location of the run   request to save a checkpoint and end          immediate end
====================  ============================================  =======================================
this machine          SIGTERM to its launcher                       SIGINT, which kills ranks; after
                                                                    ``KILL_AFTER`` seconds SIGKILL
Slurm                 a signal to its launcher, and a stop request  scancel
                      in the folder; scancel of waiting jobs
Kubernetes            deletion, with the job's grace period         deletion without a grace period
elsewhere             none: an error names the command and host
====================  ============================================  =======================================

Ranks of a launcher that is killed are killed with it (``die_with_parent``).
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.core.base.errors import LaunchError

if TYPE_CHECKING:
    from plait.core.runs.lock import Held, Holder
    from plait.launch.kubernetes.api import KubernetesNamespace

POLL_SECONDS, SLURM_POLL_SECONDS, REPORT_SECONDS = 0.2, 2.0, 10.0
"""Seconds between two checks whether the run has ended; the same for Slurm, where each check is
work for the cluster's one controller; seconds between two lines that report that the run has not
ended."""
KILL_AFTER = 15.0
"""Seconds after which a launcher that does not end by SIGINT is killed."""


@dataclass(frozen=True)
class StopResult:
    """The result of a stop. message: what happened, in a sentence. ended: True if the run runs no
    more."""

    message: str
    ended: bool


def stop_run(folder: Path, *, at_once: bool, wait: float, say: Callable[[str], None]) -> StopResult:
    """Stop the run in ``folder`` and wait for its end, ``wait`` seconds at most. A run that is not
    running is left as it is. Raises LaunchError if the run cannot be stopped from this host or by
    this user."""
    from plait.api.runs import view_run
    from plait.core.runs.lock import lock_state

    view, held = view_run(folder), lock_state(folder)
    if not view.is_active:
        how = f": it is {view.state}" if view.state != "lost" else ": its launcher is gone"
        return StopResult(f"{view.name} does not run{how}; nothing was stopped", True)
    holder = held.holder if held and held.alive else None
    if view.slurm:
        _stop_slurm(view.slurm, folder, at_once=at_once, say=say)
    elif holder and holder.job.startswith("kubernetes/"):
        name = holder.job.partition("/")[2]
        done = stop_in_cluster(cluster_of(folder), name, at_once=at_once, wait=wait, say=say)
        return StopResult(_ended(folder), True) if not view_run(folder).is_active else done
    else:
        _stop_here(folder, held, at_once=at_once, say=say)

    look = SLURM_POLL_SECONDS if view.slurm else POLL_SECONDS
    if not _wait_until(lambda: not view_run(folder).is_active, wait,
                    lambda: f"waiting for its end: step {view_run(folder).step}", say, look):  # fmt: skip
        return _not_yet(shlex.quote(str(folder)), wait, at_once=at_once)
    return StopResult(_ended(folder), True)


def _not_yet(name: str, wait: float, *, at_once: bool, on: str = "") -> StopResult:
    more = "" if at_once else f"; plait stop {name}{on} --kill ends it at once, without what it has not saved"
    return StopResult(f"{name} still runs after {wait:g} s{more}", False)


def _ended(folder: Path) -> str:
    from plait.api.runs import view_run
    from plait.core.runs.history import newest_checkpoint

    now, newest = view_run(folder), newest_checkpoint(folder)
    kept = f"the same command goes on from step {newest}" if newest else "nothing was saved yet"
    return f"{now.name} is {now.state} after step {max(now.step or 0, 0)}; {kept}"


def _wait_until(over: Callable[[], bool], wait: float, doing: Callable[[], str], say: Callable[[str], None],
             look: float = POLL_SECONDS) -> bool:  # fmt: skip
    """Return True if ``over`` becomes true within ``wait`` seconds. doing: what is waited for, said
    every ``REPORT_SECONDS``. look: seconds between two checks."""
    end, told = time.monotonic() + wait, time.monotonic() + REPORT_SECONDS
    while not over():
        if (now := time.monotonic()) > end:
            return False
        if now > told:
            told = now + REPORT_SECONDS
            say(doing())
        time.sleep(look)
    return True


# ---- on this machine ----


def _stop_here(folder: Path, held: Held | None, *, at_once: bool, say: Callable[[str], None]) -> None:
    holder, name = held.holder if held else None, folder.absolute().name
    if held is None or holder is None:
        raise LaunchError(f"{name}: its lock file cannot be read, so its launcher is unknown. Stop it where it runs.")
    if not held.here:
        raise LaunchError(_elsewhere(folder, held, holder, at_once=at_once))
    if at_once:
        say(f"ending {name} at once; what was not saved is lost")
        _kill(holder)
    else:
        say(f"asking {name} to save and end (process {holder.pid})")
        _signal(holder, signal.SIGTERM)
        _signal(holder, signal.SIGCONT)  # a suspended process handles no other signal


def _elsewhere(folder: Path, held: Held, holder: Holder, *, at_once: bool) -> str:
    """Return a message with the host and the command that stop a run whose launcher cannot be
    reached from here."""
    from plait.core.runs.lock import EXPIRES

    path, host, here = folder.absolute(), holder.host, socket.gethostname()
    command = f"plait stop {shlex.quote(str(path))}" + (" --kill" if at_once else "")
    there = f"on {host}" + (", in the container or namespace of that process" if host == here else "")
    if holder.job:
        there += f", or where squeue shows Slurm job {holder.job.partition('/')[2]}"
    return (
        f"{path.name} is kept going by {holder}, which cannot be reached from {here}, and nothing was stopped. "
        f"Run this {there}: {command} (its folder may have another path there). kill {holder.pid} on {host} has it "
        f"save and end, too. If that host is gone, the run counts as lost {EXPIRES:.0f} s after its last sign of "
        f"life, which was {held.silent:.0f} s ago."
    )


def _kill(holder: Holder) -> None:
    """End a launcher and its ranks by its own second Ctrl-C, so that it can record how the run
    ended; if that fails, by SIGKILL."""
    from plait.core.base.process import process_since

    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT):
        _signal(holder, number)
        time.sleep(POLL_SECONDS)
    end = time.monotonic() + KILL_AFTER
    while process_since(holder.pid, holder.started) is not None:
        if time.monotonic() > end:
            _signal(holder, signal.SIGKILL)
            return
        time.sleep(POLL_SECONDS)


def _signal(holder: Holder, number: signal.Signals) -> None:
    """Send a signal to a launcher's process, never to another process that has its number by now.
    Raises LaunchError if that is not allowed."""
    from plait.core.base.process import process_since

    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(holder.pid)
        try:
            if process_since(holder.pid, holder.started) is not None:
                signal.pidfd_send_signal(descriptor, number)
        except PermissionError:
            raise LaunchError(f"Process {holder.pid} is {holder.user}'s, who alone may stop it.") from None
        finally:
            os.close(descriptor)


# ---- clusters ----


def _stop_slurm(jobs: tuple[str, ...], folder: Path, *, at_once: bool, say: Callable[[str], None]) -> None:
    """Stop all jobs of the run; waiting jobs first, so that none begins when another ends."""
    from plait.launch.run_folder import request_stop
    from plait.launch.slurm import commands as slurm
    from plait.launch.slurm.follow import signal_launcher

    states = {job: slurm.state(job) for job in jobs}
    for job in sorted(jobs, key=lambda one: states[one].name not in slurm.WAITING):
        if at_once or states[job].name in slurm.WAITING:
            say(f"cancelling Slurm job {job}")
            request_stop(folder, job)
            slurm.command("scancel", job)
        elif states[job].name == "RUNNING":
            say(f"asking Slurm job {job} to save and end")
            signal_launcher(job, folder)


def cluster_of(folder: Path) -> KubernetesNamespace:
    """Return the Kubernetes namespace that the run's job names. Raises JobError and LaunchError."""
    from plait.core.job.spec import Job
    from plait.launch.kubernetes.api import KubernetesNamespace

    said = Job.read(folder / "job.toml").kubernetes
    return KubernetesNamespace(said.context, said.namespace)


def stop_in_cluster(
    cluster: KubernetesNamespace, name: str, *, at_once: bool, wait: float, say: Callable[[str], None]
) -> StopResult:
    """Stop a run by the name of its Job or JobSet, and wait for its end, ``wait`` seconds at most.
    Raises LaunchError for an unknown run, or if the cluster refuses."""
    from plait.launch.kubernetes.objects import end, exists, run_in

    run = run_in(cluster, name)
    if run.state in ("ended", "failed"):
        return StopResult(f"{name} does not run: it has {run.state}; nothing was stopped", True)
    say(f"{'ending' if at_once else 'asking'} {run.kind} {name}{' at once' if at_once else ' to save and end'}")
    end(cluster, run, at_once=at_once)
    if not _wait_until(lambda: not exists(cluster, run), wait, lambda: "waiting for its pods", say):
        return _not_yet(name, wait, at_once=at_once, on=f" --on kubernetes:{cluster.namespace}")
    return StopResult(f"{name} is stopped", True)
