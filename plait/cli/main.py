"""``plait``: every verb, and the form of error messages."""

from __future__ import annotations

import errno
import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from plait import __version__
from plait.cli import (
    check,
    data,
    diagnose,
    init,
    lab,
    measure,
    place,
    plan,
    queue,
    reshard,
    runs,
    schedule,
    terminal,
    topology,
    train,
    view,
)
from plait.core.base.errors import JobError, PlaitError, naming_extras

_PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a path that the user named, or of its disk, wherever they are raised."""
REMOVED = {
    r"lab slurm": "Try a run with plait train JOB --on lab:2x1@1gbit, or with plait lab run",
    r"place .*--(compare|literal)": "benchmarks/baselines in Plait's repository has other ways to place",
    r"(place|plan|train) .*place\.method=(mip|brute-force|\w+-fit|gpu-packing|topology-aware)": (
        "Use exact, cpsat or program; benchmarks/baselines has the others"
    ),
    r"export .*--format": "Leave it out; torchtitan reads it with checkpoint.initial_load_in_hf = true",
    r"reshard .*\border=": "Leave it out: benchmarks/reshard.py in Plait's repository compares orders",
    r"queue fit .*--search": "In Plait's repository: python -m benchmarks.forecast_errors TRACE --search N",
    r"diagnose .*(--meta|\.parquet\b)": "In Plait's repository: python -m benchmarks.published_trace TRACE META.yaml",
}
"""What to do instead, by patterns of command lines whose option, setting or command was removed."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, place, train and diagnose large-language-model training when the network is what you wait for.",
)
app.command("init")(init.init)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("place")(place.place)
app.command("reserve")(place.reserve)
app.command("doctor")(check.doctor)
app.command("check")(check.check)
app.command("calibrate")(measure.calibrate)
app.command("job")(init.job)
app.command("export")(train.export)
app.command("sample")(train.sample)
app.command("diagnose")(diagnose.diagnose)
app.command("runs")(runs.runs)
app.command("stop")(runs.stop)
app.command("logs")(runs.logs)
app.command("view")(view.view)
app.command("schedule")(schedule.schedule)
app.command("reshard")(reshard.reshard)
app.add_typer(topology.app, name="topology")
app.add_typer(lab.app, name="lab")
app.add_typer(measure.app, name="measure")
app.add_typer(queue.app, name="queue")
app.add_typer(diagnose.trace, name="trace")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def refuse_peers_options(words: Sequence[str]) -> None:
    """Raise JobError for an option of another framework, which is a key of the job here."""
    if not words or words[0] not in ("train", "plan"):
        return
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        from plait.core.job.framework_names import key_of  # slow to load

        if own := key_of(option):
            problem = f"is {own} of a job here"
            raise JobError(problem, key=f"plait {words[0]}: {option}", fix=f"Write {own}=VALUE behind the job")


def refuse_removed(words: Sequence[str]) -> None:
    """Raise JobError for what was removed. words: the command line behind ``plait``."""
    line = " ".join(words)
    for pattern, instead in REMOVED.items():
        if found := re.match(pattern, line):
            raise JobError("was removed", key=f"plait {found[0]}", fix=instead)


def main() -> None:
    """Run the command line. An error that Plait raises is printed as one paragraph; a bug prints
    its traceback."""
    terminal.prepare()
    try:
        refuse_removed(sys.argv[1:])
        refuse_peers_options(sys.argv[1:])
        with naming_extras("this command"):
            app()
    except PlaitError as error:
        print(terminal.fitted(f"plait: {error}", sys.stderr), file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno in _PATH_ERRNOS and error.filename is not None:
            print(terminal.fitted(f"plait: {error.filename}: {error.strerror}", sys.stderr), file=sys.stderr)
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = io.StringIO()  # else Python would try at exit to write the rest
        told = f"plait: what is printed cannot be written: {error.strerror}. Send it elsewhere, or make room."
        print(terminal.fitted(told, sys.stderr), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
