"""``plait stop``: a run ended wherever it runs, first with grace, then at once.

====================  ============================================  =======================================
a run                 is asked to save and end by                   is ended at once by
====================  ============================================  =======================================
on this machine       SIGTERM to its launcher                       SIGINT, which kills ranks; after
                                                                    ``HARD`` seconds SIGKILL
under Slurm           a signal to its launcher, and a word in the   scancel
                      folder; scancel of what waits
under Kubernetes      deletion, with the grace that the job says    deletion without
elsewhere             nobody: what to run where is said
====================  ============================================  =======================================

Ranks of a launcher that is killed die with it (``die_with_parent``).
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
    from plait.launch.kubernetes_api import KubernetesNamespace

LOOK, SLURM_LOOK, TOLD = 0.2, 2.0, 10.0
"""Seconds between two looks whether it has ended, which may be work for a cluster's one controller, and
between two lines that say that it has not."""
HARD = 15.0
"""Seconds after which a launcher that does not end by SIGINT is killed."""


@dataclass(frozen=True)
class Stopped:
    """told: what happened, in a sentence. ended: whether it runs no more."""

    told: str
    ended: bool


def stop_run(folder: Path, *, at_once: bool, wait: float, say: Callable[[str], None]) -> Stopped:
    """Stop the run in ``folder`` and wait for its end, ``wait`` seconds at most. One that does not run is
    left as it is. Raises LaunchError where nobody here can stop it."""
    from plait.api.runs import view_run
    from plait.core.runs.lock import who_holds

    view, held = view_run(folder), who_holds(folder)
    if not view.going:
        how = f": it is {view.state}" if view.state != "lost" else ": its launcher is gone"
        return Stopped(f"{view.name} does not run{how}; nothing was stopped", True)
    holder = held.holder if held and held.alive else None
    if view.slurm:
        _stop_slurm(view.slurm, folder, at_once=at_once, say=say)
    elif holder and holder.job.startswith("kubernetes/"):
        name = holder.job.partition("/")[2]
        done = stop_in_cluster(cluster_of(folder), name, at_once=at_once, wait=wait, say=say)
        return Stopped(_ended(folder), True) if not view_run(folder).going else done
    else:
        _stop_here(folder, held, at_once=at_once, say=say)

    look = SLURM_LOOK if view.slurm else LOOK
    if not _awaited(lambda: not view_run(folder).going, wait,
                    lambda: f"waiting for its end: step {view_run(folder).step}", say, look):  # fmt: skip
        return _not_yet(shlex.quote(str(folder)), wait, at_once=at_once)
    return Stopped(_ended(folder), True)


def _not_yet(name: str, wait: float, *, at_once: bool, on: str = "") -> Stopped:
    more = "" if at_once else f"; plait stop {name}{on} --kill ends it at once, without what it has not saved"
    return Stopped(f"{name} still runs after {wait:g} s{more}", False)


def _ended(folder: Path) -> str:
    from plait.api.runs import view_run
    from plait.core.runs.history import newest_checkpoint

    now, newest = view_run(folder), newest_checkpoint(folder)
    kept = f"the same command goes on from step {newest}" if newest else "nothing was saved yet"
    return f"{now.name} is {now.state} after step {max(now.step or 0, 0)}; {kept}"


def _awaited(over: Callable[[], bool], wait: float, doing: Callable[[], str], say: Callable[[str], None],
             look: float = LOOK) -> bool:  # fmt: skip
    """Whether it is over within ``wait`` seconds."""
    end, told = time.monotonic() + wait, time.monotonic() + TOLD
    while not over():
        if (now := time.monotonic()) > end:
            return False
        if now > told:
            told = now + TOLD
            say(doing())
        time.sleep(look)
    return True


# ---- here ----


def _stop_here(folder: Path, held: Held | None, *, at_once: bool, say: Callable[[str], None]) -> None:
    holder, name = held.holder if held else None, folder.absolute().name
    if held is None or holder is None:
        raise LaunchError(f"{name} is locked by a file that cannot be read, so that nobody knows whom to stop.")
    if not held.here:
        raise LaunchError(_elsewhere(folder, held, holder, at_once=at_once))
    if at_once:
        say(f"ending {name} at once; what was not saved is lost")
        _kill(holder)
    else:
        say(f"asking {name} to save and end (process {holder.pid})")
        _signal(holder, signal.SIGTERM)
        _signal(holder, signal.SIGCONT)  # one that was stopped hears nothing else


def _elsewhere(folder: Path, held: Held, holder: Holder, *, at_once: bool) -> str:
    """What to do about a run whose launcher cannot be reached from here."""
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
    """End a launcher and its ranks: by its own second Ctrl-C, so that it can tell how the run ended; else by
    force."""
    from plait.core.base.process import process_since

    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT):
        _signal(holder, number)
        time.sleep(LOOK)
    end = time.monotonic() + HARD
    while process_since(holder.pid, holder.started) is not None:
        if time.monotonic() > end:
            _signal(holder, signal.SIGKILL)
            return
        time.sleep(LOOK)


def _signal(holder: Holder, number: signal.Signals) -> None:
    """To that process and no other that has its number by now."""
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
    """All jobs of the run: what waits first, so that none begins when another ends."""
    from plait.launch import slurm
    from plait.launch.run_folder import ask_to_stop
    from plait.launch.slurm_follow import tell_launcher

    states = {job: slurm.state(job) for job in jobs}
    for job in sorted(jobs, key=lambda one: states[one].name not in slurm.WAITING):
        if at_once or states[job].name in slurm.WAITING:
            say(f"cancelling Slurm job {job}")
            ask_to_stop(folder, job)
            slurm.command("scancel", job)
        elif states[job].name == "RUNNING":
            say(f"asking Slurm job {job} to save and end")
            tell_launcher(job, folder)


def cluster_of(folder: Path) -> KubernetesNamespace:
    """The namespace that a run's job names."""
    from plait.core.job.spec import Job
    from plait.launch.kubernetes_api import KubernetesNamespace

    said = Job.read(folder / "job.toml").kubernetes
    return KubernetesNamespace(said.context, said.namespace)


def stop_in_cluster(
    cluster: KubernetesNamespace, name: str, *, at_once: bool, wait: float, say: Callable[[str], None]
) -> Stopped:
    """A run by the name of its Job or JobSet. Raises LaunchError."""
    from plait.launch.kubernetes_runs import end, is_there, run_in

    run = run_in(cluster, name)
    if run.state in ("ended", "failed"):
        return Stopped(f"{name} does not run: it has {run.state}; nothing was stopped", True)
    say(f"{'ending' if at_once else 'asking'} {run.kind} {name}{' at once' if at_once else ' to save and end'}")
    end(cluster, run, at_once=at_once)
    if not _awaited(lambda: not is_there(cluster, run), wait, lambda: "waiting for its pods", say):
        return _not_yet(name, wait, at_once=at_once, on=f" --on kubernetes:{cluster.namespace}")
    return Stopped(f"{name} is stopped", True)
