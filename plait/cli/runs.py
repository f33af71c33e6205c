"""``plait runs``, ``plait stop`` and ``plait logs``: runs that were started, wherever they run;
``plait view``: runs as a page in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson

SIGNS = ("plan.json", "job.toml", "rings", "timeline")
"""Files and folders, at least one of which a run's folder has as soon as the run is started."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

On = Annotated[
    str,
    typer.Option(
        metavar="PLACE", help="local: a folder here, whatever runs it; kubernetes or kubernetes:NAMESPACE: by its name."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Its name, or its folder's path.")]
Runs = Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of runs that RUN is in (run.folder).")]


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where runs are (run.folder).")] = Path("runs"),
    on: On = "local",
    as_json: AsJson = False,
) -> None:
    """List runs with their state, step, loss and place.

    running; waiting (Slurm has not started it); ended; stopped by a wish; failed; lost (its
    launcher is gone); new (never started).

    Examples:
        plait runs
        plait runs --on kubernetes:research
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
    """Stop a run; its ranks save a checkpoint and end.

    It is stopped wherever it runs. The command that started it resumes it. A run that does not run
    is left as it is. Exit status 1 if it still runs after --wait: --kill ends it then.

    Examples:
        plait stop first
        plait stop first --kill
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
    last: Annotated[int, typer.Option(metavar="N", min=0, help="So many lines of each rank at most; 0: all.")] = 0,
    on: On = "local",
) -> None:
    """Print what a run's ranks have printed.

    Each line begins with its rank. The run may go on, or have ended. Logs of attempts that failed
    are in logs/attempt-N of the run's folder.

    Examples:
        plait logs first --follow
        plait logs first --rank 0 --last 20
    """
    from plait.api.logs import log_lines, pod_log_lines
    from plait.api.runs import find_run, namespace
    from plait.core.base.errors import JobError

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


# ---- the page ----


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders; of several, one can be chosen on the page.")
    ],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen at. Only this machine can reach the default.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen at; 0 for any that is free.")
    ] = 8050,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page of one run to FILE.html, which needs no server, and end."),
    ] = None,
) -> None:
    """Show runs as a page in a browser, live or finished.

    It has a heat map, a timeline, the ranks' grid, step time and loss, memory, predicted against
    measured, attempts, and what plait diagnose says. Ctrl-C ends it.

    Examples:
        plait view runs/first
        plait view runs/first --save page.html
    """
    if save:
        _save(runs, save)
    else:
        _serve(runs, host, port)


def _serve(runs: list[Path], host: str, port: int) -> None:
    """Show runs until Ctrl-C. Raises DataError for a folder that does not exist."""
    from plait.core.runs.folder import check_run_folder
    from plait.view.store import watch

    for run in runs:
        check_run_folder(run)
    for run in runs:
        if not any((run / sign).exists() for sign in SIGNS):
            terminal.text(
                f"{run} holds no run yet: no plan.json, no rings, no timeline. The page waits for them; if no run is "
                "to be started there, name another folder."
            )
    watched = watch(runs)
    for one in watched:
        one.look()  # reads in a thread while the modules below load
    from plait.view.app import make_app, make_server

    server = make_server(make_app(watched, local=host in LOOPBACK), host, port)
    if host not in LOOPBACK:
        terminal.text(f"Whoever reaches {host} can read these runs: there is no password.")
    shown = f"[{host}]" if ":" in host else host
    terminal.say(f"http://{shown}:{server.port}/  (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _save(runs: list[Path], out: Path) -> None:
    """Write the page of a run as one file."""
    from plait.cli.plan import check_folder
    from plait.core.base.errors import JobError
    from plait.view.report import report_run

    if len(runs) > 1:
        raise JobError(f"{len(runs)} runs do not fit on one saved page", key="--save", fix="Name one run")
    if out.suffix not in (".html", ".htm"):
        raise JobError(f"'{out.name}' is no name for a page", key="--save", fix="Name it NAME.html")
    check_folder(out, "--save")
    size, over = report_run(runs[0], out)
    terminal.passed_over(over)
    terminal.say(f"{out}: {size / 2**20:.1f} MiB")
