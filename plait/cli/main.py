"""``plait``: every verb, and what an error looks like."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated

import typer

from plait import __version__
from plait.cli import (
    check,
    data,
    diagnose,
    doctor,
    init,
    job,
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
    trace,
    train,
    trained,
    view,
)
from plait.cli.renamed import refuse_old_words
from plait.core.base.errors import PlaitError, naming_extras

_USERS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EROFS, errno.ESTALE)
"""What is wrong with a path that was named, or its disk, wherever it is noticed."""

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
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("calibrate")(measure.calibrate)
app.command("job")(job.job)
app.command("export")(trained.export)
app.command("sample")(trained.sample)
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
app.add_typer(trace.app, name="trace")
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a deliberate error is one paragraph, a bug shows its traceback."""
    terminal.prepare()
    try:
        refuse_old_words(sys.argv[1:])
        with naming_extras("this command"):
            app()
    except PlaitError as error:
        print(terminal.fitted(f"plait: {error}", sys.stderr), file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno in _USERS and error.filename is not None:
            print(terminal.fitted(f"plait: {error.filename}: {error.strerror}", sys.stderr), file=sys.stderr)
            sys.exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = io.StringIO()  # what is left unwritten would be tried again at the end
        told = f"plait: what is printed cannot be written: {error.strerror}. Send it elsewhere, or make room."
        print(terminal.fitted(told, sys.stderr), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
