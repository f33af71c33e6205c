"""``plait runs``, ``plait stop`` and ``plait logs``: runs that were started, wherever they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal

On = Annotated[
    str, typer.Option(help="local: a folder here, whatever runs it; kubernetes or kubernetes:NAMESPACE: by its name.")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Its name, or its folder's path.")]
Runs = Annotated[Path, typer.Option(help="The folder of runs that RUN is in (run.folder).")]


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where runs are (run.folder).")] = Path("runs"),
    on: On = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List runs: their state, step, loss, when they were started, and where.

    running; waiting (Slurm has not started it); ended; stopped by a wish; failed; lost (its
    launcher is gone); new (never started).
    """
    from plait.api.runs import cluster_runs, list_runs, namespace

    cluster = namespace(on)
    terminal.answer(cluster_runs(cluster) if cluster else list_runs(folder), as_json=as_json)


def stop(
    run: RunName,
    folder: Runs = Path("runs"),
    kill: Annotated[
        bool, typer.Option("--kill", help="At once, without what is not saved; also a run that hangs.")
    ] = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for its end.")] = 120.0,
    on: On = "local",
) -> None:
    """Stop a run wherever it runs: its ranks save a checkpoint and end. The same command goes on
    with it.

    A run that does not run is left as it is. Exit status 1 if it still runs after --wait: --kill
    ends it then.
    """
    from plait.api.runs import find_run, namespace
    from plait.api.stopping import stop_in_cluster, stop_run
    from plait.core.base.errors import JobError

    if not 0 <= wait < 1e6:
        raise JobError(f"{wait} is not allowed", key="--wait", fix="Use seconds from 0 on")
    if cluster := namespace(on):
        done = stop_in_cluster(cluster, run, at_once=kill, wait=wait, say=terminal.aside)
    else:
        done = stop_run(find_run(run, folder), at_once=kill, wait=wait, say=terminal.aside)
    terminal.text(done.message)
    raise typer.Exit(0 if done.ended else 1)


def logs(
    run: RunName,
    folder: Runs = Path("runs"),
    rank: Annotated[list[int] | None, typer.Option(metavar="N", help="Of this rank alone. Repeatable.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    last: Annotated[int, typer.Option(metavar="LINES", help="So many lines of each at most; 0: all.")] = 0,
    on: On = "local",
) -> None:
    """Print what ranks have printed, each line with whose it is: of a run that goes on, or has
    ended.

    Logs of attempts that failed are in logs/attempt-N of the run's folder.
    """
    from plait.api.logs import log_lines, pod_log_lines
    from plait.api.runs import find_run, namespace
    from plait.core.base.errors import JobError

    if last < 0:
        raise JobError(f"{last} is not allowed", key="--last", fix="Use 0 or more")
    cluster = namespace(on)
    if cluster and (rank or last):
        raise JobError("is for logs in a run's folder; in a cluster it is what pod 0 prints",
                       key="--rank" if rank else "--last", fix="Leave it out")  # fmt: skip
    lines = (
        pod_log_lines(cluster, run)
        if cluster
        else log_lines(find_run(run, folder), rank or (), last=last, follow=follow)
    )
    for line in lines:
        terminal.say(line)
